"""Moves, selections, conversions, address conversions, and loads of parameters."""

from __future__ import annotations

from ..ptx import Address, Instr, Reg, Sink, Symbol, Vector
from .builder import I1, I16, I32, Fn, Mods, Val, splat
from .floats import emit_cvt_float
from .ints import binary
from .layout import PARAM_POINTER, SHARED_WINDOW

_FLOATS = ("f16", "bf16", "f32", "f64", "tf32", "f16x2", "bf16x2", "e4m3x2", "e5m2x2", "ue8m0x2", "e2m1x2")


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
            bits = fn.to_int(words[k // 2])
            if k % 2:
                bits = fn.emit(f"lshr {I32} {bits}, splat (i32 16)")
            if not isinstance(item, Sink):
                fn.set_i(item, fn.emit(f"trunc {I32} {bits} to {I16}"), 16)
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
        raise fn.refuse(
            f"parameter access of {count} x {size} bytes at {offset} is misaligned or beyond the parameters"
        )
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
