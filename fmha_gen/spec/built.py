"""What of a spec this fmha-gen builds (`fmha_gen.built` is the table), and how architectures may be spelled.

The vocabulary of a spec (`fields.py`) is wider than that table: a known value that is missing there is refused as "not
built yet", by name.
"""

from __future__ import annotations

from ..arch import ALIASES
from ..built import BUILT, EDITIONS, Built, built_archs
from .model import KernelSpec

__all__ = ["BUILT", "EDITIONS", "Built", "accepted_archs", "built_archs", "not_built", "parse_arch"]


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
