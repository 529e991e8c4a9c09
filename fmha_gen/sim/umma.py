"""tcgen05.mma: operand and accumulator layouts, footprints and numerics.

Sources: the canonical-layout and data-path-layout sections of the PTX ISA (9.x). What the hardware may accept but this
module does not model is refused by name.

Storage (the machine's): shared memory of a CTA is a C-contiguous uint8 array [bytes], bytes % 16 == 0; tensor memory of
a CTA is a uint32 array [128 lanes, 512 columns]. Addresses are CTA-local. Every canonical operand layout is made of
16-byte chunks, so operands are gathered by chunk.

Numerics: products are exact and one instruction's K of them is summed in float64 with the accumulator, then rounded
once to float32. The hardware's own order and internal width differ in the low bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from .tensormap import CHUNK_BYTES, swizzle_address
from .tmem_shapes import LdStMap, TmemShapeError, ldst_map
from .umma_desc import InstrDesc, SmemDesc, UmmaError, decode_instr_desc, decode_smem_desc

__all__ = [
    "Footprint",
    "InstrDesc",
    "LdStMap",
    "Mma",
    "SmemDesc",
    "TmemRect",
    "TmemShapeError",
    "UmmaError",
    "decode_instr_desc",
    "decode_operand",
    "decode_smem_desc",
    "execute",
    "footprint",
    "ldst_map",
]

TMEM_LANES, TMEM_COLS = 128, 512


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma with its operands as the issuing thread has evaluated them.

    d: TMEM address (lane << 16 | column). a: 64-bit descriptor, or a TMEM address when a_in_tmem. b: 64-bit descriptor.
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
    """Cells lanes lane0 .. lane0+lanes-1 x columns col0 .. col0+cols-1 of one CTA's tensor memory."""

    lane0: int
    lanes: int
    col0: int
    cols: int


@dataclass(frozen=True, eq=False)
class Footprint:
    """What one MMA touches in one CTA of its group.

    smem_chunks: sorted unique int64, 16-byte chunks read (chunk c is bytes 16c .. 16c+15), A and B together.
    tmem_reads: A where it is in TMEM, and D when accumulating. tmem_writes: D.
    """

    smem_chunks: NDArray[np.int64]
    tmem_reads: tuple[TmemRect, ...]
    tmem_writes: tuple[TmemRect, ...]


# ---------------------------------------------------------------- operands


@dataclass(frozen=True, eq=False)
class _Operand:
    """16-byte chunks of one MMA operand: int64 [rows, chunks of K] (K-major) or [k, chunks of rows] (MN-major)."""

    chunks: NDArray[np.int64]
    last: int


@lru_cache(maxsize=16384)
def _operand(desc: int, rows: int, k: int, element_bytes: int, major: str) -> _Operand:
    d = decode_smem_desc(desc)
    k_bytes, mn_bytes = k * element_bytes, rows * element_bytes
    if d.swizzle_bytes:
        _check_swizzled_start(desc, d, k_bytes if major == "k" else min(mn_bytes, d.swizzle_bytes))
    span = d.swizzle_bytes or CHUNK_BYTES  # bytes of one row of a core matrix
    if major == "k":
        row, byte = (
            np.arange(rows, dtype=np.int64)[:, None],
            np.arange(0, k_bytes, CHUNK_BYTES, dtype=np.int64)[None, :],
        )
        address = d.start + row // 8 * d.sbo + row % 8 * span + byte // span * d.lbo + byte % span
    else:
        kk, byte = np.arange(k, dtype=np.int64)[:, None], np.arange(0, mn_bytes, CHUNK_BYTES, dtype=np.int64)[None, :]
        # Without a swizzle the two offsets change roles.
        along_mn, along_k = (d.lbo, d.sbo) if d.swizzle_bytes else (d.sbo, d.lbo)
        address = d.start + byte // span * along_mn + byte % span + kk % 8 * span + kk // 8 * along_k
    chunks = swizzle_address(address, d.swizzle_bytes) // CHUNK_BYTES
    return _Operand(chunks, int(chunks.max()))


def _check_swizzled_start(desc: int, d: SmemDesc, run_bytes: int) -> None:
    """The swizzle pattern (8 rows of the span) must start where absolute addresses put it, as base offset 0 says."""
    what = f"shared memory descriptor {desc:#018x}: start {d.start:#x}"
    if d.start % (8 * d.swizzle_bytes) >= d.swizzle_bytes:
        raise UmmaError(
            f"{what} lies in row {d.start // d.swizzle_bytes % 8} of its {d.swizzle_bytes}-byte swizzle pattern; with "
            f"base offset 0 it must lie in row 0: align the buffer to {8 * d.swizzle_bytes} bytes"
        )
    if d.start % d.swizzle_bytes + run_bytes > d.swizzle_bytes:
        raise UmmaError(
            f"{what} is {d.start % d.swizzle_bytes} bytes into a {d.swizzle_bytes}-byte row and the instruction reads "
            f"{run_bytes} bytes of it: it leaves the row"
        )


