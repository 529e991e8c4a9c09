"""The scalars of one launch, as kernels pass them between their roles."""

from __future__ import annotations

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """Launch values: Int32 sizes, Float32 scale * log2(e), Int64 address and strides (elements) of LSE.

    A field is None in kernels without the parameter.
    """

    batch: Any
    num_heads_q: Any
    num_heads_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    softmax_scale_log2: Any
    lse: Any = None
    lse_stride_b: Any = None
    lse_stride_h: Any = None
    lse_stride_s: Any = None
    heads_per_section: Any = None
