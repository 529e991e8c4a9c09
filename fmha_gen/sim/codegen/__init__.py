"""Native code for straight-line runs of register instructions (LLVM through llvmlite)."""
