"""Which tiles a CTA takes, the grid rule, and which problems a variant is chosen for."""

from __future__ import annotations

from ..errors import PlanError
from ..launch_rules import HEADS_PER_SECTION
from ..manifest import Rule, Serves
from ..spec import KernelSpec
from .tiles import TILE_M
from .types import Schedule

AUTO = {"full": "static_persistent", "causal": "longest_first"}
_SCHEDULES = {
    "static_persistent": Schedule("static_persistent", "tile = blockIdx.x; tile += gridDim.x", None),
    "longest_first": Schedule(
        "longest_first",
        "sections of heads_per_section (head, batch) pairs; in a section Q tiles from the last, pairs innermost",
        HEADS_PER_SECTION.constants["l2_bytes"],
    ),
    "paired": Schedule(
        "paired",
        "Q tiles of a head as last, first, last but one, second, ...; a CTA takes two neighbours, then strides on",
        None,
    ),
    "balanced": Schedule(
        "balanced",
        "as paired, but the last one to two rounds of pairs by size, longest first, back and forth over the CTAs; all "
        "in pairs where a head has an odd number of Q tiles",
        None,
    ),
}
_GRID_RULE = {
    "static_persistent": "persistent",
    "longest_first": "one_per_tile",
    "paired": "persistent",
    "balanced": "persistent",
}


def auto_schedule(mask: str) -> tuple[str, str]:
    """The schedule of a mask, and why."""
    if mask == "full":
        return AUTO[mask], "every tile has the same work: CTAs stay and stride over tiles"
    return AUTO[mask], "later Q tiles see more keys: the longest run first, so that short ones fill the end"


def make_schedule(spec: KernelSpec, where: str) -> Schedule:
    """Raises PlanError for a name that is none of the built schedules, and for `balanced` without a causal mask."""
    found = _SCHEDULES.get(spec.schedule or "")
    if found is None:
        raise PlanError(f"{where}: schedule={spec.schedule!r}: not built; use one of {', '.join(_SCHEDULES)}")
    if found.name == "balanced" and spec.mask != "causal":
        raise PlanError(
            f"{where}: schedule=balanced, mask={spec.mask}: sorts tiles by the keys that a causal mask leaves, and "
            f"here all have the same; use static_persistent"
        )
    return found


def grid_rule(schedule: Schedule, rows_per_tile: int) -> Rule:
    """How many CTAs a launch has; constants of the rule of that name in `launch_rules`."""
    return Rule(_GRID_RULE[schedule.name], {"rows": rows_per_tile})


def serves_from(spec: KernelSpec, rows: int) -> Serves:
    """A variant that is the better choice from so many query rows on; the kernel serves any number."""
    return Serves(
        dtype=spec.dtype,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        masks=(spec.mask,),
        features=spec.features,
        min_rows=rows,
        max_rows=None,
        lse=spec.lse,
    )


def make_serves(spec: KernelSpec) -> tuple[Serves, int]:
    """What the variant serves, and its rank among those that serve the same problem (lowest wins).

    Either q_stage is right for any number of rows: the bounds say where a variant is the better choice, and a launcher
    falls back on the other one. Two Q tiles halve the traffic of K and V and keep the tensor core busy, so that variant
    is preferred as soon as one tile of 128 rows does not hold a problem's rows.
    """
    two = spec.q_stage == 2
    serves = Serves(
        dtype=spec.dtype,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        masks=(spec.mask,),
        features=spec.features,
        min_rows=TILE_M + 1 if two else 0,
        max_rows=None if two else TILE_M,
        lse=spec.lse,
    )
    return serves, 0 if two else 1
