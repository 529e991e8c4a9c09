"""tcgen05 descriptors, computed from layouts (PTX ISA, "Matrix descriptor" and "Instruction descriptor").

Shared-memory descriptor: start address, leading- and stride-byte offsets in units of 16 bytes, a constant, and the
swizzle. Operands are tiles as TMA writes them: boxes of one swizzle span W by the tile's rows.

- K-major (Q, K): a row is one span; eight rows are SBO = 8*W bytes; LBO is unused and 1. An MMA's depth of 32 bytes
  never leaves a span, so K steps advance by 32 bytes within a box and by rows*W from box to box.
- MN-major (V): a box holds W bytes of head dimension for every key; eight keys are SBO = 8*W bytes, the next W bytes of
  head dimension are LBO = keys*W away. K steps of mma_k keys advance by mma_k*W.
"""

from __future__ import annotations

from .tiles import MMA_K_BYTES
from .types import Operand, SmemDescriptor, Tiles, Umma

SWIZZLE_CODE = {"128B": 2, "64B": 4, "32B": 6}  # bits 61-63
WGMMA_SWIZZLE_CODE = {"128B": 1, "64B": 2, "32B": 3}  # bits 62-63
FORMATS = {"fp16": 0, "bf16": 1}  # kind::f16, bits 7-9 and 10-12
D_FLOAT32 = 1
MAJOR = {"K": 0, "MN": 1}


def smem_descriptor(operand: Operand, major: str, tiles: Tiles) -> SmemDescriptor:
    """The descriptor of one operand's tile without its start address, and the byte offset of every K step."""
    span, rows = operand.swizzle_bytes, operand.rows
    sbo = 8 * span
    if major == "K":
        lbo = 16  # unused by swizzled K-major layouts; the field must hold 1
        per_box = span // MMA_K_BYTES
        steps = tuple(
            (i // per_box) * rows * span + (i % per_box) * MMA_K_BYTES
            for i in range(operand.head_dim * operand.element_bytes // MMA_K_BYTES)
        )
    else:
        lbo = rows * span
        steps = tuple(i * tiles.mma_k * span for i in range(rows // tiles.mma_k))
    base = (lbo >> 4) << 16 | (sbo >> 4) << 32 | 1 << 46 | SWIZZLE_CODE[operand.swizzle] << 61
    return SmemDescriptor(operand.name, major, operand.swizzle, lbo, sbo, base, steps)


def wgmma_descriptor(operand: Operand, major: str, depth: int) -> SmemDescriptor:
    """The same for wgmma (sm_90a), whose descriptor has no version and the swizzle in bits 62-63.

    depth: rows of head dimension or keys of one step.
    """
    span, rows = operand.swizzle_bytes, operand.rows
    sbo = 8 * span
    if major == "K":
        lbo, step_bytes = 16, depth * operand.element_bytes
        per_box = span // step_bytes
        count = operand.head_dim // depth
        steps = tuple((i // per_box) * rows * span + (i % per_box) * step_bytes for i in range(count))
    else:
        lbo = rows * span
        steps = tuple(i * depth * span for i in range(rows // depth))
    base = (lbo >> 4) << 16 | (sbo >> 4) << 32 | WGMMA_SWIZZLE_CODE[operand.swizzle] << 62
    return SmemDescriptor(operand.name, major, operand.swizzle, lbo, sbo, base, steps)


def instruction_descriptor(m: int, n: int, dtype: str, b_major: str) -> int:
    """kind::f16, float32 accumulator, A K-major (or in TMEM), dense, nothing negated."""
    fmt = FORMATS[dtype]
    return D_FLOAT32 << 4 | fmt << 7 | fmt << 10 | MAJOR[b_major] << 16 | (n >> 3) << 17 | (m >> 4) << 24


def make_umma(operands: tuple[Operand, ...], tiles: Tiles, dtype: str) -> tuple[Umma, Umma]:
    """S = Q K^T with both operands in shared memory, and O += P V with P in tensor memory."""
    q, k, v, _ = operands
    m, n, dv = tiles.tile_m, tiles.tile_n, v.head_dim
    qk = Umma(
        "qk",
        m,
        n,
        tiles.mma_k,
        tiles.qk_k_steps,
        instruction_descriptor(m, n, dtype, "K"),
        smem_descriptor(q, "K", tiles),
        smem_descriptor(k, "K", tiles),
    )
    pv = Umma(
        "pv",
        m,
        dv,
        tiles.mma_k,
        tiles.pv_k_steps,
        instruction_descriptor(m, dv, dtype, "MN"),
        None,
        smem_descriptor(v, "MN", tiles),
    )
    return qk, pv
