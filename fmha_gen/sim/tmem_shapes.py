"""Register layouts of tcgen05.ld and tcgen05.st: which tensor-memory cell each register of each thread is.

Sources: the data-movement-shape sections of the PTX ISA; the 16-lane shapes agree with the public CuTe copy traits of
sm_100. A warp reaches only lanes 32*(warp % 4) .. +31; the 16-lane shapes start at the first or at the middle of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

# shape -> (lanes, 32-bit columns of one repetition, registers of one repetition, largest repetition)
_SHAPES = {
    "32x32b": (32, 1, 1, 128),
    "16x64b": (16, 2, 1, 128),
    "16x128b": (16, 4, 2, 64),
    "16x256b": (16, 8, 4, 32),
    "16x32bx2": (16, 1, 1, 128),
}
SHAPES = tuple(_SHAPES)


class TmemShapeError(ValueError):
    """A shape or repetition that tcgen05.ld/st does not have."""


@dataclass(frozen=True, eq=False)
class LdStMap:
    """One tcgen05.ld/st layout.

    lane, col: int64 [32 threads, regs], relative to the instruction's TMEM address.
    packed: a register holds the low 16 bits of column `col` (its low half) and of column `col + 1` (its high half).
    lanes: lanes of the shape, 32 or 16. cols: columns spanned from the address (16x32bx2: up to the end of its second
    half). dense: register r of thread t is lane t, column r (32x32b, not packed), so a slice does.
    """

    lane: NDArray[np.int64]
    col: NDArray[np.int64]
    packed: bool
    lanes: int
    cols: int
    dense: bool

    @property
    def num_regs(self) -> int:
        return int(self.lane.shape[1])


@cache
def ldst_map(shape: str, num: int, packed: bool = False, half_split: int = 0) -> LdStMap:
    """Layout of ``tcgen05.ld/st.shape.xnum``; packed is ``.pack::16b`` or ``.unpack::16b``.

    half_split: immHalfSplitoff of 16x32bx2 in columns, the distance of lanes 16..31's threads.
    Raises TmemShapeError for a shape or repetition that does not exist.
    """
    if shape not in _SHAPES:
        raise TmemShapeError(f"tcgen05.ld/st: shape {shape!r}; known are {', '.join(_SHAPES)}")
    lanes, _, reg_unit, largest = _SHAPES[shape]
    if num not in (1, 2, 4, 8, 16, 32, 64, 128) or num > largest:
        raise TmemShapeError(f"tcgen05.ld/st.{shape}: x{num}; repetitions are powers of two up to {largest}")
    if half_split and shape != "16x32bx2":
        raise TmemShapeError(f"tcgen05.ld/st.{shape}: a half split offset belongs to 16x32bx2 only")
    t = np.arange(32, dtype=np.int64)[:, None]
    r = np.arange(num * reg_unit, dtype=np.int64)[None, :]
    lane, col = _cells(shape, t, r)
    if packed:
        col = 2 * col
    if shape == "16x32bx2":
        col = col + half_split * (t // 16)
    lane, col = np.broadcast_to(lane, (32, r.size)).copy(), np.broadcast_to(col, (32, r.size)).copy()
    cols = int(col.max()) + (2 if packed else 1)
    return LdStMap(lane, col, packed, lanes, cols, shape == "32x32b" and not packed)


def _cells(shape: str, t: NDArray[np.int64], r: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(lane, column) of register r of thread t, unpacked and without a half split."""
    if shape == "32x32b":
        return t + 0 * r, r + 0 * t
    if shape == "16x64b":
        return t // 4 + 8 * (t % 2) + 0 * r, t // 2 % 2 + 2 * r
    if shape == "16x128b":
        return t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
    if shape == "16x256b":
        return t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
    return t % 16 + 0 * r, r + 0 * t
