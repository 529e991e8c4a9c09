"""Integer and logic instructions."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx import Imm, Instr, Pair
from .builder import I1, I16, I32, I64, Fn, Mods, splat
from .floats import intrinsic

Emitter = Callable[[Fn, Instr, Mods], None]


def width_of(fn: Fn, ty: str) -> int:
    if ty[0] not in "usb" or ty[1:] not in ("16", "32", "64"):
        raise fn.refuse(f"type .{ty} is not modelled here")
    return int(ty[1:])


def binary(fn: Fn, op: str, width: int, a: str, b: str) -> str:
    return fn.emit(f"{op} <32 x i{width}> {a}, {b}")


def emit_binary(code: str) -> Emitter:
    """add, sub (wrapping) and the bitwise operations; predicates too."""

    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        ty = mods.last()
        if ty == "pred":
            mods.done()
            fn.set_pred(ins.operands[0], fn.emit(f"{code} i32 {fn.pred(ins.operands[1])}, {fn.pred(ins.operands[2])}"))
            return
        if mods.take("sat"):
            raise fn.refuse("modifier .sat of an integer operation is not modelled")
        mods.done()
        width = width_of(fn, ty)
        out = binary(fn, code, width, fn.i(ins.operands[1], width), fn.i(ins.operands[2], width))
        fn.set_i(ins.operands[0], out, width)

    return run


def emit_not(fn: Fn, ins: Instr, mods: Mods) -> None:
    ty = mods.last()
    mods.done()
    if ty == "pred":
        fn.set_pred(ins.operands[0], fn.emit(f"xor i32 {fn.pred(ins.operands[1])}, -1"))
        return
    width = width_of(fn, ty)
    fn.set_i(ins.operands[0], binary(fn, "xor", width, fn.i(ins.operands[1], width), splat(width, -1)), width)


def emit_neg_abs(op: str) -> Emitter:
    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        width = width_of(fn, mods.last())
        mods.done()
        a = fn.i(ins.operands[1], width)
        out = binary(fn, "sub", width, "zeroinitializer", a)
        if op == "abs":
            neg = fn.emit(f"icmp slt <32 x i{width}> {a}, zeroinitializer")
            out = fn.emit(f"select {I1} {neg}, <32 x i{width}> {out}, <32 x i{width}> {a}")
        fn.set_i(ins.operands[0], out, width)

    return run


def product(fn: Fn, ins: Instr, mods: Mods) -> tuple[str, int]:
    """(value, width) of the mul part of mul and mad: .lo, .hi or .wide."""
    ty = mods.last()
    part = mods.take("lo", "hi", "wide")
    mods.done()
    width = width_of(fn, ty)
    a, b = fn.i(ins.operands[1], width), fn.i(ins.operands[2], width)
    if part == "lo":
        return binary(fn, "mul", width, a, b), width
    if part is None or (part == "wide" and width == 64):
        raise fn.refuse(f"multiplication .{part} of .{ty} is not modelled")
    ext = "sext" if ty[0] == "s" else "zext"
    wide = f"<32 x i{2 * width}>"
    x, y = (fn.emit(f"{ext} <32 x i{width}> {v} to {wide}") for v in (a, b))
    full = fn.emit(f"mul {wide} {x}, {y}")
    if part == "wide":
        return full, 2 * width
    shifted = fn.emit(f"lshr {wide} {full}, splat (i{2 * width} {width})")
    return fn.emit(f"trunc {wide} {shifted} to <32 x i{width}>"), width


def emit_mul(fn: Fn, ins: Instr, mods: Mods) -> None:
    out, width = product(fn, ins, mods)
    fn.set_i(ins.operands[0], out, width)


def emit_mad(fn: Fn, ins: Instr, mods: Mods) -> None:
    out, width = product(fn, ins, mods)
    fn.set_i(ins.operands[0], binary(fn, "add", width, out, fn.i(ins.operands[3], width)), width)


def emit_shift(op: str) -> Emitter:
    """shl and shr: amounts of the width or more clamp."""

    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        ty = mods.last()
        mods.done()
        width = width_of(fn, ty)
        a, amount = fn.i(ins.operands[1], width), fn.i(ins.operands[2], 32)
        code = "shl" if op == "shl" else "ashr" if ty[0] == "s" else "lshr"
        big = fn.emit(f"icmp ugt {I32} {amount}, splat (i32 {width - 1})")
        clamped = fn.emit(f"select {I1} {big}, {I32} splat (i32 {width - 1}), {I32} {amount}")
        if width == 16:
            clamped = fn.emit(f"trunc {I32} {clamped} to {I16}")
        elif width == 64:
            clamped = fn.emit(f"zext {I32} {clamped} to {I64}")
        out = binary(fn, code, width, a, clamped)
        if code != "ashr":
            out = fn.emit(f"select {I1} {big}, <32 x i{width}> zeroinitializer, <32 x i{width}> {out}")
        fn.set_i(ins.operands[0], out, width)

    return run


def emit_shf(fn: Fn, ins: Instr, mods: Mods) -> None:
    """Funnel shift of the 64-bit value b:a."""
    mods.last()
    left, wrap = mods.take("l", "r") == "l", mods.take("wrap", "clamp") == "wrap"
    mods.done()
    a, b, c = (fn.i(o, 32) for o in ins.operands[1:4])
    if wrap:
        n = fn.emit(f"and {I32} {c}, splat (i32 31)")
    else:
        n = intrinsic(fn, "llvm.umin.v32i32", I32, c, "splat (i32 32)")
    lo, hi, amount = (fn.emit(f"zext {I32} {v} to {I64}") for v in (a, b, n))
    both = fn.emit(f"or {I64} {fn.emit(f'shl {I64} {hi}, splat (i64 32)')}, {lo}")
    if left:
        moved = fn.emit(f"lshr {I64} {fn.emit(f'shl {I64} {both}, {amount}')}, splat (i64 32)")
    else:
        moved = fn.emit(f"lshr {I64} {both}, {amount}")
    fn.set_i(ins.operands[0], fn.emit(f"trunc {I64} {moved} to {I32}"), 32)


def emit_int_minmax(op: str) -> Emitter:
    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        ty = mods.last()
        relu = mods.take("relu")
        mods.done()
        width = width_of(fn, ty)
        name = f"llvm.{'s' if ty[0] == 's' else 'u'}{op}.v32i{width}"
        out = intrinsic(fn, name, f"<32 x i{width}>", fn.i(ins.operands[1], width), fn.i(ins.operands[2], width))
        if relu:
            out = intrinsic(fn, f"llvm.smax.v32i{width}", f"<32 x i{width}>", out, "zeroinitializer")
        fn.set_i(ins.operands[0], out, width)

    return run


def emit_divrem(op: str) -> Emitter:
    """Integer division; by zero gives all ones (div) or the dividend (rem), as the hardware's sequence does."""

    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        ty = mods.last()
        mods.done()
        width = width_of(fn, ty)
        vec = f"<32 x i{width}>"
        a, b = fn.i(ins.operands[1], width), fn.i(ins.operands[2], width)
        signed = ty[0] == "s"
        zero = fn.emit(f"icmp eq {vec} {b}, zeroinitializer")
        safe = fn.emit(f"select {I1} {zero}, {vec} splat (i{width} 1), {vec} {b}")
        if signed:  # the most negative value over -1 overflows: negate instead
            minus = fn.emit(f"icmp eq {vec} {b}, splat (i{width} -1)")
            safe = fn.emit(f"select {I1} {minus}, {vec} splat (i{width} 1), {vec} {safe}")
        out = fn.emit(f"{'s' if signed else 'u'}{op} {vec} {a}, {safe}")
        if signed:
            special = binary(fn, "sub", width, "zeroinitializer", a) if op == "div" else "zeroinitializer"
            out = fn.emit(f"select {I1} {minus}, {vec} {special}, {vec} {out}")
        by_zero = splat(width, -1) if op == "div" else a
        fn.set_i(ins.operands[0], fn.emit(f"select {I1} {zero}, {vec} {by_zero}, {vec} {out}"), width)

    return run


