"""Control flow of a code section: basic blocks, edges, dominators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .disasm import Instruction, Section

_JUMPS = {"BRA", "JMP", "BRX", "BRXU", "JMX", "JMXU"}
_ENDS = {"EXIT", "RET", "KILL", "RTT"}


@dataclass(slots=True)
class Block:
    """A basic block: instructions [start, end) of its section; successors and predecessors by block index."""

    start: int
    end: int
    succ: list[int] = field(default_factory=list)
    pred: list[int] = field(default_factory=list)


class Graph:
    """The control-flow graph of one section.

    blocks: in address order. entries: first block of the kernel and of each device function that is called.
    idom: immediate dominator of each reachable block; that of an entry is the virtual root, ``len(blocks)``.
    reachable: blocks that an entry reaches.
    """

    def __init__(self, section: Section) -> None:
        self.section = section
        self.code = section.instructions
        self.blocks = _split(section)
        self._block_at = {b.start: i for i, b in enumerate(self.blocks)}
        self.callees = sorted({self._block_at[section.labels[t]] for t in _called(section)})
        self.entries = [0, *(c for c in self.callees if c != 0)] if self.blocks else []
        self._connect()
        self.order = _reverse_postorder(self.blocks, self.entries)
        self.reachable = set(self.order)
        self.idom = self._dominators()

    def instructions(self, block: int) -> list[Instruction]:
        """Instructions of a block."""
        b = self.blocks[block]
        return self.code[b.start : b.end]

    def block_of(self, label: str) -> int | None:
        """Index of the block that `label` starts, or None."""
        return self._block_at.get(self.section.labels.get(label, -1))

    def dominates(self, a: int, b: int) -> bool:
        """Whether every way from an entry to block `b` passes block `a`."""
        root = len(self.blocks)
        while b not in (a, root):
            b = self.idom[b]
        return a == b

    def _connect(self) -> None:
        waiting: list[tuple[int, str]] = []  # BSYNC blocks, joined once the reach of each BSSY is known
        for i, b in enumerate(self.blocks):
            last = self.code[b.end - 1]
            following = i + 1 if i + 1 < len(self.blocks) else None
            targets = [self._block_at[self.section.labels[t]] for t in last.targets if t in self.section.labels]
            targets = [t for t in targets if t < len(self.blocks)]
            succ: list[int] = []
            if last.base in _JUMPS:
                succ = targets + ([following] if _conditional(last) and following is not None else [])
            elif last.base in _ENDS:
                succ = [following] if last.predicate and following is not None else []
            elif last.base == "BSYNC" and not self._joins_below(b, following):
                waiting.append((i, last.operands.split(",")[0].strip()))
                succ = [following] if last.predicate and following is not None else []
            else:
                succ = [following] if following is not None else []
                if last.opcode.startswith("WARPSYNC.COLLECTIVE"):
                    succ += targets
            for s in dict.fromkeys(succ):
                self._edge(i, s)
        self._join(waiting)

    def _edge(self, a: int, b: int) -> None:
        if b not in self.blocks[a].succ:
            self.blocks[a].succ.append(b)
            self.blocks[b].pred.append(a)

    def _joins_below(self, block: Block, following: int | None) -> bool:
        """Whether a BSYNC at the end of `block` releases its warp right below, as is usual."""
        register = self.code[block.end - 1].operands.split(",")[0].strip()
        return following is not None and self.blocks[following].start in {
            self.section.labels[t]
            for ins in self.code
            if ins.base == "BSSY" and ins.operands.split(",")[0].strip() == register
            for t in ins.targets
            if t in self.section.labels
        }

    def _join(self, waiting: list[tuple[int, str]]) -> None:
        """Lead each remaining BSYNC to the target of every BSSY of its register that reaches it."""
        changed = bool(waiting)
        while changed:
            changed = False
            reach = self._reaching_joins()
            for i, register in waiting:
                for target in reach[i].get(register, ()):
                    if target not in self.blocks[i].succ:
                        self._edge(i, target)
                        changed = True

    def _reaching_joins(self) -> list[dict[str, set[int]]]:
        out: list[dict[str, set[int]]] = [{} for _ in self.blocks]
        work = list(range(len(self.blocks)))
        while work:
            i = work.pop()
            state: dict[str, set[int]] = {}
            for p in self.blocks[i].pred:
                for register, targets in out[p].items():
                    state.setdefault(register, set()).update(targets)
            for ins in self.instructions(i):
                if ins.base == "BSSY" and ins.targets and ins.targets[0] in self.section.labels:
                    state[ins.operands.split(",")[0].strip()] = {self._block_at[self.section.labels[ins.targets[0]]]}
            if state != out[i]:
                out[i] = state
                work.extend(self.blocks[i].succ)
        return out

    def _dominators(self) -> list[int]:
        """Cooper, Harvey, Kennedy: iterate over reverse postorder, from a virtual root above all entries."""
        root = len(self.blocks)
        position = {b: n for n, b in enumerate(self.order)} | {root: -1}
        idom = [-1] * root + [root]
        for e in self.entries:
            idom[e] = root
        changed = True
        while changed:
            changed = False
            for b in self.order:
                if b in self.entries:
                    continue
                new = -1
                for p in self.blocks[b].pred:
                    if idom[p] >= 0:
                        new = p if new < 0 else _meet(idom, position, p, new)
                if new >= 0 and idom[b] != new:
                    idom[b] = new
                    changed = True
        return idom


def _meet(idom: list[int], position: dict[int, int], a: int, b: int) -> int:
    while a != b:
        if position[a] < position[b]:
            a, b = b, a
        a = idom[a]
    return a


def _conditional(ins: Instruction) -> bool:
    """Whether a jump may fall through: a predicate before it, or a predicate or mask operand before its target."""
    if ins.predicate not in (None, "PT", "UPT"):
        return True
    if ins.base in ("BRX", "BRXU", "JMX", "JMXU"):
        return False
    before = ins.operands.split("`", 1)[0].strip().rstrip(",")
    return bool(before) and before not in ("PT", "UPT")


def _called(section: Section) -> Iterable[str]:
    end = len(section.instructions)
    for ins in section.instructions:
        if ins.base == "CALL":
            yield from (t for t in ins.targets if section.labels.get(t, end) < end)


def _split(section: Section) -> list[Block]:
    code = section.instructions
    starts = {0} if code else set()
    for i, ins in enumerate(code):
        starts.update(section.labels[t] for t in ins.targets if t in section.labels)
        if ins.base in _JUMPS or ins.base in _ENDS or ins.base in ("BSYNC", "WARPSYNC"):
            starts.add(i + 1)
    ordered = sorted(s for s in starts if s < len(code))
    return [Block(a, b) for a, b in zip(ordered, [*ordered[1:], len(code)], strict=True)]


def _reverse_postorder(blocks: list[Block], entries: list[int]) -> list[int]:
    seen: set[int] = set()
    post: list[int] = []
    for entry in entries:
        if entry in seen:
            continue
        seen.add(entry)
        stack = [(entry, iter(blocks[entry].succ))]
        while stack:
            node, successors = stack[-1]
            for s in successors:
                if s not in seen:
                    seen.add(s)
                    stack.append((s, iter(blocks[s].succ)))
                    break
            else:
                post.append(node)
                stack.pop()
    return post[::-1]
