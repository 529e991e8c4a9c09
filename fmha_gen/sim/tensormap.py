"""Tensor maps: the simulator's form of a CUtensorMap, its rules, and the addresses that one box copy touches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

PARAM_BYTES = 128  # a tensor map is a 128-byte, 64-byte aligned kernel parameter


@dataclass(frozen=True)
class BoxPlan:
    """Where one box copy reads and writes, in units of `unit_bytes` (16, or one element where 16 bytes straddle a bound).

    smem: int64 [n], absolute shared byte address of each unit, after the swizzle.
    gmem: int64 [n], global byte address of each unit (meaningless where not valid).
    valid: bool [n], or None when every unit is inside the tensor.
    box_bytes: bytes that the copy counts on its mbarrier (out-of-bounds parts count too).
    """

    unit_bytes: int
    smem: np.ndarray
    gmem: np.ndarray
    valid: np.ndarray | None
    box_bytes: int


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map (interleave none). Dimension 0 is innermost; strides_bytes has rank-1 entries, of dims 1...

    element: "u8 u16 u32 s32 u64 s64 f16 bf16 f32 f64 f32_ftz tf32 tf32_ftz"; swizzle: "none 32B 64B 128B";
    fill: "zero" or "nan".  Raises TensorMapError at construction for anything that cuTensorMapEncodeTiled refuses.
    """

    element: str
    address: int
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    swizzle: str = "none"
    fill: str = "zero"
    interleave: str = "none"

    @property
    def rank(self) -> int:
        return len(self.extents)

    def box_plan(self, coords: Sequence[int], smem_addr: int) -> BoxPlan:
        """Units of the box at `coords` (elements, s32, innermost first) with its shared image at CTA-local `smem_addr`.

        Raises TensorMapError for a wrong number of coordinates or an `smem_addr` that is not 128-byte aligned.
        """
        raise NotImplementedError

    def fill_unit(self, unit_bytes: int) -> np.ndarray:
        """uint8 [unit_bytes] that a load writes for a unit outside the tensor."""
        raise NotImplementedError
