"""What this fmha-gen builds, per family and architecture, and how architectures may be spelled.

The vocabulary of a spec (`fields.py`) is wider than this table: a known value that is missing here is refused as "not
built yet", by name. A feature that lands adds its value here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arch import ALIASES, ARCHS
from .model import KernelSpec

EDITIONS = (2026,)


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
        schedules=("static_persistent", "longest_first", "paired"),
    ),
}


def built_archs() -> tuple[str, ...]:
    """Architectures that some family is built for."""
    return tuple(name for name in ARCHS if any(arch == name for _, arch in BUILT))


def parse_arch(text: str) -> str | None:
    """The canonical name of an accepted spelling, or None. A plain look-up: no name is taken for another's relative."""
    return ALIASES.get(text)


def accepted_archs() -> str:
    """The built architectures with their other spellings, for messages."""
    spellings = {a: [s for s, name in ALIASES.items() if name == a and s != a] for a in built_archs()}
    return ", ".join(f"{arch} (also {', '.join(others)})" for arch, others in spellings.items())


def not_built(spec: KernelSpec, built: Built) -> list[tuple[str, object, tuple[object, ...]]]:
    """``(field, value, built values)`` for each value of `spec` that has no template yet. ``auto`` is always fine."""
    checks: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("dtype", spec.dtype, built.dtypes),
        ("head_dim", (spec.head_dim_qk, spec.head_dim_v), built.head_dims),
        ("mask", spec.mask, built.masks),
        ("q_stage", spec.q_stage, built.q_stages),
        ("tile.m", spec.tile_m, built.tile_ms),
        ("num_ctas", spec.num_ctas, built.num_ctas),
        ("schedule", spec.schedule, built.schedules),
    )
    missing = [(name, value, values) for name, value, values in checks if value is not None and value not in values]
    return missing + [(name, True, (False,)) for name in spec.features if name not in built.features]