def emit_count(op: str) -> Emitter:
    """popc, clz, brev, bfind."""

    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        ty = mods.last()
        shiftamt = mods.take("shiftamt")
        mods.done()
        width = width_of(fn, ty)
        vec = f"<32 x i{width}>"
        a = fn.i(ins.operands[1], width)
        if op == "brev":
            fn.set_i(ins.operands[0], intrinsic(fn, f"llvm.bitreverse.v32i{width}", vec, a), width)
            return
        if op == "bfind" and ty[0] == "s":
            sign = binary(fn, "ashr", width, a, splat(width, width - 1))
            a = binary(fn, "xor", width, a, sign)
        if op == "popc":
            out = intrinsic(fn, f"llvm.ctpop.v32i{width}", vec, a)
        else:
            fn.helpers.add(f"declare {vec} @llvm.ctlz.v32i{width}({vec}, i1)")
            out = fn.emit(f"call {vec} @llvm.ctlz.v32i{width}({vec} {a}, i1 false)")
            if op == "bfind" and not shiftamt:
                out = binary(fn, "sub", width, splat(width, width - 1), out)
            elif op == "bfind":
                none = fn.emit(f"icmp eq {vec} {a}, zeroinitializer")
                out = fn.emit(f"select {I1} {none}, {vec} {splat(width, -1)}, {vec} {out}")
        if width == 64:
            out = fn.emit(f"trunc {I64} {out} to {I32}")
        fn.set_i(ins.operands[0], out, 32)

    return run


