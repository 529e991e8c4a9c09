"""The machine: CTAs and clusters of warps under a seeded scheduler, with asynchronous units and reports.

One tick is one warp instruction. A seed draws the scheduling quantum, the mean delay of every asynchronous unit, the
chance that a successful try_wait reports failure, and warps that are often taken away for a while. Every seed must give
the same results for a correct kernel.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .barriers import ClusterBarrier, Mbarrier, NamedBarrier
from .clocks import Components
from .codegen.builder import FAULT_UNINIT
from .counters import Counters
from .counting import Tally, collect
from .endings import cluster_end_checks, dump, warp_end_checks
from .findings import Fault, Result
from .memory import GlobalMemory, SharedMemory, TensorMemory
from .program import Program, Step
from .ptx import Instr
from .reporting import Reporter
from .tensormap import TensorMap
from .warp import Wait, Warp

POOL_REGISTERS = 65536
MAX_SMEM_BYTES = 233472  # 228 KiB: 227 KiB for the CTA and 1 KiB that the system keeps
MAX_STALL = 4000  # ticks for which a warp is taken away
STALL_TICKS = 5_000_000  # so long without an event, a wake-up or an arrival is a livelock
BLOCKED = object()  # a machine operation returns this to be run again after the warp is woken
SLEEP = object()  # ... and this when it is finished but the warp must sleep before the next one

_KINDS = {"seg": 0, "op": 1, "bra": 2, "exit": 3, "trap": 4}


@dataclass(eq=False, slots=True)
class Params:
    """Launch parameters as bytes, and the tensor maps among them by offset."""

    data: NDArray[np.uint8]
    maps: dict[int, TensorMap]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Dimensions of a launch; smem_bytes: shared memory of a CTA with the system's part; registers: per thread."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    registers: int


class Cta:
    """One CTA: shared and tensor memory, barriers, warps."""

    def __init__(
        self, machine: Machine, cluster: Cluster, number: int, coords: tuple[int, int, int], rank: int
    ) -> None:
        self.machine, self.cluster, self.number, self.coords, self.rank = machine, cluster, number, coords, rank
        self.smem = SharedMemory(machine.smem_bytes)
        self.tmem = TensorMemory()
        self.mbars: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.warps: list[Warp] = []
        self.live = 0
        self.pool_free = 0
        self.alloc_waiters: list[Warp] = []
        self.pool_waiters: list[Warp] = []


class Cluster:
    """The CTAs of one cluster, which share clock components and the cluster barrier."""

    def __init__(self, machine: Machine, number: int) -> None:
        size = machine.cluster_size
        warps = size * machine.warps_per_cta
        self.number = number
        self.comps = Components(6 * warps + 160 * size)
        self.barrier = ClusterBarrier()
        self.ctas: list[Cta] = []
        self.queues: dict[tuple[int, int], object] = {}

    def live_warps(self) -> int:
        return sum(c.live for c in self.ctas)


class Machine(Reporter):
    """Runs one launch. Constructed by `launch.run`."""

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        params: Params,
        geometry: Geometry,
        roles: dict[int, str],
        seed: int,
        isa: bool,
        max_steps: int,
    ) -> None:
        super().__init__(program, isa)
        self.memory, self.params, self.roles, self.max_steps = memory, params, roles, max_steps
        self.grid, self.block, self.cluster_dims = geometry.grid, geometry.block, geometry.cluster
        self.cluster_size = math.prod(geometry.cluster)
        self.threads = math.prod(geometry.block)
        self.warps_per_cta = -(-self.threads // 32)
        self.smem_bytes, self.registers = geometry.smem_bytes, geometry.registers
        self.rng = random.Random(seed)
        self.quantum = self.rng.choice((3, 30, 300))
        self.spurious = self.rng.choice((0.0, 0.2))
        self.delays = {u: self.rng.choice((0, 20, 200, 2000)) for u in ("tma", "store", "mma", "bulk", "cp")}
        self.now = 0
        self.executed = 0
        self.sequence = 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.ready: list[Warp] = []
        self.progress = 0  # tick of the last one
        self.final_registers: dict[int, set[int]] = {}  # warp id -> registers per thread at its end
        self.tally = Tally(len(program.steps) + 1)
        self.kinds = [_KINDS[s.kind] for s in program.steps]

    # -- events ---------------------------------------------------------------------------------------------------
    def later(self, unit: str, run: Callable[[], None], at: tuple[Warp, Instr]) -> None:
        """Run `run` after a random delay of asynchronous unit `unit`."""
        mean = self.delays[unit]
        delay = int(self.rng.random() * 2 * mean) if mean else 0

        def event() -> None:
            self.event_instr, self.progress = at, self.now
            run()
            self.event_instr = None

        heapq.heappush(self.events, (self.now + delay, self.sequence, event))
        self.sequence += 1

    def suspend(self, w: Warp) -> None:
        """Take a runnable warp away for a while, as a busy multiprocessor may."""
        self.ready.remove(w)
        heapq.heappush(
            self.events, (self.now + int(self.rng.random() * MAX_STALL), self.sequence, lambda: self.ready.append(w))
        )
        self.sequence += 1

    def wake(self, warps: list[Warp]) -> None:
        self.progress = self.now
        for warp in warps:
            if warp.wait is not None:
                warp.wait = None
                self.ready.append(warp)

    def settle(self, bar: Mbarrier) -> None:
        self.progress = self.now
        if bar.pending == 0 and bar.tx == 0:
            self.wake(bar.settle())

    # -- running --------------------------------------------------------------------------------------------------
    def run_cluster(self, cluster: Cluster) -> None:
        """Run a cluster until all its warps have left and its asynchronous work is done."""
        self.ready = [w for c in cluster.ctas for w in c.warps]
        rng = self.rng
        while True:
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            if not self.ready:
                if self.events:
                    self.now = max(self.now, self.events[0][0])
                    continue
                if cluster.live_warps():
                    self.deadlock(cluster)
                break
            warp = self.ready[int(rng.random() * len(self.ready))]
            if warp.stall and rng.random() < warp.stall:
                self.suspend(warp)
                continue
            self.current = warp
            self.run_warp(warp, self.quantum)
            if warp.done or warp.wait is not None:
                self.ready.remove(warp)
            if self.executed > self.max_steps or self.now - self.progress > STALL_TICKS:
                what = (
                    f"{self.executed} warp instructions executed"
                    if self.executed > self.max_steps
                    else f"nothing completes for {STALL_TICKS} ticks"
                )
                raise Fault("livelock", f"{what}\n{dump(cluster)}")

    def run_warp(self, w: Warp, quantum: int) -> None:
        """Run `w` until it sleeps, ends or has used up `quantum` instructions."""
        steps, kinds, counts = self.program.steps, self.kinds, w.counts
        limit = self.now + quantum
        pc = w.pc
        while self.now < limit:
            if pc == w.reconverge:
                pc = self.pop(w)
                if w.done:
                    break
                continue
            step = steps[pc]
            if w.hazard and w.hazard & step.touched:
                w.instr, w.step_pc = step.instr, pc
                self.force_loads(w, step)
            kind = kinds[pc]
            if kind == 0:
                err = step.native(w.base, w.active)  # type: ignore[misc]
                counts[pc] += 1
                self.now += step.count
                if err:
                    self.segment_fault(w, step, err)
                pc = step.next
            elif kind == 1:
                w.instr, w.step_pc, w.pc = step.instr, pc, pc
                self.now += 1
                guard = step.instr.guard
                mask = w.active
                if guard is not None:
                    value = int(w.words[guard.offset // 4])
                    mask &= ~value if step.instr.guard_negated else value
                out = step.run(w, mask) if mask else None  # type: ignore[misc]
                if out is BLOCKED:
                    self.now -= 1
                    if not self.try_sibling(w):
                        break
                    pc = w.pc
                    continue
                w.swapped = False
                counts[pc] += 1
                pc = step.next
                if out is SLEEP:
                    w.pc = pc
                    break
            elif kind == 2:
                counts[pc] += 1
                self.now += 1
                pc = self.branch(w, step)
            else:
                counts[pc] += 1
                self.now += 1
                w.instr, w.step_pc = step.instr, pc
                pc = self.leave(w, step, kind == 4)
                if w.done:
                    break
        w.pc = pc
        w.executed += self.now - (limit - quantum)
        self.executed += self.now - (limit - quantum)

    def guard_mask(self, w: Warp, step: Step) -> int:
        guard = step.instr.guard
        if guard is None:
            return w.active
        value = int(w.words[guard.offset // 4])
        return w.active & (~value if step.instr.guard_negated else value)

    def branch(self, w: Warp, step: Step) -> int:
        taken = self.guard_mask(w, step)
        if taken == w.active:
            w.taken[step.pc] += 1
            return step.target
        w.falls[step.pc] += 1
        if not taken:
            return step.next
        w.taken[step.pc] += 1
        sides = [(step.target, taken), (step.next, w.active & ~taken)]
        if self.rng.random() < 0.5:
            sides.reverse()
        join = step.reconverge
        w.stack.append((join, w.active, w.reconverge))
        for pc, mask in sides:
            if pc != join:
                w.stack.append((pc, mask, join))
        return self.pop(w)

    def pop(self, w: Warp) -> int:
        """Continue with the next entry of the SIMT stack that has live lanes; ends the warp when there is none."""
        while w.stack:
            pc, mask, w.reconverge = w.stack.pop()
            w.active = mask & ~w.exited
            if w.active and pc >= 0:
                return pc
        self.end_warp(w)
        return w.pc

    def try_sibling(self, w: Warp) -> bool:
        """A side of a branch waits: run the other side, once until one of them gets on. False: the warp sleeps."""
        if w.swapped or len(w.stack) < 2 or w.stack[-1][2] != w.reconverge or w.stack[-1][0] == w.reconverge:
            w.swapped = False
            return False
        pc, mask, _ = w.stack[-1]
        mask &= ~w.exited
        if not mask:
            return False
        w.stack[-1] = (w.pc, w.active, w.reconverge)
        w.pc, w.active, w.swapped, w.wait = pc, mask, True, None
        return True

    def leave(self, w: Warp, step: Step, trap: bool) -> int:
        mask = self.guard_mask(w, step)
        if mask and trap:
            raise Fault("trap", f"{step.instr.opcode} executed by lanes {mask:#010x}")
        w.exited |= mask
        w.active &= ~mask
        return step.next if w.active else self.pop(w)

    def end_warp(self, w: Warp) -> None:
        w.done = True
        w.active = 0
        warp_end_checks(self, w)
        self.final_registers.setdefault(w.index, set()).add(w.num_regs)
        w.cta.live -= 1
        self.wake(w.cta.cluster.barrier.settle(w.cta.cluster.live_warps()))

    def segment_fault(self, w: Warp, step: Step, err: int) -> None:
        w.instr = self.program.kernel.instrs[step.first + (err >> 4) - 1]
        if err & 15 == FAULT_UNINIT:
            raise Fault("reg-uninit", "reads a register that this lane never wrote")
        raise Fault(
            "partial-warp", f"executed by lanes {w.active:#010x}, which are not exactly the lanes of its member mask"
        )

    def force_loads(self, w: Warp, step: Step) -> None:
        """A step touches registers of a tcgen05.ld that was not waited for."""
        touched = step.touched
        for load in w.loads:
            if load.regs & touched:
                what = f"uses registers of {load.instr.where()} with no tcgen05.wait::ld between"
                self.report("tcgen05-ld-unwaited", what, self.relaxed(), (w, self.first_touching(step, load.regs)))
                self.finish_loads(w, load.sequence)
                break

    def first_touching(self, step: Step, regs: int) -> Instr:
        from .program import uses_defs

        for ins in self.program.kernel.instrs[step.first : step.first + step.count]:
            reads, writes = uses_defs(ins)
            if (reads | writes) & regs:
                return ins
        return step.instr

    def finish_loads(self, w: Warp, through: int) -> None:
        """Deliver every pending tcgen05.ld up to sequence number `through`; the warp has observed them."""
        rest = []
        for load in w.loads:
            if load.sequence <= through:
                if load.run is not None:
                    load.run()
            else:
                rest.append(load)
        w.loads = rest
        w.hazard = 0
        for load in rest:
            w.hazard |= load.regs
        w.learn_tcgen(w.comp_ld, through)

    def deadlock(self, cluster: Cluster) -> None:
        stuck = [w for c in cluster.ctas for w in c.warps if not w.done]
        self.current = stuck[0]
        raise Fault("deadlock", f"no warp can run and nothing is in flight\n{dump(cluster)}")

    def run_cta(self, number: int, make: Callable[[Machine, int], Cluster]) -> None:
        """Run cluster `number` of the grid whole."""
        cluster = make(self, number)
        try:
            self.run_cluster(cluster)
            cluster_end_checks(self, cluster)
        finally:
            for w in (w for cta in cluster.ctas for w in cta.warps):
                self.tally.add(w.index, w.counts, w.taken, w.falls)

    def result(self) -> Result:
        findings = sorted(self.findings.values(), key=lambda f: (f.severity != "fault", f.severity == "warning"))
        counters: Counters = collect(self.program, self.tally, self.roles)
        return Result(findings, None, counters, self.now, self.executed, self.final_registers)


def sleep(w: Warp, what: str, detail: Callable[[], str]) -> None:
    w.wait = Wait(what, detail)
