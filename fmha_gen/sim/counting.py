"""Turn step counts of warps into executed-instruction counters."""

from __future__ import annotations

from .counters import Counters, LoopCount
from .program import Program


def collect(program: Program, warp_counts: dict[int, list[int]], roles: dict[int, str]) -> Counters:
    """warp_counts: warp id -> executions of every step, summed over CTAs."""
    out = Counters()
    by_role: dict[str, list[int]] = {}
    for warp, counts in sorted(warp_counts.items()):
        role = roles.get(warp, f"warp {warp}")
        total = sum(n * s.count for n, s in zip(counts, program.steps))
        out.warps[warp] = total
        out.roles[role] = out.roles.get(role, 0) + total
        summed = by_role.setdefault(role, [0] * len(counts))
        by_role[role] = [a + b for a, b in zip(summed, counts, strict=True)]
        _loops(program, counts, out.loops.setdefault(role, []))
    for role, counts in by_role.items():
        out.opcodes[role] = _opcodes(program, counts, None)
        for loop, found in zip(program.cfg.loops, out.loops[role], strict=True):
            if found.iterations:
                found.by_opcode = _opcodes(program, counts, loop.blocks)
    for role in out.loops:
        out.loops[role] = [c for c in out.loops[role] if c.iterations]
    return out


def _opcodes(program: Program, counts: list[int], blocks: frozenset[int] | None) -> dict[str, int]:
    out: dict[str, int] = {}
    instrs = program.kernel.instrs
    for n, step in zip(counts, program.steps):
        if n and (blocks is None or step.block in blocks):
            for ins in instrs[step.first : step.first + step.count]:
                out[ins.opcode] = out.get(ins.opcode, 0) + n
    return dict(sorted(out.items(), key=lambda kv: -kv[1]))


def _loops(program: Program, counts: list[int], into: list[LoopCount]) -> None:
    cfg = program.cfg
    if not into:
        for loop in cfg.loops:
            ins = program.kernel.instrs[cfg.blocks[loop.header].start]
            into.append(LoopCount(ins.line, ins.loc, loop.depth))
    per_block = [0] * len(cfg.blocks)
    for n, step in zip(counts, program.steps):
        per_block[step.block] += n * step.count
    for loop, found in zip(cfg.loops, into, strict=True):
        inner = set().union(*(other.blocks for other in cfg.loops if other is not loop and other.blocks < loop.blocks))
        iterations = counts[program.block_pc[loop.header]]
        if iterations:
            found.iterations += iterations
            found.instructions += sum(per_block[b] for b in loop.blocks)
            found.own += sum(per_block[b] for b in loop.blocks if b not in inner)
            found.warps += 1
