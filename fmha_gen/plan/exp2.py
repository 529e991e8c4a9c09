"""How many of a row's exponentials run on the FMA pipe instead of the special-function unit, and which ones.

An emulated exponential is a cubic on the fraction and an integer add on the exponent, two at a time: about 4 issue
slots for one MUFU less. Every block of a kernel emulates the same elements, masked or not, so that a row gets the same
bits wherever its blocks fall.
"""

from __future__ import annotations

from ..arch import Arch
from ..errors import PlanError
from ..spec import KernelSpec
from . import model
from .types import Exp2, Tiles

# 2^f ~ c0 + c1 f + c2 f^2 + c3 f^3 on [0, 1): c0 = 1 exactly, so that -inf gives +0 (FlashAttention-4's constants;
# largest relative error 8.8e-5, below the rounding of P to bf16).
COEFFICIENTS = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)

# Emulated pairs hold more values at a time than the MUFU's. Beside a row of more than 128 that is what spills: with
# softmax at tile_n + 64 registers and tile_n 160 and 192, (64, 64) and (96, 96) spill 8 to 24 bytes at 32 (full mask)
# and 42 to 66 (causal too) emulated exponentials, and nothing at 24 and fewer (ptxas 13.4.59, 2026-11-30).
WIDE_TILE_N, WIDE_MAX = 128, 16


def max_emulated(tiles: Tiles) -> int:
    """All chunks but the last, whose P is awaited most urgently, and whose MUFU results come without a chain."""
    return (tiles.num_chunks - 1) * tiles.chunk_cols


def auto_exp2(spec: KernelSpec, tiles: Tiles, arch: Arch) -> tuple[int, str]:
    """The even number with the smallest modelled bound within the MUFU cap, the fewest of those; and why.

    Wide KV blocks get at most `WIDE_MAX`, whatever the model says: more would spill.
    """
    d, dv, n = spec.head_dim_qk, spec.head_dim_v, tiles.tile_n
    cap = model.mufu_cap(d, dv, spec.mask, n, arch)
    most = max_emulated(tiles) if n <= WIDE_TILE_N else min(max_emulated(tiles), WIDE_MAX)
    best = min(
        range(0, most + 1, 2),
        key=lambda e: (model.mufu_per_row(n, e) > cap, model.predict(d, dv, n, e, arch).bound_clk, e),
    )
    b = model.predict(d, dv, n, best, arch)
    why = (
        f"model: {b.mufu_per_row} MUFU per row, at most {cap}; clocks MMA {b.mma_clk:.0f}, MUFU {b.mufu_clk:.0f}, "
        f"issue {b.issue_clk:.0f}: bound by {b.limiter}"
    )
    if best == WIDE_MAX and n > WIDE_TILE_N:
        why += f"; at most {WIDE_MAX} emulated beside a row of {n} registers"
    return best, why


def make_exp2(emulated: int, tiles: Tiles, where: str) -> Exp2:
    """Spread the pairs evenly: over the chunks but the last, and within each chunk."""
    limit = max_emulated(tiles)
    if emulated % 2 or not 0 <= emulated <= limit:
        raise PlanError(
            f"{where}: exp2_emulation={emulated}: an even number of a row's {tiles.tile_n} exponentials per block, all "
            f"outside the last {tiles.chunk_cols}: 0 to {limit}; use {min(max(emulated // 2 * 2, 0), limit)}"
        )
    chunks, pairs_per_chunk = tiles.num_chunks - 1, tiles.chunk_cols // 2
    share, extra = divmod(emulated // 2, chunks)
    out = []
    for c in range(chunks):
        m = share + (1 if c < extra else 0)
        out.append(tuple((i + 1) * pairs_per_chunk // m - 1 for i in range(m)))
    return Exp2(emulated, (*out, ()), COEFFICIENTS)