def _load(smem: NDArray[np.uint8], operand: _Operand, fmt: str) -> NDArray[np.float64]:
    if operand.last >= smem.size // CHUNK_BYTES:
        raise UmmaError(f"MMA operand reads shared byte {operand.last * 16 + 15:#x}; the CTA has {smem.size:#x} bytes")
    raw = np.take(smem.reshape(-1, CHUNK_BYTES), operand.chunks, axis=0)
    return decode_operand(raw.reshape(raw.shape[0], -1), fmt)


def _small_float_table(exponent_bits: int, mantissa_bits: int, has_inf: bool) -> NDArray[np.float64]:
    """All 256 values of an 8-bit float. Without infinities only the all-ones pattern is NaN (e4m3)."""
    bias, top = (1 << exponent_bits - 1) - 1, (1 << exponent_bits) - 1
    table = np.empty(256)
    for code in range(256):
        exponent, mantissa = code >> mantissa_bits & top, code & (1 << mantissa_bits) - 1
        if exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias)
        if has_inf and exponent == top:
            value = np.inf if mantissa == 0 else np.nan
        if not has_inf and code & 0x7F == 0x7F:
            value = np.nan
        table[code] = -value if code >> 7 else value
    return table


_TABLES = {"e4m3": _small_float_table(4, 3, False), "e5m2": _small_float_table(5, 2, True)}


def decode_operand(raw: NDArray[np.uint8], fmt: str) -> NDArray[np.float64]:
    """float64 values of packed elements: uint8 [..., bytes] -> float64 [..., bytes / element size]."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        if fmt == "bf16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if fmt == "f16":
            return raw.view(np.float16).astype(np.float64)
        if fmt == "tf32":  # the low 13 mantissa bits are not read
            return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
        return _TABLES[fmt][raw]


# ---------------------------------------------------------------- accumulator layout


@dataclass(frozen=True)
class _LaneBlock:
    """Rows row0.. of a CTA's D (and of its A in TMEM) are in lanes lane0..; columns n0.. of D start at column 0."""

    row0: int
    rows: int
    lane0: int
    n0: int
    cols: int


@cache
def _lane_blocks(idesc: InstrDesc) -> tuple[_LaneBlock, ...]:
    """Data-path layout of D in one CTA (PTX ISA layouts D, F, A and B)."""
    if idesc.rows == 128:  # cta_group 1 M 128 (D), cta_group 2 M 256 (A)
        return (_LaneBlock(0, 128, 0, 0, idesc.n),)
    if idesc.cta_group == 1:  # M 64 (F): 16 rows in the first or second half of each warp's lanes
        return tuple(_LaneBlock(16 * i, 16, 32 * i, 0, idesc.n) for i in range(4))
    half = idesc.n // 2  # cta_group 2 M 128 (B): 64 rows, the upper lanes hold the right half of the columns
    return _LaneBlock(0, 64, 0, 0, half), _LaneBlock(0, 64, 64, half, half)


@lru_cache(maxsize=65536)
def _rects(idesc: InstrDesc, address: int, cols: int, what: str) -> tuple[TmemRect, ...]:
    """TMEM cells of D (cols 0: as the layout says) or of A (cols: columns of the operand), one rect per lane block."""
    lane, col = address >> 16 & 0xFFFF, address & 0xFFFF
    lanes_ok = (0, 16) if idesc.cta_group == 1 and idesc.m == 64 else (0,)
    if lane not in lanes_ok:
        raise UmmaError(f"{what} at TMEM {address:#010x}: lane {lane}; M {idesc.m} must start at lane {lanes_ok}")
    rects = tuple(TmemRect(b.lane0 + lane, b.rows, col, cols or b.cols) for b in _lane_blocks(idesc))
    if col + rects[0].cols > TMEM_COLS:
        raise UmmaError(f"{what} at TMEM {address:#010x}: columns {col} + {rects[0].cols} exceed {TMEM_COLS}")
    return rects


def _a_cols(idesc: InstrDesc) -> int:
    return idesc.k * idesc.element_bytes // 4


def _a_operand(mma: Mma) -> _Operand:
    i = mma.idesc
    return _operand(mma.a, i.rows, i.k, i.element_bytes, i.a_major)


def _b_operand(mma: Mma) -> _Operand:
    i = mma.idesc
    return _operand(mma.b, i.b_rows, i.k, i.element_bytes, i.b_major)


@lru_cache(maxsize=16384)
def footprint(mma: Mma) -> Footprint:
    """Footprint of `mma` in each CTA of its group (the same CTA-local addresses in both under cta_group 2)."""
    chunks = [_b_operand(mma).chunks.reshape(-1)]
    reads: tuple[TmemRect, ...] = ()
    if mma.a_in_tmem:
        reads = _rects(mma.idesc, mma.a, _a_cols(mma.idesc), "A")
        if mma.idesc.a_major != "k":
            raise UmmaError("A in TMEM is K-major; the instruction descriptor says MN-major")
    else:
        chunks.append(_a_operand(mma).chunks.reshape(-1))
    writes = _rects(mma.idesc, mma.d, 0, "D")
    return Footprint(np.unique(np.concatenate(chunks)), reads + (writes if mma.accumulate else ()), writes)


