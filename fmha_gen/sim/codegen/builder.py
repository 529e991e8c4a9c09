"""LLVM IR of one straight-line run of register instructions, 32 lanes wide.

A segment is a function ``i32 f(ptr regs, i32 active)``. `regs` is the warp's register file (see `layout`). Values live
in SSA names within the segment and are merged into the register file at its end, for active lanes only. The function
returns 0, or ``(instruction index + 1) << 4 | kind`` of the first fault.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..ptx import Imm, Instr, Not, Reg, Sink, Special, Symbol, Unsupported
from .layout import PARAM_WINDOW, SHARED_BASE, SPECIAL_OFFSETS

I32 = "<32 x i32>"
I64 = "<32 x i64>"
I16 = "<32 x i16>"
I1 = "<32 x i1>"
F32 = "<32 x float>"
F64 = "<32 x double>"

FAULT_UNINIT = 1
FAULT_LANES = 2


def splat(width: int, value: int) -> str:
    value &= (1 << width) - 1
    return f"splat (i{width} {value})" if value else "zeroinitializer"


@dataclass(slots=True)
class Val:
    """A value in SSA form. kind: 'i' integer vector, 'f' float vector (NaN not canonical yet), 'p' two halves."""

    kind: str
    name: str = ""
    lo: Val | None = None
    hi: Val | None = None


class Fn:
    """Builder of one segment. symbols: name -> (space, offset); checked: registers with a written-lanes word."""

    def __init__(self, symbols: dict[str, tuple[str, int]], checked: dict[Reg, int]) -> None:
        self.symbols = symbols
        self.checked = checked
        self.lines: list[str] = []
        self.count = 0
        self.vals: dict[Reg, Val] = {}
        self.preds: dict[Reg, str] = {}
        self.written: dict[Reg, None] = {}
        self.shadows: dict[Reg, str] = {}
        self.helpers: set[str] = set()
        self.guard: str | None = None  # i32 mask
        self.guard_vec = ""
        self.err: str | None = None
        self.index = 0
        self.active_vec = ""
        self.instr: Instr | None = None
        self.param_ptr = ""

    # -- emission -------------------------------------------------------------------------------------------------
    def emit(self, text: str) -> str:
        name = f"%v{self.count}"
        self.count += 1
        self.lines.append(f"{name} = {text}")
        return name

    def ptr(self, offset: int) -> str:
        return self.emit(f"getelementptr i8, ptr %regs, i64 {offset}")

    def refuse(self, what: str) -> Unsupported:
        return Unsupported(self.instr, what)

    def lanes(self, mask: str) -> str:
        """i32 mask -> <32 x i1>."""
        return self.emit(f"bitcast i32 {mask} to {I1}")

    def mask(self, lanes: str) -> str:
        return self.emit(f"bitcast {I1} {lanes} to i32")

    def exec_mask(self) -> str:
        """Lanes that execute the current instruction."""
        return "%active" if self.guard is None else self.emit(f"and i32 %active, {self.guard}")

    def fault_if(self, cond: str, kind: int) -> None:
        """Record fault `kind` of the current instruction when i1 `cond` holds and no earlier one did."""
        code = ((self.index + 1) << 4) | kind
        if self.err is None:
            self.err = self.emit(f"select i1 {cond}, i32 {code}, i32 0")
            return
        first = self.emit(f"icmp eq i32 {self.err}, 0")
        both = self.emit(f"and i1 {first}, {cond}")
        self.err = self.emit(f"select i1 {both}, i32 {code}, i32 {self.err}")

    # -- reading --------------------------------------------------------------------------------------------------
    def check_written(self, reg: Reg) -> None:
        if reg not in self.checked:
            return
        shadow = self.shadow(reg)
        missing = self.emit(f"xor i32 {shadow}, -1")
        bad = self.emit(f"and i32 {missing}, {self.exec_mask()}")
        self.fault_if(self.emit(f"icmp ne i32 {bad}, 0"), FAULT_UNINIT)

    def shadow(self, reg: Reg) -> str:
        if reg not in self.shadows:
            self.shadows[reg] = self.emit(f"load i32, ptr {self.ptr(self.checked[reg])}, align 4")
        return self.shadows[reg]

    def raw(self, reg: Reg) -> Val:
        """Current value of a non-predicate register, without the written check."""
        if reg not in self.vals:
            if reg.width == 16:
                value = Val("i", self.emit(f"load {I16}, ptr {self.ptr(reg.offset)}, align 64"))
            elif reg.width == 32:
                value = Val("i", self.emit(f"load {I32}, ptr {self.ptr(reg.offset)}, align 64"))
            elif reg.width == 64:
                lo = self.emit(f"load {I32}, ptr {self.ptr(reg.offset)}, align 64")
                hi = self.emit(f"load {I32}, ptr {self.ptr(reg.offset + 128)}, align 64")
                value = Val("p", "", Val("i", lo), Val("i", hi))
            else:
                raise self.refuse(f"{reg.width}-bit register {reg.name} is not modelled")
            self.vals[reg] = value
        return self.vals[reg]

    def raw_pred(self, reg: Reg) -> str:
        if reg not in self.preds:
            self.preds[reg] = self.emit(f"load i32, ptr {self.ptr(reg.offset)}, align 4")
        return self.preds[reg]

    def val(self, op: object, width: int) -> Val:
        """Value of an operand as `width` bits."""
        if isinstance(op, Reg):
            if op.width != width:
                raise self.refuse(f"register {op.name} has {op.width} bits, the operand needs {width}")
            self.check_written(op)
            return self.raw(op)
        if isinstance(op, Imm):
            bits = op.bits
            if op.float_bits:
                bits = self.float_imm(op, width)
            if width == 64:
                return Val("p", "", Val("i", splat(32, bits)), Val("i", splat(32, bits >> 32)))
            return Val("i", splat(width, bits))
        if isinstance(op, Special):
            if op.name not in SPECIAL_OFFSETS:
                raise self.refuse(f"special register {op.name} is not modelled")
            word = self.emit(f"load {I32}, ptr {self.ptr(SPECIAL_OFFSETS[op.name])}, align 64")
            if width == 32:
                return Val("i", word)
            if width == 16:
                return Val("i", self.emit(f"trunc {I32} {word} to {I16}"))
            return Val("p", "", Val("i", word), Val("i", "zeroinitializer"))
        if isinstance(op, Symbol):
            return self.symbol(op.name, width)
        raise self.refuse(f"operand {op!r} is not a {width}-bit value")

    def float_imm(self, op: Imm, width: int) -> int:
        if op.float_bits == width:
            return op.bits
        value = struct.unpack("<d", struct.pack("<Q", op.bits))[0] if op.float_bits == 64 else None
        if value is None or width != 32:
            raise self.refuse("float literal of another width than the operand")
        return int(struct.unpack("<I", struct.pack("<f", value))[0])

    def symbol(self, name: str, width: int) -> Val:
        if name not in self.symbols:
            raise self.refuse(f"unknown symbol {name!r}")
        space, offset = self.symbols[name]
        if space == "param":
            address = PARAM_WINDOW + offset
            if width != 64:
                raise self.refuse(f"address of parameter {name} in a {width}-bit operand")
            return Val("p", "", Val("i", splat(32, address)), Val("i", splat(32, address >> 32)))
        base = self.emit(f"load i32, ptr {self.ptr(SHARED_BASE)}, align 4")
        word = self.emit(f"add i32 {base}, {offset}")
        one = self.emit(f"insertelement {I32} poison, i32 {word}, i64 0")
        vec = self.emit(f"shufflevector {I32} {one}, {I32} poison, {I32} zeroinitializer")
        if width == 32:
            return Val("i", vec)
        if width == 64:
            return Val("p", "", Val("i", vec), Val("i", "zeroinitializer"))
        raise self.refuse(f"address of {name} in a {width}-bit operand")

    def to_int(self, value: Val) -> str:
        """Integer vector of a 16- or 32-bit value; float results get the canonical NaN 0x7fffffff here."""
        if value.kind == "i":
            return value.name
        nan = self.emit(f"fcmp uno {F32} {value.name}, zeroinitializer")
        bits = self.emit(f"bitcast {F32} {value.name} to {I32}")
        name = self.emit(f"select {I1} {nan}, {I32} splat (i32 2147483647), {I32} {bits}")
        value.kind, value.name = "i", name
        return name

    def to_float(self, value: Val) -> str:
        if value.kind == "f":
            return value.name
        return self.emit(f"bitcast {I32} {value.name} to {F32}")

    def to_i64(self, value: Val) -> str:
        if value.kind == "q":
            return value.name
        assert value.lo is not None and value.hi is not None
        lo = self.emit(f"zext {I32} {self.to_int(value.lo)} to {I64}")
        hi = self.emit(f"zext {I32} {self.to_int(value.hi)} to {I64}")
        high = self.emit(f"shl {I64} {hi}, splat (i64 32)")
        return self.emit(f"or disjoint {I64} {high}, {lo}")

    def halves(self, value: Val) -> tuple[Val, Val]:
        assert value.lo is not None and value.hi is not None
        return value.lo, value.hi

    def i(self, op: object, width: int) -> str:
        """Operand as an integer vector of `width` bits."""
        value = self.val(op, width)
        return self.to_i64(value) if width == 64 else self.to_int(value)

    def f32(self, op: object) -> str:
        return self.to_float(self.val(op, 32))

    def f64(self, op: object) -> str:
        return self.emit(f"bitcast {I64} {self.i(op, 64)} to {F64}")

    def f32x2(self, op: object) -> tuple[str, str]:
        lo, hi = self.halves(self.val(op, 64))
        return self.to_float(lo), self.to_float(hi)

    def pred(self, op: object) -> str:
        """Operand as an i32 lane mask."""
        if isinstance(op, Reg) and op.width == 1:
            self.check_written(op)
            return self.raw_pred(op)
        if isinstance(op, Not):
            return self.emit(f"xor i32 {self.pred(op.reg)}, -1")
        if isinstance(op, Imm):
            return "-1" if op.bits else "0"
        raise self.refuse(f"operand {op!r} is not a predicate")

    # -- writing --------------------------------------------------------------------------------------------------
    def mark(self, reg: Reg) -> None:
        self.written[reg] = None
        if reg in self.checked:
            self.shadows[reg] = self.emit(f"or i32 {self.shadow(reg)}, {self.exec_mask()}")

    def set(self, op: object, value: Val, width: int) -> None:
        """Assign a value of `width` bits to a register operand, in the lanes of the guard."""
        if isinstance(op, Sink):
            return
        if not isinstance(op, Reg):
            raise self.refuse(f"destination {op!r} is not a register")
        if op.width != width:
            raise self.refuse(f"destination {op.name} has {op.width} bits, the result {width}")
        if self.guard is not None:
            value = self.merge(value, self.raw(op), width)
        self.vals[op] = value
        self.mark(op)

    def merge(self, new: Val, old: Val, width: int) -> Val:
        if width == 64:
            assert new.lo is not None and new.hi is not None and old.lo is not None and old.hi is not None
            return Val("p", "", self.merge(new.lo, old.lo, 32), self.merge(new.hi, old.hi, 32))
        if new.kind == "f":
            old_name = self.to_float(old)
            return Val("f", self.emit(f"select {I1} {self.guard_vec}, {F32} {new.name}, {F32} {old_name}"))
        ty = f"<32 x i{width}>"
        return Val("i", self.emit(f"select {I1} {self.guard_vec}, {ty} {new.name}, {ty} {self.to_int(old)}"))

    def set_i(self, op: object, name: str, width: int) -> None:
        if width == 64:
            lo = self.emit(f"trunc {I64} {name} to {I32}")
            high = self.emit(f"lshr {I64} {name}, splat (i64 32)")
            hi = self.emit(f"trunc {I64} {high} to {I32}")
            self.set(op, Val("p", "", Val("i", lo), Val("i", hi)), 64)
        else:
            self.set(op, Val("i", name), width)

    def set_f32(self, op: object, name: str) -> None:
        self.set(op, Val("f", name), 32)

    def set_f32x2(self, op: object, lo: str, hi: str) -> None:
        self.set(op, Val("p", "", Val("f", lo), Val("f", hi)), 64)

    def set_f64(self, op: object, name: str) -> None:
        nan = self.emit(f"fcmp uno {F64} {name}, zeroinitializer")
        bits = self.emit(f"bitcast {F64} {name} to {I64}")
        self.set_i(op, self.emit(f"select {I1} {nan}, {I64} splat (i64 9223372036854775807), {I64} {bits}"), 64)

    def set_pred(self, op: object, mask: str) -> None:
        if isinstance(op, Sink):
            return
        if not isinstance(op, Reg) or op.width != 1:
            raise self.refuse(f"destination {op!r} is not a predicate")
        if self.guard is not None:
            keep = self.emit(f"and i32 {self.raw_pred(op)}, {self.emit(f'xor i32 {self.guard}, -1')}")
            new = self.emit(f"and i32 {mask}, {self.guard}")
            mask = self.emit(f"or i32 {keep}, {new}")
        self.preds[op] = mask
        self.mark(op)

    def set_lanes(self, op: object, lanes: str) -> None:
        """Assign a <32 x i1> to a predicate."""
        if not isinstance(op, Sink):
            self.set_pred(op, self.mask(lanes))

    # -- whole segment --------------------------------------------------------------------------------------------
    def begin(self, instr: Instr, index: int) -> None:
        self.instr, self.index, self.guard = instr, index, None
        if instr.guard is not None:
            mask = self.pred(instr.guard)
            self.guard = self.emit(f"xor i32 {mask}, -1") if instr.guard_negated else mask
            self.guard_vec = self.lanes(self.guard)

    def finish(self, name: str, live_out: int) -> str:
        """IR text of the function, storing the written registers in `live_out` (bit set of Reg.index)."""
        self.guard = None
        for reg in self.written:
            if live_out >> reg.index & 1:
                self.store(reg)
        for reg in self.written:
            if reg in self.checked:
                self.lines.append(f"store i32 {self.shadows[reg]}, ptr {self.ptr(self.checked[reg])}, align 4")
        self.lines.append(f"ret i32 {self.err or 0}")
        body = "\n  ".join(self.lines)
        return f"define i32 @{name}(ptr %regs, i32 %active) #0 {{\n  {body}\n}}\n"

    def store(self, reg: Reg) -> None:
        if reg.width == 1:
            old = self.emit(f"load i32, ptr {self.ptr(reg.offset)}, align 4")
            flip = self.emit(f"xor i32 {old}, {self.preds[reg]}")
            change = self.emit(f"and i32 {flip}, %active")
            self.lines.append(f"store i32 {self.emit(f'xor i32 {old}, {change}')}, ptr {self.ptr(reg.offset)}, align 4")
            return
        if not self.active_vec:
            self.active_vec = self.lanes("%active")
        value = self.vals[reg]
        if reg.width == 64:
            lo, hi = self.halves(value)
            self.store_words(self.to_int(lo), 32, reg.offset)
            self.store_words(self.to_int(hi), 32, reg.offset + 128)
        else:
            self.store_words(self.to_int(value), reg.width, reg.offset)

    def store_words(self, name: str, width: int, offset: int) -> None:
        self.helpers.add(f"declare void @llvm.masked.store.v32i{width}.p0(<32 x i{width}>, ptr, i32, {I1})")
        args = f"<32 x i{width}> {name}, ptr {self.ptr(offset)}, i32 64, {I1} {self.active_vec}"
        self.lines.append(f"call void @llvm.masked.store.v32i{width}.p0({args})")


class Mods:
    """Modifiers of an opcode, consumed one by one; what is left over is refused."""

    def __init__(self, fn: Fn, instr: Instr) -> None:
        self.fn = fn
        self.left = list(instr.parts[1:])

    def take(self, *names: str) -> str | None:
        """Consume and return the first of `names` that is present."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        return None

    def last(self) -> str:
        """Consume the last part, the type."""
        if not self.left:
            raise self.fn.refuse("type missing")
        return self.left.pop()

    def done(self) -> None:
        if self.left:
            raise self.fn.refuse(f"modifier .{self.left[0]} is not modelled")
