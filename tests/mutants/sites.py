"""Where a kernel's PTX synchronises, moves data or multiplies: the places that mutants change.

A site is one statement of the PTX. A run of the unchanged kernel says which roles execute it and which barriers it
touches (`observe`), so that a site has a name that outlives a recompilation: "load wait kv_empty #2" is the second wait
for kv_empty, in PTX order, of those that the load warp executes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fmha_gen.manifest import KernelRecord
from fmha_gen.sim import Launch, prepare
from fmha_gen.sim.ops.common import address_scalar, first_lane, scalar
from fmha_gen.sim.program import Program, Step
from fmha_gen.sim.ptx import Instr

# First match wins. Data moves are sites too: what is synchronised must be found missing when it is not there.
KINDS = (
    ("wait", r"mbarrier\.try_wait\.\S+\s+\w+, \[[^\]]+\], [^,;]+[^;]*;"),
    ("expect_tx", r"mbarrier\.arrive\.expect_tx[^;]*;"),
    ("arrive", r"mbarrier\.arrive\.[^;]*;"),
    ("init", r"mbarrier\.init[^;]*;"),
    ("init_fence", r"fence\.mbarrier_init[^;]*;"),
    ("proxy_fence", r"fence\.proxy\.async[^;]*;"),
    ("fence_before", r"tcgen05\.fence::before_thread_sync;"),
    ("fence_after", r"tcgen05\.fence::after_thread_sync;"),
    ("wait_ld", r"tcgen05\.wait::ld[^;]*;"),
    ("wait_st", r"tcgen05\.wait::st[^;]*;"),
    ("commit", r"tcgen05\.commit[^;]*;"),
    ("bar_arrive", r"barrier\.cta\.arrive[^;]*;"),
    ("bar_sync", r"(?:barrier\.cta\.sync|bar\.sync)[^;]*;"),
    ("bulk_commit", r"cp\.async\.bulk\.commit_group[^;]*;"),
    ("bulk_wait", r"cp\.async\.bulk\.wait_group[^;]*;"),
    ("setmaxnreg", r"setmaxnreg[^;]*;"),
    ("tmem_alloc", r"tcgen05\.alloc[^;]*;"),
    ("relinquish", r"tcgen05\.relinquish_alloc_permit[^;]*;"),
    ("tmem_dealloc", r"tcgen05\.dealloc[^;]*;"),
    ("elect", r"elect\.sync[^;]*;"),
    ("vote", r"vote\.sync\.any[^;]*;"),
    ("mma", r"tcgen05\.mma[^;]*;"),
    ("tmem_ld", r"tcgen05\.ld\.[^;]*;"),
    ("tmem_st", r"tcgen05\.st\.[^;]*;"),
    ("tma_load", r"cp\.async\.bulk\.tensor\.4d\.shared::cta[^;]*;"),
    ("tma_store", r"cp\.async\.bulk\.tensor\.4d\.global[^;]*;"),
    ("smem_st", r"st\.shared[^;]*;"),
    ("smem_ld", r"ld\.shared[^;]*;"),
    ("global_st", r"st\.global[^;]*;"),
)  # fmt: skip
_STATEMENT = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in KINDS))


@dataclass(frozen=True)
class Site:
    """One statement. line: 1-based in the PTX; text: as written, with its semicolon; what: barriers or memory that it
    touches; roles: who executes it ("" where no run of the unchanged kernel did)."""

    kind: str
    line: int
    text: str
    roles: str = ""
    what: str = ""
    number: int = 0

    @property
    def name(self) -> str:
        return " ".join(p for p in (self.roles or "nobody", self.kind, self.what, f"#{self.number}") if p)


def find_sites(ptx: str) -> list[Site]:
    """All sites, in PTX order."""
    found = []
    for number, line in enumerate(ptx.split("\n"), 1):
        for m in _STATEMENT.finditer(line.split("//", 1)[0]):
            assert m.lastgroup is not None
            found.append(Site(m.lastgroup, number, m.group()))
    return found


@dataclass
class Observed:
    """What a run of the unchanged kernel showed of one instruction."""

    roles: set[str] = field(default_factory=set)
    barriers: set[str] = field(default_factory=set)


@contextmanager
def observe(ptx: str, record: KernelRecord, plan: dict[str, Any]) -> Iterator[dict[int, Observed]]:
    """PTX line -> what the simulator executes there while the context is open."""
    program = prepare(Launch(ptx, (1,), (record.launch.threads,), (), entry=record.symbol))
    before = [(step, step.run, step.native) for step in program.steps]
    watch = _Watch(barrier_names(plan, program.dynamic_smem_offset))
    for step, run, native in before:
        if run is not None:
            step.run = watch.operation(program, step.instr, run)
        elif native is not None and (lines := _lines_of_native_sites(program, step)):
            step.native = watch.segment(lines, native)
    try:
        yield watch.seen
    finally:
        for step, run, native in before:
            step.run, step.native = run, native


def _lines_of_native_sites(program: Program, step: Step) -> list[int]:
    instrs = program.kernel.instrs[step.first : step.first + step.count]
    return [ins.line for ins in instrs if ins.opcode.startswith(("elect.", "vote."))]


class _Watch:
    """Wraps steps of a program so that they tell what they do."""

    def __init__(self, barriers: dict[int, str]) -> None:
        self.barriers = barriers
        self.seen: dict[int, Observed] = {}
        self.unnamed: dict[int, set[int]] = {}  # register file -> lines, until an operation tells whose it is

    def operation(self, program: Program, ins: Instr, run: Callable) -> Callable:
        operand = _barrier_operand(ins.opcode) or 0
        where = None
        if operand:
            where = (scalar if operand < 0 else address_scalar)(program, ins, ins.operands[abs(operand) - 1])

        def watched(w, mask):
            for line in (ins.line, *self.unnamed.pop(w.base, ())):
                self.seen.setdefault(line, Observed()).roles.add(w.role)
            if where is not None:
                value = where(w, first_lane(mask))
                named = self.barriers.get(value & 0xFFFFFF, hex(value))
                self.seen[ins.line].barriers.add(f"barrier {value}" if operand < 0 else named)
            return run(w, mask)

        return watched

    def segment(self, lines: list[int], native: Callable) -> Callable:
        def watched(base, active):
            self.unnamed.setdefault(base, set()).update(lines)
            return native(base, active)

        return watched


def _barrier_operand(opcode: str) -> int | None:
    """1-based operand that addresses an mbarrier; negative: holds the number of a named barrier."""
    if opcode.startswith(("mbarrier.init", "tcgen05.commit")):
        return 1
    if opcode.startswith(("mbarrier.arrive", "mbarrier.try_wait")):
        return 2
    if opcode.startswith("cp.async.bulk.tensor") and ".mbarrier::" in opcode:
        return 3
    return -1 if opcode.startswith(("bar.sync", "barrier.")) else None


def barrier_names(plan: dict[str, Any], smem_base: int) -> dict[int, str]:
    """Shared address of each mbarrier -> its name in the plan."""
    first = next(b["offset_bytes"] for b in plan["smem"] if b["name"] == "mbarriers")
    return {
        smem_base + first + b["offset_bytes"] + 8 * stage: b["name"]
        for b in plan["barriers"]
        for stage in range(b["stages"])
    }


def name_sites(sites: list[Site], seen: dict[int, Observed], plan: dict[str, Any]) -> list[Site]:
    """Sites with the roles, barriers and numbers that the run showed."""
    named = {n["id"] + i: n["name"] for n in plan["named_barriers"] for i in range(n["count"])}
    every = len({r["name"] for r in plan["roles"]})
    count: Counter[tuple[str, str, str]] = Counter()
    out = []
    for site in sites:
        o = seen.get(site.line, Observed())
        roles = "all" if len(o.roles) == every else "+".join(sorted({r.rstrip("01") for r in o.roles}))
        numbers = [named.get(int(b.split()[1]), "cta") if b.startswith("barrier ") else b for b in o.barriers]
        what = "+".join(sorted(set(numbers)))
        count[roles, site.kind, what] += 1
        out.append(replace(site, roles=roles, what=what, number=count[roles, site.kind, what]))
    return out
