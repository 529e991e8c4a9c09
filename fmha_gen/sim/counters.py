"""Executed-instruction counts, by warp, role and natural loop."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LoopCount:
    """One natural loop as one role ran it.

    line: PTX line of its header; loc: source line of the header. iterations: header executions, summed over warps;
    instructions: warp instructions inside the loop, inner loops included; own: without inner loops.
    by_opcode: warp instructions inside the loop by opcode.
    """

    line: int
    loc: tuple[str, int] | None
    depth: int
    iterations: int = 0
    instructions: int = 0
    own: int = 0
    warps: int = 0
    by_opcode: dict[str, int] = field(default_factory=dict)

    @property
    def per_iteration(self) -> float:
        return self.instructions / self.iterations if self.iterations else 0.0


@dataclass(slots=True)
class Counters:
    """Executed warp instructions of all CTAs by warp id, by role, by role and opcode; loops by role in PTX order."""

    warps: dict[int, int] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    opcodes: dict[str, dict[str, int]] = field(default_factory=dict)
    loops: dict[str, list[LoopCount]] = field(default_factory=dict)
