"""Integer, logic, move and warp-register instructions."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx import Address, Imm, Instr, Pair, Reg, Sink, Symbol, Vector
from .builder import (FAULT_LANES, I1, I16, I32, I64, PARAM_POINTER, SHARED_WINDOW, Fn, Mods, Val, splat)  # fmt: skip
from .floats import emit_cvt_float, intrinsic

Emitter = Callable[[Fn, Instr, Mods], None]
_FLOATS = ("f16", "bf16", "f32", "f64", "tf32", "f16x2", "bf16x2", "e4m3x2", "e5m2x2", "ue8m0x2", "e2m1x2")


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


def emit_mov(fn: Fn, ins: Instr, mods: Mods) -> None:
    """mov, with packing and unpacking of vectors."""
    ty = mods.last()
    mods.done()
    dst, src = ins.operands
    if ty == "pred":
        fn.set_pred(dst, fn.pred(src))
        return
    width = int(ty[1:]) if ty[0] in "busf" and ty[1:] in ("16", "32", "64") else 0
    if not width:
        raise fn.refuse(f"mov.{ty} is not modelled")
    if isinstance(dst, Vector):
        _unpack(fn, dst, fn.val(src, width), width)
    elif isinstance(src, Vector):
        fn.set(dst, _pack(fn, src, width), width)
    else:
        fn.set(dst, fn.val(src, width), width)


def _unpack(fn: Fn, dst: Vector, value: Val, width: int) -> None:
    part = width // len(dst.items)
    words = list(fn.halves(value)) if width == 64 else [value]
    if part == 32:
        for item, word in zip(dst.items, words, strict=True):
            fn.set(item, word, 32)
    elif part == 16:
        for k, item in enumerate(dst.items):
            word = fn.to_int(words[k // 2])
            if k % 2:
                word = fn.emit(f"lshr {I32} {word}, splat (i32 16)")
            if not isinstance(item, Sink):
                fn.set_i(item, fn.emit(f"trunc {I32} {word} to {I16}"), 16)
    else:
        raise fn.refuse(f"unpacking {width} bits into {len(dst.items)} is not modelled")


def _pack(fn: Fn, src: Vector, width: int) -> Val:
    part = width // len(src.items)
    if part == 32:
        lo, hi = (fn.val(item, 32) for item in src.items)
        return Val("p", "", lo, hi)
    if part != 16:
        raise fn.refuse(f"packing {len(src.items)} items into {width} bits is not modelled")
    halves = [fn.emit(f"zext {I16} {fn.i(item, 16)} to {I32}") for item in src.items]
    words = [Val("i", binary(fn, "or", 32, binary(fn, "shl", 32, halves[k + 1], splat(32, 16)), halves[k]))
             for k in range(0, len(halves), 2)]  # fmt: skip
    return words[0] if width == 32 else Val("p", "", words[0], words[1])


def emit_selp(fn: Fn, ins: Instr, mods: Mods) -> None:
    ty = mods.last()
    mods.done()
    width = int(ty[1:])
    lanes = fn.lanes(fn.pred(ins.operands[3]))
    a, b = fn.val(ins.operands[1], width), fn.val(ins.operands[2], width)

    def pick(x: Val, y: Val, w: int) -> Val:
        if w == 64:
            (xl, xh), (yl, yh) = fn.halves(x), fn.halves(y)
            return Val("p", "", pick(xl, yl, 32), pick(xh, yh, 32))
        vec = f"<32 x i{w}>"
        return Val("i", fn.emit(f"select {I1} {lanes}, {vec} {fn.to_int(x)}, {vec} {fn.to_int(y)}"))

    fn.set(ins.operands[0], pick(a, b, width), width)


def emit_cvt(fn: Fn, ins: Instr, mods: Mods) -> None:
    src = mods.last()
    dst = mods.last()
    if src in _FLOATS or dst in _FLOATS:
        emit_cvt_float(fn, ins, mods, dst, src)
        return
    sat = mods.take("sat")
    mods.done()
    if src[0] not in "us" or dst[0] not in "us":
        raise fn.refuse(f"conversion .{dst}.{src} is not modelled")
    if sat:
        raise fn.refuse("modifier .sat of an integer conversion is not modelled")
    sw, dw = int(src[1:]), int(dst[1:])
    operand = ins.operands[1]
    reg_w = operand.width if isinstance(operand, Reg) else max(16, sw)
    value = fn.i(operand, reg_w)
    if reg_w != sw:
        value = fn.emit(f"trunc <32 x i{reg_w}> {value} to <32 x i{sw}>")
    if dw < sw:
        value = fn.emit(f"trunc <32 x i{sw}> {value} to <32 x i{dw}>")
    elif dw > sw:
        value = fn.emit(f"{'sext' if src[0] == 's' else 'zext'} <32 x i{sw}> {value} to <32 x i{dw}>")
    dst_op = ins.operands[0]
    out_w = dst_op.width if isinstance(dst_op, Reg) else max(16, dw)
    if out_w != dw:
        value = fn.emit(f"{'sext' if dst[0] == 's' else 'zext'} <32 x i{dw}> {value} to <32 x i{out_w}>")
    fn.set_i(dst_op, value, out_w)


def emit_cvta(fn: Fn, ins: Instr, mods: Mods) -> None:
    """Between a state space and generic addresses; shared memory and parameters have windows, global is itself."""
    mods.last()
    to = mods.take("to")
    space = mods.take("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local")
    param_mod = mods.take("param", "entry")
    mods.done()
    del param_mod
    value = fn.i(ins.operands[1], 64)
    if space in ("shared", "shared::cta", "shared::cluster"):
        value = binary(fn, "sub" if to else "add", 64, value, splat(64, SHARED_WINDOW))
    elif space not in ("global", "param"):
        raise fn.refuse(f"state space .{space} is not modelled")
    fn.set_i(ins.operands[0], value, 64)


def emit_mapa(fn: Fn, ins: Instr, mods: Mods) -> None:
    """Shared::cluster address of the same variable in CTA `b` of the cluster."""
    ty = mods.last()
    space = mods.take("shared::cluster")
    mods.done()
    if ty != "u32" or not space:
        raise fn.refuse("only mapa.shared::cluster.u32 is modelled")
    low = binary(fn, "and", 32, fn.i(ins.operands[1], 32), splat(32, 0xFFFFFF))
    rank = binary(fn, "shl", 32, fn.i(ins.operands[2], 32), splat(32, 24))
    fn.set_i(ins.operands[0], binary(fn, "or", 32, low, rank), 32)


def is_static_param(ins: Instr) -> bool:
    """ld.param from a parameter named in the instruction: a register instruction."""
    address = ins.operands[1]
    return isinstance(address, Address) and isinstance(address.base, Symbol)


def emit_ld_param(fn: Fn, ins: Instr, mods: Mods) -> None:
    ty = mods.last()
    mods.take("param", "param::entry")
    count = int((mods.take("v2", "v4", "v8") or "v1")[1:])
    mods.done()
    size = int(ty[1:]) // 8
    address = ins.operands[1]
    assert isinstance(address, Address) and isinstance(address.base, Symbol)
    space, offset = fn.symbols.get(address.base.name, ("", 0))
    if space != "param":
        raise fn.refuse(f"{address.base.name} is not a parameter")
    offset += address.offset
    dst = ins.operands[0]
    items = dst.items if isinstance(dst, Vector) else (dst,)
    if len(items) != count or offset % (size * count) or offset + size * count > fn.symbols["%param_bytes"][1]:
        raise fn.refuse(f"parameter access of {count} x {size} bytes at {offset} is misaligned or beyond the parameters")
    if not fn.param_ptr:
        fn.param_ptr = fn.emit(f"load ptr, ptr {fn.ptr(PARAM_POINTER)}, align 8")
    for k, item in enumerate(items):
        if isinstance(item, Sink):
            continue
        at = fn.emit(f"getelementptr i8, ptr {fn.param_ptr}, i64 {offset + k * size}")
        word = fn.emit(f"load i{8 * size}, ptr {at}, align {size}")
        out = item.width if isinstance(item, Reg) else 8 * size
        if out > 8 * size:
            word = fn.emit(f"{'sext' if ty[0] == 's' else 'zext'} i{8 * size} {word} to i{out}")
        one = fn.emit(f"insertelement <32 x i{out}> poison, i{out} {word}, i64 0")
        fn.set_i(item, fn.emit(f"shufflevector <32 x i{out}> {one}, <32 x i{out}> poison, {I32} zeroinitializer"), out)


# -- warp operations on registers ---------------------------------------------------------------------------------
def member_mask(fn: Fn, op: object) -> str:
    """i32 member mask; faults unless exactly the executing lanes are among its members and all members execute."""
    if isinstance(op, Imm):
        mask = str(op.bits & 0xFFFFFFFF if op.bits >= 0 else op.bits)
    else:
        mask = fn.emit(f"extractelement {I32} {fn.i(op, 32)}, i32 {_first_lane(fn)}")
    lanes = fn.exec_mask()
    extra = fn.emit(f"xor i32 {lanes}, {mask}")
    fn.fault_if(fn.emit(f"icmp ne i32 {extra}, 0"), FAULT_LANES)
    return mask


def _first_lane(fn: Fn) -> str:
    fn.helpers.add("declare i32 @llvm.cttz.i32(i32, i1)")
    return fn.emit(f"and i32 {fn.emit(f'call i32 @llvm.cttz.i32(i32 {fn.exec_mask()}, i1 false)')}, 31")


def broadcast(fn: Fn, word: str) -> str:
    one = fn.emit(f"insertelement {I32} poison, i32 {word}, i64 0")
    return fn.emit(f"shufflevector {I32} {one}, {I32} poison, {I32} zeroinitializer")


def emit_vote(fn: Fn, ins: Instr, mods: Mods) -> None:
    ty = mods.last()
    if not mods.take("sync"):
        raise fn.refuse("vote needs .sync")
    mode = mods.take("ballot", "any", "all", "uni")
    mods.done()
    member_mask(fn, ins.operands[2])
    lanes = fn.exec_mask()
    votes = fn.emit(f"and i32 {fn.pred(ins.operands[1])}, {lanes}")
    if mode == "ballot" and ty == "b32":
        fn.set_i(ins.operands[0], broadcast(fn, votes), 32)
        return
    none = fn.emit(f"icmp eq i32 {votes}, 0")
    every = fn.emit(f"icmp eq i32 {votes}, {lanes}")
    if mode == "any":
        cond = fn.emit(f"xor i1 {none}, true")
    elif mode == "all":
        cond = every
    else:
        cond = fn.emit(f"or i1 {none}, {every}")
    fn.set_pred(ins.operands[0], fn.emit(f"select i1 {cond}, i32 -1, i32 0"))


def emit_activemask(fn: Fn, ins: Instr, mods: Mods) -> None:
    mods.last()
    mods.done()
    fn.set_i(ins.operands[0], broadcast(fn, fn.exec_mask()), 32)


def emit_elect(fn: Fn, ins: Instr, mods: Mods) -> None:
    """elect.sync d|p, membermask: the lowest member lane wins."""
    mods.take("sync")
    mods.done()
    dst = ins.operands[0]
    if not isinstance(dst, Pair):
        raise fn.refuse("elect.sync needs d|p")
    member_mask(fn, ins.operands[1])
    leader = _first_lane(fn)
    if not isinstance(dst.first, Sink):
        fn.set_i(dst.first, broadcast(fn, leader), 32)
    fn.set_pred(dst.second, fn.emit(f"shl i32 1, {leader}"))


def emit_shfl(fn: Fn, ins: Instr, mods: Mods) -> None:
    """shfl.sync.{idx,up,down,bfly}.b32 d|p, a, b, c, membermask."""
    mods.last()
    if not mods.take("sync"):
        raise fn.refuse("shfl needs .sync")
    mode = mods.take("idx", "up", "down", "bfly")
    mods.done()
    dst = ins.operands[0]
    member_mask(fn, ins.operands[4])
    a, b, c = (fn.i(o, 32) for o in ins.operands[1:4])
    lane = "<" + ", ".join(f"i32 {k}" for k in range(32)) + ">"
    b31 = binary(fn, "and", 32, b, splat(32, 31))
    clamp = binary(fn, "and", 32, c, splat(32, 31))
    seg = binary(fn, "and", 32, binary(fn, "lshr", 32, c, splat(32, 8)), splat(32, 31))
    inv = binary(fn, "xor", 32, seg, splat(32, 31))
    low = binary(fn, "and", 32, lane, seg)
    limit = binary(fn, "or", 32, low, binary(fn, "and", 32, clamp, inv))
    if mode == "idx":
        target = binary(fn, "or", 32, low, binary(fn, "and", 32, b31, inv))
    elif mode == "bfly":
        target = binary(fn, "xor", 32, lane, b31)
    else:
        target = binary(fn, "sub" if mode == "up" else "add", 32, lane, b31)
    cmp = "sge" if mode == "up" else "sle"
    inside = fn.emit(f"icmp {cmp} {I32} {target}, {limit}")
    source = fn.emit(f"select {I1} {inside}, {I32} {target}, {I32} {lane}")
    source = binary(fn, "and", 32, source, splat(32, 31))
    slot = fn.emit("alloca [32 x i32], align 64")
    fn.lines.append(f"store {I32} {a}, ptr {slot}, align 64")
    ptrs = fn.emit(f"getelementptr i32, ptr {slot}, {I32} {source}")
    fn.helpers.add(f"declare {I32} @llvm.masked.gather.v32i32.v32p0(<32 x ptr>, i32, {I1}, {I32})")
    out = fn.emit(f"call {I32} @llvm.masked.gather.v32i32.v32p0(<32 x ptr> {ptrs}, i32 4, {I1} splat (i1 true), {I32} poison)")
    lanes = fn.exec_mask()
    bits = fn.emit(f"bitcast {I1} {fn.lanes(lanes)} to i32")
    word = broadcast(fn, bits)
    reads = binary(fn, "and", 32, binary(fn, "lshr", 32, word, source), splat(32, 1))
    idle = fn.mask(fn.emit(f"icmp eq {I32} {reads}, zeroinitializer"))
    fn.fault_if(fn.emit(f"icmp ne i32 {fn.emit(f'and i32 {idle}, {lanes}')}, 0"), FAULT_LANES)
    if isinstance(dst, Pair):
        fn.set_i(dst.first, out, 32)
        fn.set_lanes(dst.second, inside)
    else:
        fn.set_i(dst, out, 32)


def emit_redux(fn: Fn, ins: Instr, mods: Mods) -> None:
    """redux.sync of integers."""
    ty = mods.last()
    if not mods.take("sync"):
        raise fn.refuse("redux needs .sync")
    op = mods.take("add", "min", "max", "and", "or", "xor")
    mods.done()
    if ty not in ("u32", "s32", "b32") or op is None:
        raise fn.refuse(f"redux of .{ty} is not modelled")
    member_mask(fn, ins.operands[2])
    identity = {"and": -1, "min": 0x7FFFFFFF if ty == "s32" else -1, "max": -(1 << 31) if ty == "s32" else 0}.get(op, 0)
    name = op if op not in ("min", "max") else ("s" if ty == "s32" else "u") + op
    lanes = fn.lanes(fn.exec_mask())
    masked = fn.emit(f"select {I1} {lanes}, {I32} {fn.i(ins.operands[1], 32)}, {I32} {splat(32, identity)}")
    fn.helpers.add(f"declare i32 @llvm.vector.reduce.{name}.v32i32({I32})")
    out = fn.emit(f"call i32 @llvm.vector.reduce.{name}.v32i32({I32} {masked})")
    fn.set_i(ins.operands[0], broadcast(fn, out), 32)
