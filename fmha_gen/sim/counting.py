"""Turn step counts of warps into executed-instruction counters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .cfg import Loop
from .counters import Counters, LoopCount
from .program import Program


class Tally:
    """int64 [3, steps] per warp id, summed over CTAs: executions of a step, and of a branch taken and not taken."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.warps: dict[int, NDArray[np.int64]] = {}

    def add(self, warp: int, counts: list[int], taken: list[int], falls: list[int]) -> None:
        total = self.warps.setdefault(warp, np.zeros((3, self.steps), np.int64))
        total += np.array([counts, taken, falls])


def collect(program: Program, tally: Tally, roles: dict[int, str]) -> Counters:
    out = Counters()
    sizes = np.array([s.count for s in program.steps])
    blocks = np.array([s.block for s in program.steps])
    by_role: dict[str, list[NDArray[np.int64]]] = {}
    for warp, table in sorted(tally.warps.items()):
        role = roles.get(warp, f"warp {warp}")
        out.warps[warp] = int((table[0, :-1] * sizes).sum())
        out.roles[role] = out.roles.get(role, 0) + out.warps[warp]
        by_role.setdefault(role, []).append(table)
    for role, tables in by_role.items():
        total = np.sum(tables, axis=0)
        out.opcodes[role] = _opcodes(program, total[0], None)
        per_block = np.bincount(blocks, total[0, :-1] * sizes, len(program.cfg.blocks)).astype(np.int64)
        out.loops[role] = [
            found for loop in program.cfg.loops if (found := _loop(program, loop, total, per_block, tables)) is not None
        ]
    return out


def _loop(program: Program, loop: Loop, total: NDArray[np.int64], per_block: NDArray[np.int64],
          tables: list[NDArray[np.int64]]) -> LoopCount | None:  # fmt: skip
    cfg = program.cfg
    header = program.block_pc[loop.header]
    if not total[0, header]:
        return None
    ins = program.kernel.instrs[cfg.blocks[loop.header].start]
    within = [other for other in cfg.loops if other.blocks < loop.blocks]
    inner = set().union(*(other.blocks for other in within))
    again = sum(_back_edges(program, other, total) for other in within if other.header == loop.header)
    return LoopCount(
        ins.line,
        ins.loc,
        loop.depth,
        iterations=int(total[0, header]) - again,
        instructions=int(sum(per_block[b] for b in loop.blocks)),
        own=int(sum(per_block[b] for b in loop.blocks - inner)),
        warps=sum(bool(t[0, header]) for t in tables),
        by_opcode=_opcodes(program, total[0], loop.blocks),
    )


def _back_edges(program: Program, loop: Loop, total: NDArray[np.int64]) -> int:
    """Times that the loop's back edges were taken."""
    out = 0
    header = program.block_pc[loop.header]
    for latch in loop.latches:
        end = program.block_pc[latch + 1] if latch + 1 < len(program.block_pc) else len(program.steps)
        step = program.steps[end - 1]
        row = 0 if step.kind != "bra" else 1 if step.target == header else 2
        out += int(total[row, step.pc])
    return out


def _opcodes(program: Program, counts: NDArray[np.int64], blocks: frozenset[int] | None) -> dict[str, int]:
    out: dict[str, int] = {}
    instrs = program.kernel.instrs
    for pc in np.nonzero(counts[:-1])[0].tolist():
        step = program.steps[pc]
        if blocks is None or step.block in blocks:
            n = int(counts[pc])
            for ins in instrs[step.first : step.first + step.count]:
                out[ins.opcode] = out.get(ins.opcode, 0) + n
    return dict(sorted(out.items(), key=lambda kv: -kv[1]))
