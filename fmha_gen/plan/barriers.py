"""The mbarriers of a kernel, as one table with computed arrive counts, and the host-side proof that they work.

Names say the state that a completed phase stands for. `protocol` has the programs that arrive on them and wait for
them; `petri` executes those programs. `check` runs both and refuses a plan whose pipelines can deadlock or race.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..errors import PlanError
from . import petri, protocol
from .types import WARP_THREADS, Arrival, Barrier, KvRing, NamedBarrier, Role

MBARRIER_BYTES = 8
FIRST_NAMED_BARRIER = 1  # 0 is __syncthreads'

# How a role arrives; `Arrival` explains the units. One place, so that a kernel that changes its mind changes it here.
ARRIVAL_UNITS = {
    "p_full": "thread",
    "p_last_full": "thread",
    "stats_empty": "thread",
    "epi_full": "thread",
    "epi_empty": "one",
}


@dataclass(frozen=True, slots=True)
class Pipelines:
    """What the table depends on."""

    roles: tuple[Role, ...]
    q_stage: int
    num_ctas: int
    q_tile_bytes: int
    ring: KvRing
    o_aliases_q: bool


def arrive_count(role: Role, unit: str) -> int:
    """Arrivals that one phase gets from a role: threads, warps, or one."""
    return {"thread": role.num_threads, "warp": len(role.warp_ids), "one": 1, "tma": 1, "commit": 1}[unit]


def _arrival(p: Pipelines, role: str, unit: str) -> Arrival:
    return Arrival(role, unit, arrive_count(next(r for r in p.roles if r.name == role), unit))


def make_barriers(p: Pipelines) -> tuple[Barrier, ...]:
    """The table, in the order of the mbarriers in shared memory, with offsets from the first of them.

    p_full counts the peers' arrivals too in a CTA group, because only the leader issues MMAs.
    """
    softmax = tuple(r.name for r in p.roles if r.name.startswith("softmax"))
    load, mma = _arrival(p, "load", "tma"), _arrival(p, "mma", "commit")
    # A barrier of an S slot gets arrivals from the one softmax group that owns the slot at the time.
    owner = "softmax0"
    slots, group = 2, p.num_ctas
    rows: list[tuple[str, int, tuple[Arrival, ...], tuple[str, ...], str, int | None, int, str]] = [
        ("q_full", p.q_stage, (load,), ("mma",), "blocks", p.q_tile_bytes * group, 1, "a Q tile has landed"),
        ("q_empty", p.q_stage, (mma,), ("load",), "passes", None, 1, "the last S = Q K of the tile has read Q"),
        ("kv_full", p.ring.stages, (load,), ("mma",), "blocks", p.ring.k_bytes * group, 1, "a K or V tile has landed"),
        ("kv_empty", p.ring.stages, (mma,), ("load",), "passes", None, 1, "the MMAs that read the stage are done"),
        ("s_full", slots, (mma,), softmax, "blocks", None, 1, "S is complete, and so is every MMA issued before it"),
        (
            "p_full",
            slots,
            (_arrival(p, owner, ARRIVAL_UNITS["p_full"]), _arrival(p, "correction", ARRIVAL_UNITS["p_full"])),
            ("mma",),
            "blocks",
            None,
            group,
            "the first part of P is written and O is rescaled (first block: O has been read out)",
        ),
        (
            "p_last_full",
            slots,
            (_arrival(p, owner, ARRIVAL_UNITS["p_last_full"]),),
            ("mma",),
            "blocks",
            None,
            group,
            "the rest of P is written",
        ),
        ("o_full", slots, (mma,), ("correction",), "blocks", None, 1, _O_FULL_NOTE[p.q_stage]),
        (
            "stats_empty",
            p.q_stage,
            (_arrival(p, "correction", ARRIVAL_UNITS["stats_empty"]),),
            softmax,
            "passes",
            None,
            1,
            "correction has read sScale",
        ),
        (
            "epi_full",
            p.q_stage,
            (_arrival(p, "correction", ARRIVAL_UNITS["epi_full"]),),
            ("epilogue",),
            "blocks",
            None,
            1,
            "sO holds the output tile",
        ),
        (
            "epi_empty",
            p.q_stage,
            tuple(_arrival(p, role, ARRIVAL_UNITS["epi_empty"]) for role in _epi_empty_producers(p)),
            ("correction", "load") if p.o_aliases_q else ("correction",),
            "passes",
            None,
            1,
            "the store has read sO"
            + ("; sO lies over sQ, so the load warp waits in every tile, and arrives" if p.o_aliases_q else ""),
        ),
    ]
    out, offset = [], 0
    for name, stages, producers, consumers, first, tx, peers, note in rows:
        count = peers * sum(a.count for a in producers)
        out.append(Barrier(name, stages, offset, count, producers, consumers, first, tx, note))
        offset += stages * MBARRIER_BYTES
    return tuple(out)


def _epi_empty_producers(p: Pipelines) -> tuple[str, ...]:
    """The load warp arrives once it has seen the phase before, lest tiles without keys, which it skips, pass it by."""
    return ("epilogue", "load") if p.o_aliases_q else ("epilogue",)


_O_FULL_NOTE = {
    1: "the slot's PV is done: committed after every PV, since the next S is issued ahead of it",
    2: "the tile's last PV is done: within the tile s_full implies the PV before it",
}


def barrier_bytes(barriers: tuple[Barrier, ...]) -> int:
    return sum(b.stages for b in barriers) * MBARRIER_BYTES


def make_named_barriers(roles: tuple[Role, ...]) -> tuple[NamedBarrier, ...]:
    """Hardware barriers: one per softmax warp, shared with the correction warp of the same rows.

    Softmax arrives when sScale holds a factor, or the row sum and maximum; correction syncs.
    """
    groups = [r for r in roles if r.name.startswith("softmax")]
    warps = sum(len(r.warp_ids) for r in groups)
    members = (*(r.name for r in groups), "correction")
    note = "sScale is written, one barrier per softmax warp: id + 4 * Q tile + warp"
    return (NamedBarrier("stats", FIRST_NAMED_BARRIER, warps, 2 * WARP_THREADS, members, note),)


def check(barriers: tuple[Barrier, ...], p: Pipelines, map_: protocol.Map, where: str = "plan") -> None:
    """Prove counts, phases and buffers consistent for 0, 1, 2, 3 and many blocks, one and several tiles per CTA.

    Raises PlanError that says ``deadlock`` or ``race`` with the arithmetic.
    """
    for problem in findings(barriers, p, map_):
        raise PlanError(f"{where}: pipelines: {problem}")


def findings(barriers: tuple[Barrier, ...], p: Pipelines, map_: protocol.Map) -> tuple[str, ...]:
    """Everything wrong with the pipelines; empty when they are consistent. Count errors come first."""
    wrong = _count_findings(barriers, p)
    return tuple(wrong) if wrong else _petri_findings(barriers, map_)


def _count_findings(barriers: tuple[Barrier, ...], p: Pipelines) -> list[str]:
    """Compare each count with what the roles' sizes give."""
    out = []
    for b in barriers:
        peers = p.num_ctas if b.name in ("p_full", "p_last_full") else 1
        parts, total = [], 0
        for a in b.producers:
            role = next(r for r in p.roles if r.name == a.role)
            total += peers * arrive_count(role, a.unit)
            parts.append(f"{a.role} {arrive_count(role, a.unit)}")
        if total != b.arrive_count:
            kind = "deadlock" if b.arrive_count > total else "race"
            sum_ = " + ".join(parts) + (f", times {peers} CTAs" if peers > 1 else "")
            out.append(
                f"{kind}: {b.name} expects {b.arrive_count} arrivals a phase, its producers make {total} ({sum_}); "
                f"set arrive_count to {total}"
            )
    return out


@lru_cache(maxsize=256)
def _petri_findings(barriers: tuple[Barrier, ...], map_: protocol.Map) -> tuple[str, ...]:
    for blocks in protocol.cases(map_):
        for rescale in (False, True) if map_.q_stage == 1 else (True,):
            counts = {b.name: b.arrive_count for b in barriers}
            found = petri.run(protocol.programs(map_, blocks, rescale), counts | protocol.NAMED_COUNTS)
            if found:
                return tuple(f"{text} [blocks per tile {list(blocks)}]" for text in found)
    return ()
