"""The report on a cubin: per kernel its resources and, per loop, role, issue slots and counts.

Issue slots are SASS instructions: each takes one slot of its warp scheduler, predicated off or not.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..elf import CubinKernel, read_cubin
from .cfg import Graph
from .disasm import Instruction, Section, disassemble
from .loops import Loop, Spin, find_loops, path_slots
from .mix import Mix, count, role

TMEM_COLS_PER_ALLOCATION_UNIT = 32


@dataclass(frozen=True, slots=True)
class SpinReport:
    """A retried wait. cold: its first try is elsewhere, so that an iteration whose waits succeed does not issue it."""

    address: int
    question: str
    cold: bool
    slots: int


@dataclass(frozen=True, slots=True)
class LoopReport:
    """One loop.

    address: byte offset of its header. innermost: holds no loop but spins. depth: 0 for outermost.
    slots: instructions on the hot path: all blocks but retries of waits and nested loops. path_min_slots and
    path_max_slots: cheapest and dearest way through an iteration (None unless innermost).
    counts: by base opcode. units: by unit (`mix.UNITS`). mufu: by function. moves: register and constant moves.
    call_slots: instructions of device functions that it calls, once each per call.
    """

    role: str
    masked: bool | None
    evidence: str
    address: int
    innermost: bool
    depth: int
    parent: int | None
    slots: int
    path_min_slots: int | None
    path_max_slots: int | None
    counts: dict[str, int]
    units: dict[str, int]
    mufu: dict[str, int]
    moves: int
    spins: tuple[SpinReport, ...]
    calls: tuple[str, ...]
    call_slots: int


@dataclass(frozen=True, slots=True)
class RegisterChange:
    """One setmaxnreg. kind: ``inc`` or ``dec``."""

    address: int
    kind: str
    registers: int


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel of a cubin.

    registers: per thread at launch. stack_bytes, spill_stores, spill_loads: local memory and the STL and LDL that use
    it. uniform_spills: uniform registers parked in vector registers. tmem_cols: the largest allocation whose size is a
    constant in the code, or None. notes: what the reader should know about these figures.
    """

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    uniform_spills: int
    static_smem_bytes: int
    tmem_cols: int | None
    block: tuple[int, int, int] | None
    code_bytes: int
    instructions: int
    setmaxnreg: tuple[RegisterChange, ...]
    loops: tuple[LoopReport, ...]
    spins: tuple[SpinReport, ...]
    notes: tuple[str, ...]

    def innermost(self, name: str, masked: bool | None = None) -> tuple[LoopReport, ...]:
        """Innermost loops of a role, those that mask or do not."""
        return tuple(p for p in self.loops if p.innermost and p.role == name and p.masked == masked)


