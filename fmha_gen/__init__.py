"""fmha_gen: ahead-of-time compiler of fused multi-head attention kernels and the artifacts that ship them."""

__version__ = "0.1.0"