# ---------------------------------------------------------------- execution


def execute(mmas: Sequence[Mma], smem: Sequence[NDArray[np.uint8]], tmem: Sequence[NDArray[np.uint32]]) -> None:
    """Execute `mmas` in order. smem, tmem: one array per CTA of the group, the leader first.

    Neighbours that accumulate into the same D are computed together, with the same bits as one after the other.
    """
    start = 0
    for end in range(1, len(mmas) + 1):
        if end == len(mmas) or not _continues(mmas[start], mmas[end]):
            _execute_run(mmas[start:end], smem, tmem)
            start = end


def _continues(first: Mma, nxt: Mma) -> bool:
    """Whether `nxt` only adds to what `first` began, and reads nothing that the run writes."""
    if nxt.idesc is not first.idesc or nxt.d != first.d or not nxt.accumulate or nxt.a_in_tmem != first.a_in_tmem:
        return False
    if not nxt.a_in_tmem:
        return True
    d = _rects(first.idesc, first.d, 0, "D")[0]
    return all(a & 0xFFFF >= d.col0 + d.cols or (a & 0xFFFF) + _a_cols(first.idesc) <= d.col0 for a in (first.a, nxt.a))


def _execute_run(run: Sequence[Mma], smem: Sequence[NDArray[np.uint8]], tmem: Sequence[NDArray[np.uint32]]) -> None:
    idesc = run[0].idesc
    if len(smem) != idesc.cta_group or len(tmem) != idesc.cta_group:
        raise UmmaError(
            f"cta_group::{idesc.cta_group} needs {idesc.cta_group} CTAs' memories, got {len(smem)}, {len(tmem)}"
        )
    for mma in run:
        footprint(mma)  # validates
    b = _gather_b(run, smem)
    for cta in range(idesc.cta_group):
        a_smem = None if run[0].a_in_tmem else _gather_a(run, smem[cta])
        for block, rect in zip(_lane_blocks(idesc), _rects(idesc, run[0].d, 0, "D"), strict=True):
            a = (
                _gather_a_tmem(run, block, tmem[cta])
                if a_smem is None
                else a_smem[:, block.row0 : block.row0 + block.rows]
            )
            cells = tmem[cta][rect.lane0 : rect.lane0 + rect.lanes, rect.col0 : rect.col0 + rect.cols]
            _accumulate(cells, a, b[:, :, block.n0 : block.n0 + block.cols], run[0].accumulate)


def _gather_a(run: Sequence[Mma], smem: NDArray[np.uint8]) -> NDArray[np.float64]:
    """float64 [len(run), rows, K]."""
    idesc = run[0].idesc
    values = [_load(smem, _a_operand(m), idesc.a_format) for m in run]
    a = np.stack([v.T for v in values] if idesc.a_major == "mn" else values)
    return -a if idesc.negate_a else a


def _gather_b(run: Sequence[Mma], smem: Sequence[NDArray[np.uint8]]) -> NDArray[np.float64]:
    """float64 [len(run), K, N], the CTAs' halves of N side by side."""
    idesc = run[0].idesc
    halves = []
    for memory in smem:
        values = np.stack([_load(memory, _b_operand(m), idesc.b_format) for m in run])
        halves.append(values if idesc.b_major == "mn" else values.transpose(0, 2, 1))
    b = halves[0] if len(halves) == 1 else np.concatenate(halves, axis=2)
    return -b if idesc.negate_b else b


def _gather_a_tmem(run: Sequence[Mma], block: _LaneBlock, tmem: NDArray[np.uint32]) -> NDArray[np.float64]:
    """float64 [len(run), block rows, K]; elements are packed into 32-bit cells, low bits first."""
    idesc = run[0].idesc
    cols, out = _a_cols(idesc), []
    for mma in run:
        lane, col = block.lane0 + (mma.a >> 16 & 0xFFFF), mma.a & 0xFFFF
        cells = np.ascontiguousarray(tmem[lane : lane + block.rows, col : col + cols])
        out.append(decode_operand(cells.view(np.uint8), idesc.a_format))
    a = np.stack(out)
    return -a if idesc.negate_a else a


def _accumulate(cells: NDArray[np.uint32], a: NDArray[np.float64], b: NDArray[np.float64], accumulate: bool) -> None:
    """cells [rows, cols] (float32 bits) := (cells if accumulate) + a[i] @ b[i] for each i, rounded after each."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.matmul(a, b)
        acc = cells.view(np.float32).astype(np.float64) if accumulate else None
        for product in products:
            total = product if acc is None else np.add(acc, product, out=product)
            rounded = total.astype(np.float32)
            acc = rounded.astype(np.float64)
    cells[:] = rounded.view(np.uint32)
