"""The bound: the least clocks that one SM needs per pair of 128-row tiles and tile_n keys, as a model.

Every figure here is a model figure, computed from rates and instruction counts, never measured. `analyze` uses the
same functions with the counts that it reads from a cubin.
"""

from __future__ import annotations

from ..arch import Arch
from .types import ModelBound

ROWS = 128
WARP = 32

# Issue slots (SASS instructions of the unmasked loops, per 128 keys and warp) of this project's own cubins with two Q
# tiles, bf16, mean of full and causal, read by `fmha-gen analyze`; nvidia-cutlass-dsl 4.8.1, ptxas 13.4.59, sm_100a,
# 2026-11-30. A test compares them with what the templates give today. (head_dim_qk, head_dim_v) -> (correction, MMA).
LOOP_SLOTS: dict[tuple[int, int], tuple[int, int]] = {
    (64, 64): (115, 149),
    (96, 96): (159, 183),
    (128, 128): (203, 211),
    (192, 128): (203, 273),
}
# The softmax loop has 418 to 421 slots without emulation, whatever the head dimensions, and (579 - 418) / 40 to
# (507 - 418) / 22 more per emulated exponential: the FMA-pipe exponential itself, its clamp, minus the MUFU.
SOFTMAX_BASE_SLOTS = 420.0
EMULATED_SLOTS = 4.04
# MUFU operations per row and block of FlashAttention-4 4.0.0b36's cubins, same compiler and target; a variant may use
# as many even where 85% of the MMA term is less.
PEER_MUFU: dict[tuple[int, int, str], int] = {
    (64, 64, "full"): 113,
    (64, 64, "causal"): 113,
    (96, 96, "full"): 113,
    (96, 96, "causal"): 113,
    (128, 128, "full"): 105,
    (128, 128, "causal"): 113,
    (192, 128, "full"): 105,
    (192, 128, "causal"): 121,
    (256, 256, "full"): 105,
}
PEER_EMULATES_UP_TO = 16  # MUFU operations a clock: where the rate is twice that, FlashAttention-4 emulates nothing
MUFU_SHARE = 0.85  # of the MMA term: slots may not be bought with MUFU beyond it


def mma_clk(head_dim_qk: int, head_dim_v: int, tile_n: int, arch: Arch) -> float:
    """Tensor-core clocks of both products of two row tiles: ``2 * 2*128*tile_n*(d + dv) / rate``."""
    return 2 * 2 * ROWS * tile_n * (head_dim_qk + head_dim_v) / arch.mma_flop_per_clk


def mufu_clk_per_op(arch: Arch) -> float:
    """Clocks of one MUFU operation per row of both tiles: 256 rows at the SM's rate (16 on sm_100a)."""
    return 2 * ROWS / arch.mufu_per_clk


def mufu_clk(mufu_per_row: float, arch: Arch) -> float:
    """Clocks of the special-function units; `mufu_per_row` counts MUFU instructions of one softmax warp and block."""
    return mufu_per_row * mufu_clk_per_op(arch)


def issue_clk(softmax_slots: float, correction_slots: float, mma_slots: float) -> float:
    """Issue slots of the busiest sub-core, one a clock: two softmax warps, one correction warp and the MMA warp."""
    return 2 * softmax_slots + correction_slots + mma_slots


def loop_slots(head_dim_qk: int, head_dim_v: int) -> tuple[int, int]:
    """(correction, MMA) slots: recorded ones, else lines through them (within 8% of each recorded figure)."""
    found = LOOP_SLOTS.get((head_dim_qk, head_dim_v))
    return found or (round(24 + 1.4 * head_dim_v), round(0.96 * (head_dim_qk + ROWS) - 36))


def mufu_per_row(tile_n: int, emulated_elems: int) -> int:
    """One MUFU per exponential that is not emulated, and one for the rescale factor."""
    return tile_n - emulated_elems + 1


def mufu_cap(head_dim_qk: int, head_dim_v: int, mask: str, tile_n: int, arch: Arch) -> int:
    """Most MUFU per row and block: 85% of the MMA term, or the peer's count if that is more."""
    share = int(MUFU_SHARE * mma_clk(head_dim_qk, head_dim_v, tile_n, arch) / mufu_clk_per_op(arch))
    if arch.mufu_per_clk > PEER_EMULATES_UP_TO:
        return max(share, mufu_per_row(tile_n, 0))
    return max(share, PEER_MUFU.get((head_dim_qk, head_dim_v, mask), 0) * tile_n // ROWS)


def bound(
    head_dim_qk: int, head_dim_v: int, tile_n: int, mufu: int, softmax: float, correction: int, mma: int, arch: Arch
) -> ModelBound:
    """All terms from counts per block: MUFU per row, and issue slots per warp of the three loops."""
    return ModelBound(
        mma_clk=mma_clk(head_dim_qk, head_dim_v, tile_n, arch),
        mufu_clk=mufu_clk(mufu, arch),
        issue_clk=issue_clk(softmax, correction, mma),
        mufu_per_row=mufu,
        softmax_slots=softmax,
        correction_slots=correction,
        mma_slots=mma,
    )


def predict(head_dim_qk: int, head_dim_v: int, tile_n: int, emulated_elems: int, arch: Arch) -> ModelBound:
    """The bound of a kernel of this project with a given number of emulated exponentials, before it exists."""
    correction, mma = loop_slots(head_dim_qk, head_dim_v)
    softmax = SOFTMAX_BASE_SLOTS * tile_n / ROWS + EMULATED_SLOTS * emulated_elems
    mufu = mufu_per_row(tile_n, emulated_elems)
    return bound(head_dim_qk, head_dim_v, tile_n, mufu, round(softmax, 1), correction, mma, arch)
