"""A token check of mbarrier protocols: executes role programs once and proves the result for every interleaving.

Programs are straight lines of operations, so they are confluent unless they race: one execution finds every deadlock.
Races are then found by happens-before on the events of that execution. With completion c of a barrier counted from 0,
a wait for completion k spins until the phase's parity differs from k's, so it is right only if

- completion k-1 happens before the wait begins (else it passes a phase early), and
- the wait happens before completion k+1 (else it is overtaken and hangs), and
- every arrival of phase k happens after completion k-1 (else it falls into the phase before).

Conflicting accesses to the same bytes, columns or values must be ordered too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Span = tuple[str, int, int]  # space, first, one past the last


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for completion `k` of one stage of a barrier; k = -1 passes at once (the slot was never used)."""

    barrier: str
    stage: int
    k: int


@dataclass(frozen=True, slots=True)
class Arrive:
    barrier: str
    stage: int
    count: int


@dataclass(frozen=True, slots=True)
class Access:
    """Reads and writes by the actor itself, complete when it goes on."""

    what: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Mma:
    """An MMA handed to the tensor core, which works in issue order; done only when a later commit says so."""

    what: str
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """One arrival when every MMA issued so far is done."""

    barrier: str
    stage: int


@dataclass(frozen=True, slots=True)
class Load:
    """A TMA load: one arrive.expect_tx now; the phase also needs the bytes, which land on their own."""

    what: str
    barrier: str
    stage: int
    writes: tuple[Span, ...]


Op = Wait | Arrive | Access | Mma | Commit | Load


@dataclass(slots=True)
class _Stage:
    pending: int
    arrivals: list[int] = field(default_factory=list)
    completions: list[int] = field(default_factory=list)  # event of each completed phase
    phases: list[list[int]] = field(default_factory=list)  # and the arrivals that completed it


@dataclass(slots=True)
class _Actor:
    name: str
    ops: Sequence[Op]
    at: int = 0
    last: int = -1  # its latest event
    mma: int = -1  # the tensor core's latest event, for the actor that issues


@dataclass(frozen=True, slots=True)
class _Wait:
    key: tuple[str, int]
    k: int
    before: int  # the actor's event before the wait
    event: int
    who: str


def run(programs: dict[str, Sequence[Op]], counts: dict[str, int]) -> list[str]:
    """Findings of one set of programs (actor -> operations) with the barriers' arrive counts; empty if consistent."""
    return _Run(programs, counts).findings()


