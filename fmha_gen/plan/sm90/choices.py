"""What the sm_90a plan chooses where a spec says ``auto``, per shape, with the reason.

Chosen from measurements on an H200 (driver 580.159); `docs/sm90-tuning.md` has them. Everything else in this package is
arithmetic.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ...errors import PlanError
from ...spec import KernelSpec, Registers

GROUP_ROWS = 64  # rows of one wgmma, and of one consumer warpgroup
ORDERS = ("none", "gemm", "exp")


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiles and policy of one shape; the fields are those of `KernelSpec`."""

    tile_m: int
    tile_n: int
    warpgroup_order: str = "gemm"
    overlap: bool = True
    q_in_registers: bool = False
    across_tiles: bool = False
    recompute_s: bool = False
    schedule: str = "static_persistent"
    q_stage: int = 1
    kv_stage: int = 2


# across_tiles hides the tile change: an exposed S, its wait, and the division and store of O. It is worth most where a
# tile is short (causal, 1k) or its head dim large, and costs registers beside S and O; measured, rate with it over rate
# without at 1k / 4k / 16k: d96 causal 1.02 / 1.01 / 1.02, d128 full 1.01 / 1.02 / 1.02, (192, 128) causal 1.06 / 1.03 /
# 1.02, (192, 128) full against 112 keys without 1.08 / 1.00 / 0.98, d256 full 1.02 / 1.02 / 1.00, d256 causal 1.02 /
# 1.05 / 1.03; d64 full 0.98 / 0.98 / 0.99 and d64 causal 1.01 / 0.98 / 1.01 do without. d96 full 1.03 / 0.98 / 0.99,
# and 1.02 / 1.00 / 1.00 with S recomputed and three stages.
# balanced lets CTAs end together where pairs leave a last round part full; rate over paired's at 1k / 4k / 16k: d64
# 0.98 / 1.02 / 1.02, d96 1.02 / 1.05 / 1.01, d128 0.97 / 1.02 / 1.04, d256 0.94 / 1.11 / 1.03 (with unseen blocks
# skipped), but (192, 128) 0.94 / 0.98 / 0.99, which stays with pairs.
# recompute_s frees the registers of S at the price of K that is released only after softmax: worth it where a third
# stage makes up for that. d96 full, three stages, over S kept and two: 1.02 / 1.02 / 1.04, causal 1.05 / 1.03 / 1.03;
# with two stages d128 full 0.98, d256 causal 0.97 at 16k.
CHOICES: dict[tuple[int, int, str], Choice] = {
    (64, 64, "full"): Choice(128, 128, "none", q_stage=2, kv_stage=3),
    (64, 64, "causal"): Choice(128, 128, "none", schedule="balanced", q_stage=2, kv_stage=3),
    (96, 96, "full"): Choice(128, 128, across_tiles=True, recompute_s=True, kv_stage=3),
    (96, 96, "causal"): Choice(128, 128, across_tiles=True, recompute_s=True, schedule="balanced", kv_stage=3),
    (128, 128, "full"): Choice(128, 128, across_tiles=True, q_stage=2),
    (128, 128, "causal"): Choice(128, 128, schedule="balanced", q_stage=2),  # 0.94 / 1.01 / 1.02 with across_tiles
    (192, 128, "full"): Choice(128, 128, across_tiles=True),
    (192, 128, "causal"): Choice(128, 128, across_tiles=True, schedule="paired"),
    (256, 256, "full"): Choice(128, 64, across_tiles=True),
    (256, 256, "causal"): Choice(128, 64, across_tiles=True, schedule="balanced"),
}
# Of three consumer warpgroups, as a spec asks for by tile.m: the better choice from so many query rows on.
CHOICES_OF_192_ROWS: dict[tuple[int, int, str], tuple[Choice, int]] = {
    (64, 64, "full"): (Choice(192, 112, "none", recompute_s=True, kv_stage=3), 3072),
    (64, 64, "causal"): (Choice(192, 112, "none", recompute_s=True, kv_stage=3, schedule="balanced"), 8192),
}
SCHEDULE_REASONS = {
    "static_persistent": "every tile has the same work: CTAs stay and stride over tiles",
    "paired": "a long and a short tile at a time: every pair has the same work, and CTAs stay",
    "balanced": "pairs of the same work, and the last rounds by size, so that CTAs end together; measured on an H200",
}
SPLITS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}  # consumer warpgroups -> (consumer, load); FlashAttention-3's


def choice_of(spec: KernelSpec, where: str) -> Choice:
    """The tuned choice of a shape; PlanError where no kernel of that shape has been run."""
    shape = (spec.head_dim_qk, spec.head_dim_v, spec.mask)
    if spec.tile_m == 192 and shape in CHOICES_OF_192_ROWS:
        return CHOICES_OF_192_ROWS[shape][0]
    found = CHOICES.get(shape)
    if found is None:
        shapes = ", ".join(sorted({f"({d}, {dv})" for d, dv, _ in CHOICES}))
        raise PlanError(
            f"{where}: head_dim=({spec.head_dim_qk}, {spec.head_dim_v}), mask={spec.mask}: no sm_90a template; "
            f"use one of {shapes} with mask full or causal"
        )
    return found