def read_kernels(data: bytes, where: str) -> tuple[KernelReport, ...]:
    """Report on every kernel of a cubin, given its bytes. `where` names it in errors.

    Raises BundleError for a damaged cubin, ToolchainError if nvdisasm is missing or refuses it.
    """
    cubin = read_cubin(data, where)
    with tempfile.TemporaryDirectory(prefix="fmha_gen-sass-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(data)
        sections = {s.name: s for s in disassemble(path, where)}
    return tuple(_kernel(sections[k.symbol], k, cubin.arch) for k in cubin.kernels if k.symbol in sections)


def _kernel(section: Section, elf: CubinKernel, arch: str) -> KernelReport:
    graph = Graph(section)
    found, spins, irreducible = find_loops(graph)
    whole = count(section.instructions)
    return KernelReport(
        name=section.name,
        arch=arch,
        registers=elf.registers,
        stack_bytes=elf.stack_bytes,
        spill_stores=whole.opcodes["STL"],
        spill_loads=whole.opcodes["LDL"],
        uniform_spills=sum(n for op, n in whole.full.items() if op.endswith(".SPILL")),
        static_smem_bytes=elf.static_smem_bytes,
        tmem_cols=tmem_cols(section.instructions),
        block=elf.block,
        code_bytes=elf.code_bytes,
        instructions=len(section.instructions),
        setmaxnreg=tuple(register_changes(section.instructions)),
        loops=loop_reports(graph, found, spins),
        spins=tuple(_spin(graph, s) for s in spins),
        notes=tuple(_notes(graph, irreducible)),
    )


def loop_reports(graph: Graph, loops: list[Loop], spins: list[Spin]) -> tuple[LoopReport, ...]:
    """Reports on the loops of a graph, in address order."""
    return tuple(_loop(graph, loops, i, spins) for i in range(len(loops)))


def _loop(graph: Graph, loops: list[Loop], index: int, spins: list[Spin]) -> LoopReport:
    loop = loops[index]
    code = [ins for b in sorted(loop.hot) for ins in graph.instructions(b)]
    mix = count(code)
    what = role(mix)
    innermost = not loop.children
    shortest, longest = path_slots(graph, loop) if innermost else (None, None)
    calls = tuple(t for ins in code if ins.base == "CALL" for t in ins.targets)
    return LoopReport(
        role=what.name,
        masked=what.masked,
        evidence=what.evidence,
        address=_address(graph, loop.header),
        innermost=innermost,
        depth=_depth(loops, index),
        parent=None if loop.parent is None else _address(graph, loops[loop.parent].header),
        slots=mix.total,
        path_min_slots=shortest,
        path_max_slots=longest,
        counts=_by_count(mix.opcodes),
        units=_by_count(mix.units),
        mufu=_mufu(mix),
        moves=mix.moves,
        spins=tuple(_spin(graph, s) for s in spins if s.blocks <= loop.blocks and _smallest(loops, s) is loop),
        calls=calls,
        call_slots=sum(_callee_slots(graph, c) for c in calls),
    )


def _smallest(loops: list[Loop], spin: Spin) -> Loop | None:
    around = [o for o in loops if spin.blocks <= o.blocks]
    return min(around, key=lambda o: len(o.blocks)) if around else None


def _depth(loops: list[Loop], index: int) -> int:
    depth, parent = 0, loops[index].parent
    while parent is not None:
        depth, parent = depth + 1, loops[parent].parent
    return depth


def _callee_slots(graph: Graph, label: str) -> int:
    """Instructions of the device function at `label`: the blocks that its entry reaches."""
    start = graph.block_of(label)
    if start is None:
        return 0
    seen, work = {start}, [start]
    while work:
        for s in graph.blocks[work.pop()].succ:
            if s not in seen:
                seen.add(s)
                work.append(s)
    return sum(graph.blocks[b].end - graph.blocks[b].start for b in seen)


def _spin(graph: Graph, spin: Spin) -> SpinReport:
    slots = sum(graph.blocks[b].end - graph.blocks[b].start for b in spin.blocks)
    return SpinReport(_address(graph, spin.header), spin.question.opcode, spin.cold, slots)


def _address(graph: Graph, block: int) -> int:
    return graph.instructions(block)[0].address


def _by_count(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items(), key=lambda kv: (-kv[1], kv[0])))


def _mufu(mix: Mix) -> dict[str, int]:
    found: Counter[str] = Counter()
    for opcode, n in mix.full.items():
        if opcode.startswith("MUFU"):
            found[opcode.partition(".")[2] or "MUFU"] += n
    return _by_count(found)


def register_changes(code: Iterable[Instruction]) -> Iterable[RegisterChange]:
    """The setmaxnreg instructions, in address order."""
    for ins in code:
        if ins.base == "USETMAXREG":
            numbers = re.findall(r"\b(0x[0-9a-f]+|\d+)\b", ins.operands)
            kind = "dec" if "DEALLOC" in ins.opcode else "inc"
            yield RegisterChange(ins.address, kind, int(numbers[-1], 0) if numbers else 0)


def tmem_cols(code: list[Instruction]) -> int | None:
    """Columns of the largest TMEM allocation whose size the code holds as a constant (in units of 32 columns)."""
    known: dict[str, int] = {}
    found: list[int] = []
    for ins in code:
        args = [a.strip() for a in ins.operands.split(",")]
        if ins.opcode == "UMOV" and len(args) == 2 and re.fullmatch(r"0x[0-9a-f]+|\d+", args[1]):
            known[args[0]] = int(args[1], 0)
        elif ins.base == "UTCATOMSWS" and "FIND_AND_SET" in ins.opcode and args[-1] in known:
            found.append(known[args[-1]] * TMEM_COLS_PER_ALLOCATION_UNIT)
        elif args and args[0] in known:
            del known[args[0]]
    return max(found, default=None)


def _notes(graph: Graph, irreducible: list[tuple[int, int]]) -> Iterable[str]:
    for source, target in irreducible:
        yield (
            f"a jump from {_address(graph, source):#x} enters a cycle at {_address(graph, target):#x} beside its "
            "header; that cycle is not counted as a loop"
        )