def emit_bfe(fn: Fn, ins: Instr, mods: Mods) -> None:
    """Bit field extract, 32 bits, through 64-bit shifts; position and length use their low 8 bits."""
    ty = mods.last()
    mods.done()
    if ty not in ("u32", "s32"):
        raise fn.refuse(f"bfe.{ty} is not modelled")
    ext = "sext" if ty[0] == "s" else "zext"
    a = fn.emit(f"{ext} {I32} {fn.i(ins.operands[1], 32)} to {I64}")
    pos, length = (fn.emit(f"and {I32} {fn.i(o, 32)}, splat (i32 255)") for o in ins.operands[2:4])
    pos, length = (intrinsic(fn, "llvm.umin.v32i32", I32, v, "splat (i32 32)") for v in (pos, length))
    p64, n64 = (fn.emit(f"zext {I32} {v} to {I64}") for v in (pos, length))
    moved = fn.emit(f"{'ashr' if ty[0] == 's' else 'lshr'} {I64} {a}, {p64}")
    gap = binary(fn, "sub", 64, splat(64, 64), n64)
    gap = intrinsic(fn, "llvm.umin.v32i64", I64, gap, splat(64, 63))
    up = binary(fn, "shl", 64, moved, gap)
    out = binary(fn, "ashr" if ty[0] == "s" else "lshr", 64, up, gap)
    empty = fn.emit(f"icmp eq {I32} {length}, zeroinitializer")
    word = fn.emit(f"trunc {I64} {out} to {I32}")
    fn.set_i(ins.operands[0], fn.emit(f"select {I1} {empty}, {I32} zeroinitializer, {I32} {word}"), 32)


def emit_bfi(fn: Fn, ins: Instr, mods: Mods) -> None:
    """Insert the low `length` bits of a into b at `position`."""
    if mods.last() != "b32":
        raise fn.refuse("only bfi.b32 is modelled")
    mods.done()
    a, b = (fn.emit(f"zext {I32} {fn.i(o, 32)} to {I64}") for o in ins.operands[1:3])
    pos, length = (fn.emit(f"and {I32} {fn.i(o, 32)}, splat (i32 255)") for o in ins.operands[3:5])
    pos, length = (intrinsic(fn, "llvm.umin.v32i32", I32, v, "splat (i32 32)") for v in (pos, length))
    p64, n64 = (fn.emit(f"zext {I32} {v} to {I64}") for v in (pos, length))
    ones = binary(fn, "sub", 64, binary(fn, "shl", 64, splat(64, 1), n64), splat(64, 1))
    field = binary(fn, "shl", 64, ones, p64)
    put = binary(fn, "and", 64, binary(fn, "shl", 64, a, p64), field)
    keep = binary(fn, "and", 64, b, binary(fn, "xor", 64, field, splat(64, -1)))
    fn.set_i(ins.operands[0], fn.emit(f"trunc {I64} {binary(fn, 'or', 64, put, keep)} to {I32}"), 32)


def emit_lop3(fn: Fn, ins: Instr, mods: Mods) -> None:
    mods.last()
    mods.done()
    table = ins.operands[4]
    if not isinstance(table, Imm) or isinstance(ins.operands[0], Pair):
        raise fn.refuse("lop3 needs an immediate table and one destination")
    a, b, c = (fn.i(o, 32) for o in ins.operands[1:4])
    inv = [binary(fn, "xor", 32, v, splat(32, -1)) for v in (a, b, c)]
    out = "zeroinitializer"
    for k in range(8):
        if table.bits >> k & 1:
            term = binary(fn, "and", 32, a if k & 4 else inv[0], b if k & 2 else inv[1])
            out = binary(fn, "or", 32, out, binary(fn, "and", 32, term, c if k & 1 else inv[2]))
    fn.set_i(ins.operands[0], out, 32)


def emit_prmt(fn: Fn, ins: Instr, mods: Mods) -> None:
    """Byte permute, default mode: nibble k of c selects byte k of the result from b:a, bit 3 replicates the sign."""
    if mods.last() != "b32":
        raise fn.refuse("prmt modes are not modelled")
    mods.done()
    a, b, c = (fn.i(o, 32) for o in ins.operands[1:4])
    lo, hi = (fn.emit(f"zext {I32} {v} to {I64}") for v in (a, b))
    both = binary(fn, "or", 64, binary(fn, "shl", 64, hi, splat(64, 32)), lo)
    out = "zeroinitializer"
    for k in range(4):
        nibble = binary(fn, "lshr", 32, c, splat(32, 4 * k))
        amount = binary(fn, "shl", 32, binary(fn, "and", 32, nibble, splat(32, 7)), splat(32, 3))
        moved = binary(fn, "lshr", 64, both, fn.emit(f"zext {I32} {amount} to {I64}"))
        byte = binary(fn, "and", 32, fn.emit(f"trunc {I64} {moved} to {I32}"), splat(32, 255))
        sign = binary(fn, "and", 32, nibble, splat(32, 8))
        spread = fn.emit(f"icmp ne {I32} {sign}, zeroinitializer")
        top = fn.emit(f"icmp ugt {I32} {byte}, splat (i32 127)")
        full = fn.emit(f"select {I1} {top}, {I32} splat (i32 255), {I32} zeroinitializer")
        byte = fn.emit(f"select {I1} {spread}, {I32} {full}, {I32} {byte}")
        out = binary(fn, "or", 32, out, binary(fn, "shl", 32, byte, splat(32, 8 * k)))
    fn.set_i(ins.operands[0], out, 32)