def preference(spec: KernelSpec) -> tuple[int, int]:
    """(rows, rank) of a resolved spec: it is the better choice from so many query rows on; the lowest rank wins.

    The tuned kernel for long sequences comes first, then the shape's own choice, then what was asked for beside them.
    """
    shape = (spec.head_dim_qk, spec.head_dim_v, spec.mask)
    choice, rows = CHOICES_OF_192_ROWS.get(shape, (None, 0))
    if _is_choice(spec, choice):
        return rows, 0
    return 0, 1 if _is_choice(spec, CHOICES.get(shape)) else 2


def _is_choice(spec: KernelSpec, choice: Choice | None) -> bool:
    return choice is not None and all(getattr(spec, name) == value for name, value in asdict(choice).items())


def can_go_across_tiles(spec: KernelSpec) -> bool:
    """Whether the other choices, where the spec makes them, leave `across_tiles` possible."""
    return spec.overlap is not False and not spec.q_in_registers and spec.warpgroup_order != "exp"


def unseen_blocks(spec: KernelSpec, consumers: int) -> tuple[int, ...]:
    """Per consumer warpgroup the most key blocks of a tile that it passes by, as the mask hides them from all its rows.

    A row sees one key more than the row above it, so that R rows below a warpgroup's own bring at least R // tile_n
    blocks that it sees nothing of, and at most one more where R is no multiple. Built with `across_tiles`, and where
    the first warpgroup always has such a block and never more than a ring holds: it keeps the last V of the tile
    before until its first S is issued, and the load warp would wait for that stage. Else all 0.
    """
    assert spec.tile_n and spec.kv_stage
    below = [(consumers - 1 - group) * GROUP_ROWS for group in range(consumers)]
    most = tuple(-(-rows // spec.tile_n) for rows in below)
    built = spec.mask == "causal" and bool(spec.across_tiles) and spec.tile_n <= below[0] and most[0] <= spec.kv_stage
    return most if built else (0,) * consumers


def resolve(spec: KernelSpec, where: str) -> tuple[KernelSpec, dict[str, str]]:
    """The spec without autos, and why each was chosen."""
    best = choice_of(spec, where)
    if spec.tile_m != best.tile_m and spec.tile_m in (128, 192) and spec.tile_n is None:
        raise PlanError(
            f"{where}: tile.m={spec.tile_m}: no tile.n was tuned for it at head_dim=({spec.head_dim_qk}, "
            f"{spec.head_dim_v}), mask={spec.mask}; give tile.n too, e.g. 64, or leave tile out"
        )
    measured = "fastest of the variants measured on an H200; docs/sm90-tuning.md"
    tile_m = spec.tile_m or best.tile_m
    consumers = max(tile_m // GROUP_ROWS, 1)
    recompute, why_recompute = best.recompute_s, measured
    if any(getattr(spec, name) not in (None, getattr(best, name)) for name in ("tile_m", "tile_n", "kv_stage")):
        best = replace(best, q_stage=1, kv_stage=2)  # more may not fit beside other blocks
        recompute, why_recompute = False, "worth it with the tiles and stages that were tuned for it"
    if recompute and (spec.q_in_registers or spec.overlap is False):
        recompute, why_recompute = False, "built for overlapped products with Q in shared memory"
    regs = SPLITS.get(consumers, SPLITS[3])
    across, why_across = best.across_tiles, measured
    if across and (consumers > 2 or not can_go_across_tiles(spec)):
        across = False
        why_across = "built for overlapped products with Q in shared memory, measured with two consumer warpgroups"
    defaults: dict[str, tuple[object, str]] = {
        "tile_m": (best.tile_m, measured),
        "tile_n": (best.tile_n, measured),
        "q_stage": (best.q_stage, measured),
        "kv_stage": (best.kv_stage, f"one block in use and {best.kv_stage - 1} on its way, for K and for V"),
        "warpgroup_order": (best.warpgroup_order, measured),
        "overlap": (best.overlap, measured),
        "q_in_registers": (best.q_in_registers, measured),
        "across_tiles": (across, why_across),
        "recompute_s": (recompute, why_recompute),
        "registers": (
            Registers(regs[0], regs[1], regs[1]),
            f"{consumers} consumer warpgroups: FlashAttention-3's split",
        ),
        "num_ctas": (1, "CTA pairs are not built"),
        "schedule": (best.schedule, SCHEDULE_REASONS[best.schedule]),
        "exp2_emulation": (0, "sm_90a has no packed float32 arithmetic: a polynomial costs more than it frees"),
    }
    changes = {name: value for name, (value, _) in defaults.items() if getattr(spec, name) is None}
    return spec.replace(**changes), {name: defaults[name][1] for name in changes}
