"""A kernel made executable: register layout, native segments, and the list of steps that warps walk.

A step is one scheduling unit: a native segment, a machine operation (memory, barrier, tensor core), or a branch.
Building refuses every instruction, modifier and operand that is not modelled, with its line.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from . import cfg as cfg_mod
from .cfg import DEAD_ENDS, EXITS, Cfg, bits, regs_of
from .codegen import jit, table
from .codegen.builder import Fn
from .codegen.layout import HEADER_BYTES, reg_bytes
from .parser import parse
from .ptx import Instr, Kernel, Pair, Reg, Sink, Unsupported, Vector

SHARED_BASE_OFFSET = 1024  # bytes of a CTA's shared memory that the system keeps, as CUDA 12 and later do
MIN_NATIVE = 1
MODELLED = 100  # sm_100a, compute capability 10.0

# Instructions whose first operand is read, not written, although it is a register or a vector.
_READS_FIRST = frozenset({"st", "red", "bar", "barrier", "nanosleep", "setmaxnreg", "prefetch", "exit", "ret", "fence",
                          "membar", "griddepcontrol", "trap", "brkpt", "bra"})  # fmt: skip


def writes_first(ins: Instr) -> bool:
    name = ins.parts[0]
    if name in _READS_FIRST:
        return name in ("bar", "barrier") and "red" in ins.parts
    if name == "tcgen05":
        return ins.parts[1] == "ld"
    if name == "cp":
        return False
    return bool(ins.operands) and isinstance(ins.operands[0], (Reg, Pair, Vector, Sink))


def uses_defs(ins: Instr) -> tuple[int, int]:
    """(read, written) register sets; the guard is not included."""
    reads = writes = 0
    for k, operand in enumerate(ins.operands):
        if k == 0 and writes_first(ins):
            writes = bits(regs_of(operand))
        else:
            reads |= bits(regs_of(operand))
    return reads, writes


@dataclass(eq=False, slots=True)
class Step:
    """kind: 'seg' native segment, 'op' machine operation, 'bra' branch, 'exit', 'trap'.

    pc: its index. first: index of its first instruction; count: instructions. block: number of its basic block.
    reads: registers that it reads (and its guard), as a bit set. run: bound by the machine for 'op'.
    """

    kind: str
    pc: int
    block: int
    first: int
    count: int
    instr: Instr
    reads: int = 0
    writes: int = 0
    touched: int = 0
    native: jit.NativeFn | None = None
    key: str = ""
    next: int = -1
    target: int = -1
    reconverge: int = -1
    run: Callable[..., object] | None = None


class Program:
    """An executable kernel. `steps[k].pc == k`; execution starts at 0.

    symbols: name -> (space, offset): "param" offsets into the parameters, "shared" CTA-local addresses.
    static_smem_bytes: end of the static shared variables; dynamic shared memory starts at `dynamic_smem_offset`.
    """

    def __init__(self, kernel: Kernel, binder: Callable[[Program, Instr], Callable[..., object] | None]) -> None:
        self.kernel = kernel
        self.binder = binder
        self.symbols: dict[str, tuple[str, int]] = {p.name: ("param", p.offset) for p in kernel.params.values()}
        self.symbols["%param_bytes"] = ("size", kernel.param_bytes)
        self._place_shared()
        self._place_registers()
        self.cfg: Cfg = cfg_mod.build(kernel, uses_defs)
        self.checked = self._uninit_candidates()
        self.steps: list[Step] = []
        self.block_pc: list[int] = []
        self._build()

    def _place_shared(self) -> None:
        at = SHARED_BASE_OFFSET
        dynamic = [(n, a) for n, (a, size) in self.kernel.shared.items() if size == 0]
        for name, (align, size) in self.kernel.shared.items():
            if size:
                at = -(-at // align) * align
                self.symbols[name] = ("shared", at)
                at += size
        self.static_smem_end = at
        align = max((a for _, a in dynamic), default=16)
        self.dynamic_smem_offset = -(-at // align) * align
        for name, _ in dynamic:
            self.symbols[name] = ("shared", self.dynamic_smem_offset)

    def _place_registers(self) -> None:
        at = HEADER_BYTES
        for reg in self.kernel.regs:
            at = -(-at // 128) * 128 if reg.width > 16 else -(-at // 64) * 64 if reg.width == 16 else at
            reg.offset = at
            at += 4 if reg.width == 1 else reg_bytes(reg.width)
        self.file_bytes = -(-at // 64) * 64

    def _uninit_candidates(self) -> dict[Reg, int]:
        """Registers read where some path does not write them: they carry a word of written lanes."""
        flagged = 0
        for block in self.cfg.blocks:
            known = block.defined_in
            for ins in self.kernel.instrs[block.start : block.end]:
                reads, writes = uses_defs(ins)
                if ins.guard is not None:
                    reads |= 1 << ins.guard.index
                flagged |= reads & ~known
                if ins.guard is None:
                    known |= writes
        out: dict[Reg, int] = {}
        for reg in self.kernel.regs:
            if flagged >> reg.index & 1:
                out[reg] = self.file_bytes
                self.file_bytes += 4
        self.file_bytes = -(-self.file_bytes // 64) * 64
        return out

    # -- steps ----------------------------------------------------------------------------------------------------
    def _build(self) -> None:
        batch = jit.Batch()
        instrs = self.kernel.instrs
        for block in self.cfg.blocks:
            self.block_pc.append(len(self.steps))
            first_step = len(self.steps)
            i = block.start
            while i < block.end:
                ins = instrs[i]
                if table.emitter(ins) is not None:
                    j = i
                    while j < block.end and table.emitter(instrs[j]) is not None:
                        j += 1
                    self._add("seg", block.number, i, j - i, instrs[i])
                    i = j
                    continue
                name = ins.parts[0]
                kind = "bra" if name == "bra" else "exit" if name in EXITS else "trap" if name in DEAD_ENDS else "op"
                self._add(kind, block.number, i, 1, ins)
                i += 1
            live = block.live_out
            for step in reversed(self.steps[first_step:]):
                self._finish_step(step, live, batch)
                live = self._live_before(step, live)
        batch.compile()
        for step in self.steps:
            if step.kind == "seg":
                step.native = jit.get(step.key)
            elif step.kind == "op":
                step.run = self.binder(self, step.instr)
                if step.run is None:
                    raise Unsupported(step.instr, f"instruction {step.instr.opcode} is not modelled")
        self._link()

    def _add(self, kind: str, block: int, first: int, count: int, ins: Instr) -> None:
        self.steps.append(Step(kind, len(self.steps), block, first, count, ins))

    def _live_before(self, step: Step, live: int) -> int:
        for ins in reversed(self.kernel.instrs[step.first : step.first + step.count]):
            reads, writes = uses_defs(ins)
            if ins.guard is None:
                live = (live & ~writes) | reads
            else:
                live |= reads | writes | 1 << ins.guard.index
        return live

    def _finish_step(self, step: Step, live: int, batch: jit.Batch) -> None:
        written = 0
        for ins in self.kernel.instrs[step.first : step.first + step.count]:
            reads, writes = uses_defs(ins)
            if ins.guard is not None:
                reads |= 1 << ins.guard.index
            step.reads |= reads & ~written
            step.writes |= writes
            step.touched |= reads | writes
            if ins.guard is None:
                written |= writes
        if step.kind == "seg":
            fn = Fn(self.symbols, self.checked)
            for k, ins in enumerate(self.kernel.instrs[step.first : step.first + step.count]):
                table.emit(fn, ins, k)
            step.key = batch.add(fn, live)

    def _link(self) -> None:
        start_of = {block.start: self.block_pc[block.number] for block in self.cfg.blocks}
        end = len(self.steps)
        for step in self.steps:
            step.next = step.pc + 1
            block = self.cfg.blocks[step.block]
            if step.kind == "bra":
                step.target = start_of.get(step.instr.target, end)
            step.reconverge = self.block_pc[block.ipdom] if block.ipdom >= 0 else -1

    def reg_set(self, mask: int) -> list[Reg]:
        return [r for r in self.kernel.regs if mask >> r.index & 1]


def _check_target(target: str) -> None:
    """Refuse PTX that compute capability 10.0, which is what is modelled, cannot run.

    Plain targets run on every later architecture, those of a family (f) within it, and those of an architecture (a) on
    that one alone (CUDA programming guide, compute capabilities).
    """
    m = re.fullmatch(r"sm_(\d+)([af]?)", target)
    if m is None:
        raise Unsupported(None, f"PTX: .target {target or '(none)'}: not an sm_ target; the simulator models sm_100a")
    number, suffix = int(m[1]), m[2]
    if number > MODELLED or (suffix and number != MODELLED):
        raise Unsupported(
            None,
            f"PTX: .target {target}: the simulator models sm_100a, which runs sm_100a, sm_100f and plain targets up to "
            f"sm_{MODELLED} only; run it on its own GPU, or build it for sm_100a",
        )


_programs: dict[tuple[str, str | None], Program] = {}


def load(text: str, entry: str | None, binder: Callable[[Program, Instr], Callable[..., object] | None]) -> Program:
    """The program of `entry` in a PTX text; cached by content."""
    key = hashlib.sha256(text.encode()).hexdigest(), entry
    if key not in _programs:
        module = parse(text)
        _check_target(module.target)
        _programs[key] = Program(module.kernel(entry), binder)
    return _programs[key]
