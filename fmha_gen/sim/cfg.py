"""Control flow of one kernel: basic blocks, reconvergence points, loops, and register liveness.

Register sets are Python ints used as bit sets, bit i for ``Reg.index`` i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .ptx import Address, Instr, Kernel, Not, Pair, Reg, Vector

EXITS = frozenset({"exit", "ret"})
DEAD_ENDS = frozenset({"trap", "brkpt"})


@dataclass(slots=True)
class Block:
    """Instructions [start, end). succs: block numbers; exits: a lane may leave the kernel at its end."""

    number: int
    start: int
    end: int
    succs: list[int] = field(default_factory=list)
    preds: list[int] = field(default_factory=list)
    exits: bool = False
    ipdom: int = -1  # block number, or -1: only the end of the kernel
    live_out: int = 0
    defined_in: int = 0  # registers that are assigned on every path to the block


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop. header: block number; blocks: members; depth: 1 for an outermost loop; latches: its back edges.

    Back edges to one header make one loop, except where their bodies are nested (a wait loop at the top of a loop).
    """

    header: int
    blocks: frozenset[int]
    depth: int
    latches: frozenset[int]


@dataclass(slots=True)
class Cfg:
    kernel: Kernel
    blocks: list[Block]
    loops: list[Loop]


def regs_of(operand: object) -> Iterator[Reg]:
    """All registers that an operand mentions."""
    if isinstance(operand, Reg):
        yield operand
    elif isinstance(operand, Not):
        yield operand.reg
    elif isinstance(operand, Pair):
        yield from regs_of(operand.first)
        yield from regs_of(operand.second)
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from regs_of(item)
    elif isinstance(operand, Address):
        yield from regs_of(operand.base)
        for vector in (operand.coords, operand.extra):
            if vector is not None:
                yield from regs_of(vector)


def bits(regs: Iterator[Reg]) -> int:
    out = 0
    for reg in regs:
        out |= 1 << reg.index
    return out


def build(kernel: Kernel, uses_defs: Callable[[Instr], tuple[int, int]]) -> Cfg:
    """Build everything. `uses_defs` gives the (read, written) register sets of an instruction, guard excluded."""
    blocks = _blocks(kernel)
    _post_dominators(blocks)
    loops = _loops(blocks)
    use, define, must = _summaries(kernel, blocks, uses_defs)
    _liveness(blocks, use, define)
    _definite(blocks, must)
    return Cfg(kernel, blocks, loops)


def _blocks(kernel: Kernel) -> list[Block]:
    instrs = kernel.instrs
    n = len(instrs)
    leaders = {0}
    for i, instr in enumerate(instrs):
        if instr.parts[0] == "bra":
            leaders.update((instr.target, i + 1))
        elif instr.parts[0] in EXITS or instr.parts[0] in DEAD_ENDS:
            leaders.add(i + 1)
    starts = sorted(x for x in leaders if x < n)
    number = {start: k for k, start in enumerate(starts)}
    blocks = [Block(k, s, e) for k, (s, e) in enumerate(zip(starts, [*starts[1:], n], strict=True))]
    for block in blocks:
        last = instrs[block.end - 1]
        op = last.parts[0]
        falls = True
        if op == "bra":
            if last.target < n:
                block.succs.append(number[last.target])
            else:
                block.exits = True
            falls = last.guard is not None
        elif op in EXITS:
            block.exits = True
            falls = last.guard is not None
        elif op in DEAD_ENDS:
            falls = last.guard is not None
        if falls:
            if block.end < n:
                if block.number + 1 not in block.succs:
                    block.succs.append(block.number + 1)
            else:
                block.exits = True
    for block in blocks:
        for s in block.succs:
            blocks[s].preds.append(block.number)
    return blocks


def _postorder(count: int, roots: list[int], nexts: Callable[[int], list[int]]) -> list[int]:
    seen = [False] * count
    order: list[int] = []
    for root in roots:
        if seen[root]:
            continue
        seen[root] = True
        stack = [(root, iter(nexts(root)))]
        while stack:
            node, it = stack[-1]
            for s in it:
                if not seen[s]:
                    seen[s] = True
                    stack.append((s, iter(nexts(s))))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


