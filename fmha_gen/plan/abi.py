"""The kernel's parameters: one canonical order, from which a variant takes what it has.

Tensor maps (grid constants), pointers, 64-bit integers, then 32-bit values. A feature appends a named group after the
common parameters. Offsets follow the assembler's rule: it aligns absolute addresses in the constant bank, whose
parameter area starts at an architecture's own base.
"""

from __future__ import annotations

from ..arch import Arch
from ..manifest import PARAM_SIZES, Param
from ..spec import KernelSpec
from .types import Operand

COMMON: tuple[tuple[str, str], ...] = (
    ("tma_q", "tensor_map"),
    ("tma_k", "tensor_map"),
    ("tma_v", "tensor_map"),
    ("tma_o", "tensor_map"),
    ("lse", "pointer"),
    ("lse_stride_b", "i64"),
    ("lse_stride_h", "i64"),
    ("lse_stride_s", "i64"),
    ("batch", "i32"),
    ("num_heads_q", "i32"),
    ("num_heads_kv", "i32"),
    ("seqlen_q", "i32"),
    ("seqlen_k", "i32"),
    ("softmax_scale_log2", "f32"),
)
LSE_PARAMS = ("lse", "lse_stride_b", "lse_stride_h", "lse_stride_s")
NULLABLE = ("lse",)
# schedule -> its group of parameters
SCHEDULE_GROUPS: dict[str, tuple[tuple[str, str], ...]] = {
    "static_persistent": (),
    "longest_first": (("heads_per_section", "i32"),),
    "paired": (),
    "balanced": (),
}
TENSOR_MAP_ALIGN = 64


def make_params(spec: KernelSpec, operands: tuple[Operand, ...], arch: Arch) -> tuple[Param, ...]:
    """Parameters with offsets relative to the first, as the cubin's parameter table has them."""
    assert spec.schedule is not None
    names = [*COMMON, *SCHEDULE_GROUPS[spec.schedule]]
    maps = {f"tma_{op.name}": op.tensor_map for op in operands}
    out, address = [], arch.param_base_bytes
    for name, kind in names:
        if not spec.lse and name in LSE_PARAMS:
            continue
        size = PARAM_SIZES[kind]
        align = TENSOR_MAP_ALIGN if kind == "tensor_map" else size
        address = -(-address // align) * align
        out.append(Param(name, kind, address - arch.param_base_bytes, size, maps.get(name), name in NULLABLE))
        address += size
    return tuple(out)


def params_bytes(params: tuple[Param, ...]) -> int:
    """Size of the parameter area."""
    return params[-1].offset + params[-1].size
