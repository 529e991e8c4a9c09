"""Natural loops of a control-flow graph, and the spin waits in them.

ptxas places cold code out of line and retries a failed mbarrier wait there, so a loop's text is not one range of
addresses. Here a loop is what the graph says: the blocks from which a back edge is reached without passing the header;
back edges to one header make one loop. A loop that only asks again (for an mbarrier phase, for registers, for TMEM, for
a flag in memory) is a spin: it is kept apart, and no loop counts as nested for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cfg import Graph
from .disasm import Instruction

# What a spin may hold beside its question: tests, waits, moves and address arithmetic, nothing that does work.
_IDLE = frozenset(
    """NANOSLEEP BRA NOP ISETP UISETP PLOP3 UPLOP3 MOV UMOV SEL USEL SHF USHF IADD3 UIADD3 IADD VIADD LOP3 ULOP3 IMAD
    UIMAD LEA ULEA PRMT UPRMT WARPSYNC BSSY BSYNC YIELD VOTE VOTEU ELECT LDC LDCU R2UR S2R S2UR CS2R P2R R2P DEPBAR
    CCTL""".split()
)
_QUESTIONS = ("SYNCS.PHASECHK", "USETMAXREG.TRY_ALLOC", "UTCATOMSWS", "LD.E.STRONG", "LDG.E.STRONG", "ATOM")


@dataclass(slots=True)
class Spin:
    """A loop that retries a question. question: the instruction that asks. cold: entered only after a first try."""

    header: int
    blocks: set[int]
    question: Instruction
    cold: bool


@dataclass(slots=True)
class Loop:
    """A natural loop, back edges to one header merged.

    blocks: all, with those of nested loops. hot: those that an iteration without a failed wait can pass, without nested
    loops. parent and children: indices into the list of loops; children are in address order.
    """

    header: int
    latches: list[int]
    blocks: set[int]
    hot: set[int] = field(default_factory=set)
    parent: int | None = None
    children: list[int] = field(default_factory=list)


def find_loops(graph: Graph) -> tuple[list[Loop], list[Spin], list[tuple[int, int]]]:
    """Loops by address of their header, spins, and retreating edges into the middle of a cycle (irreducible flow)."""
    loops: dict[int, Loop] = {}
    spins: dict[int, Spin] = {}
    irreducible: list[tuple[int, int]] = []
    position = {b: n for n, b in enumerate(graph.order)}
    for source in graph.order:
        for header in graph.blocks[source].succ:
            if not graph.dominates(header, source):
                if position[header] <= position[source]:
                    irreducible.append((source, header))
                continue
            body = _natural_loop(graph, source, header)
            question = _spin_question(graph, body)
            if question is not None:
                spin = spins.setdefault(header, Spin(header, set(), question, False))
                spin.blocks |= body
            else:
                loop = loops.setdefault(header, Loop(header, [], set()))
                loop.latches.append(source)
                loop.blocks |= body
    ordered = [loops[h] for h in sorted(loops)]
    for spin in spins.values():
        spin.cold = _is_cold(graph, spin)
    _nest(ordered)
    for loop in ordered:
        loop.hot = _hot_blocks(graph, loop, ordered, list(spins.values()))
    return ordered, [spins[h] for h in sorted(spins)], irreducible


def path_slots(graph: Graph, loop: Loop) -> tuple[int, int]:
    """Fewest and most instructions of one iteration of an innermost loop, header to latch, without retries."""
    weight = {b: graph.blocks[b].end - graph.blocks[b].start for b in loop.hot}
    shortest, longest = {loop.header: weight[loop.header]}, {loop.header: weight[loop.header]}
    for b in graph.order:
        if b not in loop.hot or b not in shortest:
            continue
        for s in graph.blocks[b].succ:
            if s == loop.header or s not in loop.hot or s == b:
                continue
            shortest[s] = min(shortest.get(s, shortest[b] + weight[s]), shortest[b] + weight[s])
            longest[s] = max(longest.get(s, 0), longest[b] + weight[s])
    ends = [b for b in loop.latches if b in shortest]
    return min(shortest[b] for b in ends), max(longest[b] for b in ends)


def _natural_loop(graph: Graph, source: int, header: int) -> set[int]:
    body, work = {header, source}, [source] if source != header else []
    while work:
        for p in graph.blocks[work.pop()].pred:
            if p not in body and p in graph.reachable:
                body.add(p)
                work.append(p)
    return body


def _spin_question(graph: Graph, body: set[int]) -> Instruction | None:
    question = None
    for b in sorted(body):
        for ins in graph.instructions(b):
            if ins.opcode.startswith(_QUESTIONS):
                question = question or ins
            elif ins.base not in _IDLE:
                return None
    return question


def _is_cold(graph: Graph, spin: Spin) -> bool:
    """Entered only where a first try failed, or from a branch whose other way skips just the spin."""
    exits = {s for b in spin.blocks for s in graph.blocks[b].succ} - spin.blocks
    outside = [p for p in graph.blocks[spin.header].pred if p not in spin.blocks and p in graph.reachable]
    for p in outside:
        branch, taken = _deciding_branch(graph, p, spin.header)
        asked = any(i.opcode.startswith(_QUESTIONS) for i in graph.instructions(branch))
        others = set(graph.blocks[branch].succ) - {taken}
        if not others or not (asked or others & exits):
            return False
    return bool(outside)


def _deciding_branch(graph: Graph, block: int, entered: int) -> tuple[int, int]:
    """The branch that leads to `entered` by way of `block`, past blocks that only move registers; and its way taken."""
    while (
        len(graph.blocks[block].succ) == 1
        and len(graph.blocks[block].pred) == 1
        and all(i.base in _IDLE for i in graph.instructions(block))
    ):
        block, entered = graph.blocks[block].pred[0], block
    return block, entered


def _nest(loops: list[Loop]) -> None:
    for i, loop in enumerate(loops):
        around = [j for j, o in enumerate(loops) if j != i and loop.blocks < o.blocks]
        if around:
            loop.parent = min(around, key=lambda j: len(loops[j].blocks))
            loops[loop.parent].children.append(i)


def _hot_blocks(graph: Graph, loop: Loop, loops: list[Loop], spins: list[Spin]) -> set[int]:
    cold = set().union(*(s.blocks for s in spins if s.cold and s.header != loop.header))
    kept = _between(graph, loop, loop.blocks - cold)
    nested = set().union(*(loops[c].blocks for c in loop.children))
    return kept - nested


def _between(graph: Graph, loop: Loop, allowed: set[int]) -> set[int]:
    """Blocks of `allowed` on a way from the header to a latch."""
    down = _closure(loop.header, {b: graph.blocks[b].succ for b in allowed}, allowed)
    up: set[int] = set()
    for latch in loop.latches:
        if latch in allowed:
            up |= _closure(latch, {b: graph.blocks[b].pred for b in allowed}, allowed)
    return (down & up) | {loop.header}


def _closure(start: int, edges: dict[int, list[int]], allowed: set[int]) -> set[int]:
    seen, work = {start}, [start]
    while work:
        for n in edges[work.pop()]:
            if n in allowed and n not in seen:
                seen.add(n)
                work.append(n)
    return seen