class _Run:
    def __init__(self, programs: dict[str, Sequence[Op]], counts: dict[str, int]) -> None:
        self.actors = [_Actor(name, ops) for name, ops in programs.items()]
        self.counts = counts
        self.stages: dict[tuple[str, int], _Stage] = {}
        self.past: list[int] = []  # per event, the set of events before it, as a bit set
        self.waits: list[_Wait] = []
        self.arrived: list[tuple[tuple[str, int], int, int, str]] = []  # stage, phase, event, who
        self.accesses: list[tuple[int, str, tuple[Span, ...], tuple[Span, ...]]] = []
        self.found: list[str] = []

    def findings(self) -> list[str]:
        self._execute()
        if not self.found:
            self._check_phases()
            self._check_accesses()
        return self.found

    # --- execution

    def _event(self, *preds: int) -> int:
        past = 0
        for p in preds:
            if p >= 0:
                past |= self.past[p] | (1 << p)
        self.past.append(past)
        return len(self.past) - 1

    def _before(self, a: int, b: int) -> bool:
        return a == b or (b >= 0 and bool(self.past[b] >> a & 1))

    def _stage(self, key: tuple[str, int]) -> _Stage:
        if key not in self.stages:
            self.stages[key] = _Stage(self.counts[key[0]])
        return self.stages[key]

    def _execute(self) -> None:
        moved = True
        while moved and not self.found:
            moved = False
            for actor in self.actors:
                while actor.at < len(actor.ops) and self._step(actor, actor.ops[actor.at]):
                    actor.at += 1
                    moved = True
        stuck = [a for a in self.actors if a.at < len(a.ops)]
        if stuck and not self.found:
            self.found.append("deadlock: " + "; ".join(self._describe(a) for a in stuck))

    def _describe(self, actor: _Actor) -> str:
        op = actor.ops[actor.at]
        assert isinstance(op, Wait)
        stage = self._stage((op.barrier, op.stage))
        expected = self.counts[op.barrier]
        return (
            f"{actor.name} waits for completion {op.k} of {op.barrier}[{op.stage}], which has {len(stage.completions)} "
            f"and {expected - stage.pending} of {expected} arrivals of the next"
        )

    def _step(self, actor: _Actor, op: Op) -> bool:
        match op:
            case Wait(barrier, index, k):
                stage = self._stage((barrier, index))
                if k >= len(stage.completions):
                    return False
                before = actor.last
                actor.last = self._event(before, stage.completions[k] if k >= 0 else -1)
                self.waits.append(_Wait((barrier, index), k, before, actor.last, actor.name))
            case Arrive(barrier, index, count):
                actor.last = self._event(actor.last)
                self._arrive((barrier, index), count, actor.last, actor.name)
            case Access(what, reads, writes):
                actor.last = self._event(actor.last)
                self.accesses.append((actor.last, f"{actor.name}: {what}", reads, writes))
            case Mma(what, reads, writes):
                actor.last = self._event(actor.last)
                actor.mma = self._event(actor.last, actor.mma)
                self.accesses.append((actor.mma, f"{actor.name}: {what}", reads, writes))
            case Commit(barrier, index):
                actor.last = self._event(actor.last)
                done = self._event(actor.last, actor.mma)
                actor.mma = done
                self._arrive((barrier, index), 1, done, actor.name)
            case Load(what, barrier, index, writes):
                actor.last = self._event(actor.last)
                landed = self._event(actor.last)
                self.accesses.append((landed, f"{actor.name}: {what}", (), writes))
                self._arrive((barrier, index), 1, landed, actor.name)
        return True

    def _arrive(self, key: tuple[str, int], count: int, event: int, who: str) -> None:
        stage = self._stage(key)
        phase = len(stage.completions)
        if count > stage.pending:
            self.found.append(
                f"race: {who} makes {count} arrivals on {key[0]}[{key[1]}] in phase {phase}, which expects "
                f"{stage.pending} more of {self.counts[key[0]]}"
            )
            return
        self.arrived.append((key, phase, event, who))
        stage.arrivals.append(event)
        stage.pending -= count
        if stage.pending == 0:
            stage.completions.append(self._event(*stage.arrivals))
            stage.phases.append(stage.arrivals)
            stage.pending, stage.arrivals = self.counts[key[0]], []

    # --- proofs over the events

    def _complete_before(self, key: tuple[str, int], phase: int, event: int) -> bool:
        return all(self._before(arrival, event) for arrival in self.stages[key].phases[phase])

    def _check_phases(self) -> None:
        for key, phase, event, who in self.arrived:
            if phase and not self._complete_before(key, phase - 1, event):
                self.found.append(
                    f"race: {who} can arrive on {key[0]}[{key[1]}] for phase {phase} before phase {phase - 1} completes"
                )
                return
        for w in self.waits:
            done = self.stages[w.key].completions
            name = f"{w.key[0]}[{w.key[1]}]"
            if w.k >= 1 and not self._complete_before(w.key, w.k - 1, w.before):
                self.found.append(
                    f"race: {w.who} can wait for completion {w.k} of {name} before completion {w.k - 1}: the parity "
                    f"{w.k % 2} that it waits for is passed one phase early"
                )
                return
            if len(done) > w.k + 1 and not self._before(w.event, done[w.k + 1]):
                seen = f"has seen completion {w.k}" if w.k >= 0 else "has passed its first wait"
                self.found.append(
                    f"race: completion {w.k + 1} of {name} can come before {w.who} {seen}: it is overtaken, and waits "
                    f"for parity {w.k % 2} in vain"
                )
                return

    def _check_accesses(self) -> None:
        cuts: dict[str, set[int]] = {}
        for _, _, reads, writes in self.accesses:
            for space, lo, hi in (*reads, *writes):
                cuts.setdefault(space, set()).update((lo, hi))
        points = {space: sorted(c) for space, c in cuts.items()}
        index = {space: {x: i for i, x in enumerate(c)} for space, c in points.items()}
        last_write: dict[tuple[str, int], tuple[int, str]] = {}
        readers: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for event, what, reads, writes in self.accesses:
            for spans, writing in ((reads, False), (writes, True)):
                for space, lo, hi in spans:
                    for i in range(index[space][lo], index[space][hi]):
                        cell = (space, i)
                        old = [last_write[cell]] if cell in last_write else []
                        if writing:
                            old += readers.get(cell, [])
                        for other, text in old:
                            if not self._before(other, event):
                                self._race(space, points[space][i], text, what)
                                return
                        if writing:
                            last_write[cell], readers[cell] = (event, what), []
                        else:
                            readers.setdefault(cell, []).append((event, what))

    def _race(self, space: str, at: int, first: str, second: str) -> None:
        self.found.append(f"race: {second!r} is not ordered after {first!r} on {space} from {at}")
