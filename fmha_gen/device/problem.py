"""The scalars of one launch, as kernels pass them between their roles."""

from __future__ import annotations

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """Launch values: Int64 address and strides (elements) of LSE, Int32 sizes, Float32 scale * log2(e)."""

    lse: Any
    lse_stride_b: Any
    lse_stride_h: Any
    lse_stride_s: Any
    batch: Any
    num_heads_q: Any
    num_heads_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    softmax_scale_log2: Any
    heads_per_section: Any = None
