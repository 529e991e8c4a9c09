"""What this fmha-gen builds, per family and architecture: the one table that specs, messages and the schema go by.

Standard library only: the run time reads it too, so that a miss advises nothing that a spec would be refused for. A
feature that lands adds its value here.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arch import ARCHS

EDITIONS = (2026,)
# log2 units. Beyond 8, FlashAttention-4's, the largest P of a row is rounded so often instead of being 1 that the RMS
# error leaves the tolerance: 1.41 times the reference's at 15 (d64 full bf16, verify's huge logits, simulator,
# 2026-11-30).
RESCALE_THRESHOLD_RANGE = (0, 8)


@dataclass(frozen=True, slots=True)
class Built:
    """Values of one family on one architecture for which templates exist. Budgets are the plan's business."""

    dtypes: tuple[str, ...]
    head_dims: tuple[tuple[int, int], ...]
    masks: tuple[str, ...]
    q_stages: tuple[int, ...]
    tile_ms: tuple[int, ...]
    num_ctas: tuple[int, ...]
    schedules: tuple[str, ...]
    features: tuple[str, ...] = ()


BUILT: dict[tuple[str, str], Built] = {
    ("fmha_fwd", "sm_100a"): Built(
        dtypes=("bf16", "fp16"),
        head_dims=((64, 64), (96, 96), (128, 128), (192, 128)),
        masks=("full", "causal"),
        q_stages=(1, 2),
        tile_ms=(128,),
        num_ctas=(1,),
        schedules=("static_persistent", "longest_first"),
    ),
    ("fmha_fwd", "sm_90a"): Built(
        dtypes=("bf16", "fp16"),
        head_dims=((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
        masks=("full", "causal"),
        q_stages=(1, 2),
        tile_ms=(128, 192),
        num_ctas=(1,),
        schedules=("static_persistent", "longest_first", "paired", "balanced"),
    ),
}


def built_archs() -> tuple[str, ...]:
    """Architectures that some family is built for."""
    return tuple(name for name in ARCHS if any(arch == name for _, arch in BUILT))


def built_features(family: str = "fmha_fwd") -> frozenset[str]:
    """Features that some architecture has kernels with."""
    return frozenset(f for (name, _), b in BUILT.items() if name == family for f in b.features)


def show_dims(dims: tuple[int, int]) -> str:
    """Head dimensions as a spec writes them: ``128``, or ``{qk: 192, v: 128}``."""
    qk, v = dims
    return str(qk) if qk == v else f"{{qk: {qk}, v: {v}}}"
