"""Timing of contenders side by side: interleaved samples, the median counts. Knows no GPU: a clock is handed in."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

SAMPLE_MS = 10.0  # device time of one sample: the clock of a card at its power limit settles within milliseconds
MAX_CALLS = 256
WARM_UP = 3


class Clock(Protocol):
    """Device time between two points of the stream."""

    def record(self) -> int:
        """A point after everything that was launched so far."""

    def milliseconds(self, start: int, end: int) -> float:
        """Device time between two points; waits for the second one."""


@dataclass(frozen=True)
class Contender:
    """launch(i): enqueue once on input set i."""

    name: str
    launch: Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch. samples: of every sample, in order; each is the mean of `calls` launches."""

    us: float
    calls: int
    samples: tuple[float, ...]

    @property
    def spread(self) -> float:
        """(upper - lower quartile) / median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.us


def measure(contenders: Sequence[Contender], clock: Clock, num_sets: int, rounds: int) -> dict[str, Timing]:
    """Time every contender in `rounds` samples, taking turns, so that clocks and temperature are the same for all.

    Every second round goes backwards: what a contender does to the clock falls on each of the others alike. Each launch
    takes the next of `num_sets` input sets, as the caches have long lost the one it took last.
    """
    calls = {c.name: _calls(c, clock, num_sets) for c in contenders}
    marks: dict[str, list[tuple[int, int]]] = {c.name: [] for c in contenders}
    turn = 0
    for r in range(rounds):
        for i in range(len(contenders)):
            contender = contenders[(r + i if r % 2 == 0 else r - i) % len(contenders)]
            start = clock.record()
            for _ in range(calls[contender.name]):
                contender.launch(turn % num_sets)
                turn += 1
            marks[contender.name].append((start, clock.record()))
    result = {}
    for name, points in marks.items():
        samples = tuple(clock.milliseconds(*p) * 1e3 / calls[name] for p in points)
        result[name] = Timing(statistics.median(samples), calls[name], samples)
    return result


def _calls(contender: Contender, clock: Clock, num_sets: int) -> int:
    """Launches per sample, after warming up."""
    for i in range(WARM_UP):
        contender.launch(i % num_sets)
    start = clock.record()
    for i in range(WARM_UP):
        contender.launch(i % num_sets)
    each = clock.milliseconds(start, clock.record()) / WARM_UP
    return max(1, min(MAX_CALLS, round(SAMPLE_MS / each))) if each > 0 else MAX_CALLS
