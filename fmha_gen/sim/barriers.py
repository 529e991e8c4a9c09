"""mbarriers, named barriers and the cluster barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .clocks import HB, TCGEN, Components, join
from .findings import Fault

if TYPE_CHECKING:
    from .warp import Warp

MAX_COUNT = (1 << 20) - 1


class Mbarrier:
    """An mbarrier object. Its phase completes when no arrival and no transaction byte is pending.

    Each completed phase is a clock tick of the barrier's component: asynchronous writes that complete on phase p carry
    clock p + 1, so a thread knows of them when it has observed that phase.
    """

    def __init__(self, address: int, count: int, comp: int, comps: Components, init_comp: int, init_clock: int) -> None:
        self.address, self.comp = address, comp
        self.expected = self.pending = count
        self.tx = 0
        self.phase = 0
        self.init_comp, self.init_clock = init_comp, init_clock
        self.joining = comps.zero()
        self.completed = comps.zero()
        self.waiters: list[Warp] = []

    def where(self) -> str:
        return f"mbarrier {self.address:#x}"

    def state(self) -> str:
        phase = f"phase {self.phase} (parity {self.phase & 1} incomplete)"
        return f"{self.where()} {phase}, pending arrivals {self.pending} of {self.expected}, tx {self.tx}"

    def arrive(self, count: int, message: NDArray[np.uint32] | None) -> None:
        if count > self.pending:
            raise Fault("mbar-overflow", f"{count} arrivals on {self.state()}: more arrivals than the barrier expects")
        if message is not None:
            join(self.joining, message)
        self.pending -= count

    def expect(self, num_bytes: int) -> None:
        self.tx += num_bytes
        if self.tx > MAX_COUNT:
            raise Fault("mbar-tx", f"{self.state()}: transaction count beyond {MAX_COUNT}")

    def complete_tx(self, num_bytes: int, message: NDArray[np.uint32] | None) -> None:
        if message is not None:
            join(self.joining, message)
        self.tx -= num_bytes
        if self.tx < -MAX_COUNT:
            raise Fault("mbar-tx", f"{self.state()}: transaction count below {-MAX_COUNT}")

    def settle(self) -> list[Warp]:
        """Complete the phase if nothing is pending; the warps to wake."""
        if self.pending or self.tx:
            return []
        self.phase += 1
        self.joining[HB, self.comp] = self.phase
        self.joining[TCGEN, self.comp] = self.phase
        self.completed, self.joining = self.joining, self.joining.copy()
        self.pending = self.expected
        woken, self.waiters = self.waiters, []
        return woken

    def passed(self, parity: int) -> bool:
        """Whether the phase with this parity is complete."""
        return (self.phase & 1) != parity


class NamedBarrier:
    """bar/barrier state of one CTA barrier id."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.expected = 0
        self.arrived = 0
        self.members: list[Warp] = []
        self.waiting: list[Warp] = []
        self.clock: NDArray[np.uint32] | None = None
        self.votes: list[tuple[Warp, int, int, Callable[[Warp, int, list[tuple[int, int]]], None]]] = []

    def state(self) -> str:
        who = ", ".join(w.who() for w in self.members) or "nobody"
        return f"named barrier {self.number}: {self.arrived} of {self.expected} threads arrived ({who})"

    def join(self, warp: Warp, lanes: int, expected: int, waits: bool) -> bool:
        """Count an arrival; True when it completes the barrier."""
        if expected % 32 or not expected:
            raise Fault(
                "bar-count", f"named barrier {self.number}: thread count {expected} is not a positive multiple of 32"
            )
        if self.arrived and expected != self.expected:
            raise Fault("bar-count", f"{self.state()}; this arrival says {expected} threads")
        if warp in self.members and lanes == 32:
            raise Fault("bar-twice", f"{self.state()}; the same warp arrives again before the barrier completes")
        self.expected = expected
        self.arrived += lanes
        self.members.append(warp)
        message = warp.release()
        if self.clock is None:
            self.clock = message
        else:
            join(self.clock, message)
        if self.arrived > expected:
            raise Fault("bar-count", f"{self.state()}: more threads than expected")
        if waits:
            self.waiting.append(warp)
        return self.arrived == expected

    def reduce(self) -> None:
        """Give every voting warp its result of the reduction."""
        ballots = [(lanes, value) for _, lanes, value, _ in self.votes]
        for warp, lanes, _, put in self.votes:
            put(warp, lanes, ballots)
        self.votes = []

    def complete(self) -> list[Warp]:
        """Reset for the next use; every waiting warp acquires. Returns the waiting warps."""
        assert self.clock is not None
        waiting, clock = self.waiting, self.clock
        self.arrived = 0
        self.members, self.waiting, self.clock = [], [], None
        for warp in waiting:
            warp.acquire(clock)
        return waiting


class ClusterBarrier:
    """barrier.cluster of one cluster; arrivals are counted in warps' live threads."""

    def __init__(self) -> None:
        self.phase = 0
        self.arrived: list[Warp] = []
        self.waiting: list[Warp] = []
        self.clock: NDArray[np.uint32] | None = None
        self.completed: NDArray[np.uint32] | None = None

    def state(self) -> str:
        return f"cluster barrier phase {self.phase}: {len(self.arrived)} warps arrived"

    def arrive(self, warp: Warp, message: NDArray[np.uint32]) -> None:
        if warp.cluster_phase is not None:
            raise Fault("cluster-barrier", f"{warp.who()} arrives twice without a wait; {self.state()}")
        warp.cluster_phase = self.phase
        self.arrived.append(warp)
        if self.clock is None:
            self.clock = message.copy()
        else:
            join(self.clock, message)

    def settle(self, live: int) -> list[Warp]:
        """Complete the phase when all `live` warps have arrived; the warps to wake."""
        if not self.arrived or len(self.arrived) < live:
            return []
        self.phase += 1
        self.completed, self.clock = self.clock, None
        self.arrived = []
        woken, self.waiting = self.waiting, []
        return woken
