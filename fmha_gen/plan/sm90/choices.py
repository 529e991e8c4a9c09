"""What the sm_90a plan chooses where a spec says ``auto``, per shape, with the reason.

Chosen from measurements on an H200 (driver 580.159); `docs/sm90-tuning.md` has them. Everything else in this package is
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    q_stage: int = 1
    kv_stage: int = 2


CHOICES: dict[tuple[int, int, str], Choice] = {
    (64, 64, "full"): Choice(128, 128, "none", q_stage=2, kv_stage=3),
    (64, 64, "causal"): Choice(128, 128, "none", q_stage=2, kv_stage=3),
    (96, 96, "full"): Choice(128, 128, "none"),
    (96, 96, "causal"): Choice(128, 128),
    (128, 128, "full"): Choice(128, 128, q_stage=2),
    (128, 128, "causal"): Choice(128, 128, q_stage=2),
    (192, 128, "full"): Choice(128, 112),
    (192, 128, "causal"): Choice(128, 128),
    (256, 256, "full"): Choice(128, 64),
    (256, 256, "causal"): Choice(128, 64),
}
SPLITS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}  # consumer warpgroups -> (consumer, load); FlashAttention-3's


def choice_of(spec: KernelSpec, where: str) -> Choice:
    """The tuned choice of a shape; PlanError where no kernel of that shape has been run."""
    found = CHOICES.get((spec.head_dim_qk, spec.head_dim_v, spec.mask))
    if found is None:
        shapes = ", ".join(sorted({f"({d}, {dv})" for d, dv, _ in CHOICES}))
        raise PlanError(
            f"{where}: head_dim=({spec.head_dim_qk}, {spec.head_dim_v}), mask={spec.mask}: no sm_90a template; "
            f"use one of {shapes} with mask full or causal"
        )
    return found


def resolve(spec: KernelSpec, where: str) -> tuple[KernelSpec, dict[str, str]]:
    """The spec without autos, and why each was chosen."""
    best = choice_of(spec, where)
    measured = "fastest of the variants measured on an H200; docs/sm90-tuning.md"
    if spec.tile_n is not None or spec.tile_m is not None or spec.kv_stage is not None:
        best = replace(best, q_stage=1, kv_stage=2)  # more may not fit beside other blocks
    tile_m = spec.tile_m or best.tile_m
    consumers = max(tile_m // GROUP_ROWS, 1)
    regs = SPLITS.get(consumers, SPLITS[3])
    causal = spec.mask == "causal"
    defaults: dict[str, tuple[object, str]] = {
        "tile_m": (best.tile_m, measured),
        "tile_n": (best.tile_n, measured),
        "q_stage": (best.q_stage, measured),
        "kv_stage": (best.kv_stage, f"one block in use and {best.kv_stage - 1} on its way, for K and for V"),
        "warpgroup_order": (best.warpgroup_order, measured),
        "overlap": (best.overlap, measured),
        "q_in_registers": (best.q_in_registers, measured),
        "registers": (
            Registers(regs[0], regs[1], regs[1]),
            f"{consumers} consumer warpgroups: FlashAttention-3's split",
        ),
        "num_ctas": (1, "CTA pairs are not built"),
        "schedule": (
            ("paired", "a long and a short tile at a time: every pair has the same work, and CTAs stay")
            if causal
            else ("static_persistent", "every tile has the same work: CTAs stay and stride over tiles")
        ),
        "exp2_emulation": (0, "sm_90a has no packed float32 arithmetic: a polynomial costs more than it frees"),
    }
    changes = {name: value for name, (value, _) in defaults.items() if getattr(spec, name) is None}
    return spec.replace(**changes), {name: defaults[name][1] for name in changes}