def _dominators(count: int, root: int, order: list[int], preds: Callable[[int], list[int]]) -> list[int]:
    """Immediate dominators (Cooper, Harvey, Kennedy); -1 where unreachable. `order`: postorder from `root`."""
    rank = [-1] * count
    for i, node in enumerate(order):
        rank[node] = i
    idom = [-1] * count
    idom[root] = root
    changed = True
    while changed:
        changed = False
        for node in reversed(order):
            if node == root:
                continue
            new = -1
            for p in preds(node):
                if idom[p] < 0:
                    continue
                if new < 0:
                    new = p
                    continue
                a, b = p, new
                while a != b:
                    while rank[a] < rank[b]:
                        a = idom[a]
                    while rank[b] < rank[a]:
                        b = idom[b]
                new = a
            if idom[node] != new:
                idom[node] = new
                changed = True
    return idom


def _post_dominators(blocks: list[Block]) -> None:
    n = len(blocks)
    exits = [b.number for b in blocks if b.exits]

    def backward(node: int) -> list[int]:
        return exits if node == n else blocks[node].preds

    def forward(node: int) -> list[int]:
        block = blocks[node]
        return [*block.succs, n] if block.exits else block.succs

    order = _postorder(n + 1, [n], backward)
    idom = _dominators(n + 1, n, order, forward)
    for block in blocks:
        block.ipdom = idom[block.number] if 0 <= idom[block.number] < n else -1


def _loops(blocks: list[Block]) -> list[Loop]:
    order = _postorder(len(blocks), [0], lambda b: blocks[b].succs)
    idom = _dominators(len(blocks), 0, order, lambda b: blocks[b].preds)

    def dominates(a: int, b: int) -> bool:
        while b != a:
            if b == 0 or idom[b] < 0:
                return False
            b = idom[b]
        return True

    bodies: dict[int, list[tuple[set[int], set[int]]]] = {}  # header -> (body, latches)
    for block in blocks:
        if idom[block.number] < 0:
            continue
        for head in block.succs:
            if dominates(head, block.number):
                _add_loop(bodies.setdefault(head, []), _body(blocks, head, block.number), block.number)
    flat = [(head, body, latches) for head, found in sorted(bodies.items()) for body, latches in found]
    depth = [sum(body <= other for _, other, _ in flat) for _, body, _ in flat]
    return [Loop(h, frozenset(b), d, frozenset(t)) for (h, b, t), d in zip(flat, depth, strict=True)]


def _body(blocks: list[Block], head: int, latch: int) -> set[int]:
    body, work = {head}, [latch]
    while work:
        node = work.pop()
        if node not in body:
            body.add(node)
            work.extend(blocks[node].preds)
    return body


def _add_loop(found: list[tuple[set[int], set[int]]], body: set[int], latch: int) -> None:
    for k, (other, latches) in enumerate(found):
        if body == other or not (body < other or other < body):
            found[k] = (other | body, latches | {latch})
            return
    found.append((body, {latch}))


def _summaries(kernel: Kernel, blocks: list[Block],
               uses_defs: Callable[[Instr], tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:  # fmt: skip
    """Per block: upward-exposed uses, full definitions (kill), definite definitions."""
    use, define, must = [], [], []
    for block in blocks:
        exposed = kill = 0
        for instr in kernel.instrs[block.start : block.end]:
            reads, writes = uses_defs(instr)
            if instr.guard is not None:
                exposed |= (reads | 1 << instr.guard.index | writes) & ~kill  # a guarded write keeps other lanes
            else:
                exposed |= reads & ~kill
                kill |= writes
        use.append(exposed)
        define.append(kill)
        must.append(kill)
    return use, define, must


def _liveness(blocks: list[Block], use: list[int], define: list[int]) -> None:
    live_in = [0] * len(blocks)
    work = list(range(len(blocks)))
    while work:
        n = work.pop()
        block = blocks[n]
        out = 0
        for s in block.succs:
            out |= live_in[s]
        block.live_out = out
        new = use[n] | (out & ~define[n])
        if new != live_in[n]:
            live_in[n] = new
            work.extend(block.preds)


def _definite(blocks: list[Block], must: list[int]) -> None:
    everything = -1
    out = [everything] * len(blocks)
    order = list(reversed(_postorder(len(blocks), [0], lambda b: blocks[b].succs)))
    changed = True
    while changed:
        changed = False
        for n in order:
            value = 0 if n == 0 else everything
            for p in blocks[n].preds:
                value &= out[p]
            if n == 0:
                value = 0
            blocks[n].defined_in = value
            new = value | must[n]
            if new != out[n]:
                out[n] = new
                changed = True
