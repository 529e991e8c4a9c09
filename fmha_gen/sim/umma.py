"""tcgen05 data semantics: descriptors, operand and accumulator layouts, numerics, and TMEM load/store shapes.

Storage conventions (the machine's): shared memory of a CTA is a C-contiguous uint8 array [bytes], bytes % 16 == 0;
tensor memory of a CTA is a uint32 array [128 lanes, 512 columns]. Addresses are CTA-local.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np


class UmmaError(ValueError):
    """A descriptor or shape that tcgen05 does not accept, or that this simulator does not model; the text says which."""


@dataclass(frozen=True)
class SmemDesc:
    """A decoded 64-bit shared memory descriptor; start, lbo and sbo in bytes, swizzle_bytes 0 (none), 32, 64 or 128."""

    start: int
    lbo: int
    sbo: int
    swizzle_bytes: int


@dataclass(frozen=True)
class InstrDesc:
    """A decoded 32-bit instruction descriptor. a_format etc: "f16 bf16 tf32 e4m3 e5m2"; major: "k" or "mn"."""

    kind: str
    cta_group: int
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    a_major: str
    b_major: str
    negate_a: bool
    negate_b: bool


def decode_smem_desc(desc: int) -> SmemDesc:
    """Decode and validate (cached)."""
    raise NotImplementedError


def decode_instr_desc(idesc: int, kind: str, cta_group: int) -> InstrDesc:
    """Decode and validate (cached). kind: "f16", "tf32" or "f8f6f4"."""
    raise NotImplementedError


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma, operands already evaluated by the issuing thread.

    d: TMEM address (lane << 16 | column). a: 64-bit descriptor, or TMEM address when a_in_tmem. b: 64-bit descriptor.
    accumulate: the enable-input-d predicate (False: D = A*B).
    """

    idesc: InstrDesc
    d: int
    a: int
    b: int
    accumulate: bool
    a_in_tmem: bool = False


@dataclass(frozen=True)
class TmemRect:
    """Cells lanes[lane0:lane0+lanes] x columns[col0:col0+cols] of one CTA's TMEM."""

    lane0: int
    lanes: int
    col0: int
    cols: int


@dataclass(frozen=True)
class Footprint:
    """What one MMA touches in the CTA of rank `cta` of its group.

    smem_chunks: sorted unique int64 array of 16-byte chunk indices read (chunk c = bytes 16c..16c+15); the A and B parts.
    tmem_reads: rects read (A in TMEM; D when accumulating). tmem_writes: rects written (D).
    """

    smem_chunks: np.ndarray
    tmem_reads: tuple[TmemRect, ...]
    tmem_writes: tuple[TmemRect, ...]


def footprint(mma: Mma, cta: int = 0) -> Footprint:
    """Footprint in CTA `cta` (0, or 0/1 under cta_group::2). Cached by value."""
    raise NotImplementedError


def execute(mmas: Sequence[Mma], smem: Sequence[np.ndarray], tmem: Sequence[np.ndarray]) -> None:
    """Execute in order. smem/tmem: one array per CTA of the group. Consecutive MMAs into the same D (same idesc) are
    batched; the result has the same bits as one call per MMA."""
    raise NotImplementedError


@dataclass(frozen=True)
class LdStMap:
    """tcgen05.ld/st mapping. lane, col: int64 [32 threads, regs], relative to the instruction's TMEM address.

    packed: each register holds the low 16 bits of columns col (low half) and col + 1 (high half).
    lanes: number of lanes of the shape (32 or 16). cols: columns spanned from the address.
    """

    lane: np.ndarray
    col: np.ndarray
    packed: bool
    lanes: int
    cols: int

    @property
    def num_regs(self) -> int:
        return int(self.lane.shape[1])


def ldst_map(shape: str, num: int, packed: bool = False, half_split: int = 0) -> LdStMap:
    """Mapping of tcgen05.ld/st `.shape.xnum` (cached). half_split: immHalfSplitoff of 16x32bx2, in columns."""
    raise NotImplementedError
