"""What the simulator reports: findings, faults, and the result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import SimError
from .counters import Counters


@dataclass(slots=True)
class Finding:
    """One problem, at the first place it was seen. severity: "fault" (the run stopped), "error" or "warning".

    kind: stable identifier (docs/simulator.md). line: in the PTX; loc: (source file, line) or None; count: times seen.
    """

    kind: str
    message: str
    severity: str
    cta: int
    warp: int
    role: str
    line: int
    loc: tuple[str, int] | None
    text: str
    count: int = 1

    def __str__(self) -> str:
        cta = f"CTA {self.cta} " if self.cta >= 0 else ""
        who = f"{cta}warp {self.warp}" + (f" ({self.role})" if self.role else "")
        src = f" [{self.loc[0]}:{self.loc[1]}]" if self.loc else ""
        times = f" (seen {self.count} times)" if self.count > 1 else ""
        text = self.text if len(self.text) <= 100 else self.text[:97] + "..."
        at = f"PTX line {self.line}{src}: {text}" if self.line else "end of run"
        return f"{self.severity} {self.kind}: {who}, {at}: {self.message}{times}"


class Fault(Exception):
    """Stops a run; becomes Result.fault."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Result:
    """Outcome of a run. findings: everything reported, the fault last; counters: what was executed, by warp and loop.

    ticks: simulated scheduler time (warp instructions plus waiting). steps: warp instructions executed.
    registers: warp id -> registers per thread that its warps ended with, in all CTAs that ran.
    """

    findings: list[Finding] = field(default_factory=list)
    fault: Finding | None = None
    counters: Counters = field(default_factory=Counters)
    ticks: int = 0
    steps: int = 0
    registers: dict[int, set[int]] = field(default_factory=dict)

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.severity != "warning"]

    @property
    def ok(self) -> bool:
        return not self.errors

    def raise_for_findings(self) -> None:
        """Raise SimError with every error, when there is one."""
        if self.errors:
            raise SimError("\n".join(str(f) for f in self.errors))
