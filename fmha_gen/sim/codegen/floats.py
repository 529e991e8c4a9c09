"""Floating-point instructions: arithmetic, approximations, comparison, conversion."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx import Instr, Pair, Sink
from .builder import F32, F64, I1, I16, I32, I64, Fn, Mods, Val

Emitter = Callable[[Fn, Instr, Mods], None]
ROUNDINGS = ("rn", "rz", "rm", "rp")


def helper(fn: Fn, name: str, *args: str) -> str:
    fn.helpers.add("@" + name)
    return fn.emit(f"call {F32} @{name}({', '.join(f'{F32} {a}' for a in args)})")


def intrinsic(fn: Fn, name: str, ty: str, *args: str) -> str:
    fn.helpers.add(f"declare {ty} @{name}({', '.join([ty] * len(args))})")
    return fn.emit(f"call {ty} @{name}({', '.join(f'{ty} {a}' for a in args)})")


def fneg(fn: Fn, a: str) -> str:
    return fn.emit(f"fneg {F32} {a}")


def arith_f32(fn: Fn, op: str, mode: str, args: list[str]) -> str:
    """One rounding of a+b, a-b, a*b or a*b+c."""
    if mode != "rn":
        if op == "sub":
            op, args = "add", [args[0], fneg(fn, args[1])]
        return helper(fn, f"{op}_{mode}", *args)
    if op == "fma":
        return intrinsic(fn, "llvm.fma.v32f32", F32, *args)
    return fn.emit(f"f{op} {F32} {args[0]}, {args[1]}")


def saturate(fn: Fn, a: str) -> str:
    """Clamp to [0, 1]; NaN and -0 give +0."""
    low = fn.emit(f"fcmp ogt {F32} {a}, zeroinitializer")
    pos = fn.emit(f"select {I1} {low}, {F32} {a}, {F32} zeroinitializer")
    high = fn.emit(f"fcmp ogt {F32} {pos}, splat (float 1.0)")
    return fn.emit(f"select {I1} {high}, {F32} splat (float 1.0), {F32} {pos}")


def to_f32(fn: Fn, op: object, ty: str) -> str:
    """A 16-bit register operand widened to float."""
    bits = fn.i(op, 16)
    if ty == "f16":
        half = fn.emit(f"bitcast {I16} {bits} to <32 x half>")
        return fn.emit(f"fpext <32 x half> {half} to {F32}")
    wide = fn.emit(f"zext {I16} {bits} to {I32}")
    return fn.emit(f"bitcast {I32} {fn.emit(f'shl {I32} {wide}, splat (i32 16)')} to {F32}")


def emit_arith(op: str) -> Emitter:
    """add, sub, mul, fma of f32, f32x2, f64, and the mixed forms with a 16-bit first operand(s)."""
    count = 3 if op == "fma" else 2

    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        ty = mods.last()
        mode = mods.take(*ROUNDINGS) or "rn"
        if ty == "f32x2":
            ftz = mods.take("ftz")
            mods.done()
            pairs = [fn.f32x2(o) for o in ins.operands[1 : 1 + count]]
            halves = [[p[k] for p in pairs] for k in (0, 1)]
            lo, hi = (flushed(fn, ftz, arith_f32(fn, op, mode, [flushed(fn, ftz, a) for a in h])) for h in halves)
            fn.set_f32x2(ins.operands[0], lo, hi)
        elif ty == "f64":
            if mode != "rn":
                raise fn.refuse(f"rounding .{mode} of f64 is not modelled")
            mods.done()
            args = [fn.f64(o) for o in ins.operands[1 : 1 + count]]
            out = (
                intrinsic(fn, "llvm.fma.v32f64", F64, *args)
                if op == "fma"
                else fn.emit(f"f{op} {F64} {args[0]}, {args[1]}")
            )
            fn.set_f64(ins.operands[0], out)
        else:
            mixed = ty if ty in ("f16", "bf16") and mods.take("f32") else None
            if ty != "f32" and mixed is None:
                raise fn.refuse(f"type .{ty} is not modelled for {op}")
            ftz, sat = mods.take("ftz"), mods.take("sat")
            mods.done()
            wide = {"add": 1, "sub": 1, "fma": 2}.get(op, 0) if mixed else 0
            operands = ins.operands[1 : 1 + count]
            args = [to_f32(fn, o, mixed or "") if k < wide else fn.f32(o) for k, o in enumerate(operands)]
            out = flushed(fn, ftz, arith_f32(fn, op, mode, [flushed(fn, ftz, a) for a in args]))
            fn.set_f32(ins.operands[0], saturate(fn, out) if sat else out)

    return run


def flushed(fn: Fn, ftz: str | None, a: str) -> str:
    return helper(fn, "ftz", a) if ftz else a


def emit_minmax(op: str) -> Emitter:
    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        ftz, nan, xor = mods.take("ftz"), mods.take("NaN"), mods.take("xorsign")
        absolute = mods.take("abs")
        if xor:
            raise fn.refuse("modifier .xorsign is not modelled")
        mods.done()
        args = [flushed(fn, ftz, fn.f32(o)) for o in ins.operands[1:]]
        if absolute:
            args = [intrinsic(fn, "llvm.fabs.v32f32", F32, a) for a in args]
        name = op + ("_nan" if nan else "")
        out = args[0]
        for a in args[1:]:
            out = helper(fn, name, out, a)
        fn.set_f32(ins.operands[0], out)

    return run


def emit_unary(op: str) -> Emitter:
    """ex2, lg2, rcp, rsqrt, tanh, sqrt (approx or rn), abs, neg of f32."""

    def run(fn: Fn, ins: Instr, mods: Mods) -> None:
        need_f32(fn, mods)
        approx, rn, ftz = mods.take("approx"), mods.take("rn"), mods.take("ftz")
        mods.done()
        a = flushed(fn, ftz, fn.f32(ins.operands[1]))
        if op == "neg":
            out = fneg(fn, a)
        elif op == "abs":
            out = intrinsic(fn, "llvm.fabs.v32f32", F32, a)
        elif op == "sqrt":
            out = intrinsic(fn, "llvm.sqrt.v32f32", F32, a)
        else:
            if op != "rcp" and (rn or not approx):
                raise fn.refuse("only the .approx form is modelled")
            out = helper(fn, {"ex2": "exp2", "lg2": "log2"}.get(op, op), a)
        fn.set_f32(ins.operands[0], flushed(fn, ftz, out) if op not in ("neg", "abs") else out)

    return run


def need_f32(fn: Fn, mods: Mods) -> None:
    ty = mods.last()
    if ty != "f32":
        raise fn.refuse(f"type .{ty} is not modelled here")


def emit_div(fn: Fn, ins: Instr, mods: Mods) -> None:
    need_f32(fn, mods)
    mode = mods.take("rn", "approx", "full")
    ftz = mods.take("ftz")
    mods.done()
    if mode is None:
        raise fn.refuse("div.f32 needs .rn, .approx or .full")
    a, b = (flushed(fn, ftz, fn.f32(o)) for o in ins.operands[1:3])
    fn.set_f32(ins.operands[0], flushed(fn, ftz, fn.emit(f"fdiv {F32} {a}, {b}")))


FLOAT_COMPARE = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge",
    "equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno",
}  # fmt: skip
INT_COMPARE = {"eq": "eq", "ne": "ne", "lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}


def emit_setp(fn: Fn, ins: Instr, mods: Mods) -> None:
    ty = mods.last()
    cmp = mods.take(*FLOAT_COMPARE, *INT_COMPARE)
    combine = mods.take("and", "or", "xor")
    ftz = mods.take("ftz")
    mods.done()
    if cmp is None:
        raise fn.refuse("setp without a comparison")
    a, b = ins.operands[1:3]
    mask = fn.mask(compare(fn, cmp, ty, a, b, ftz))
    dst = ins.operands[0]
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())
    inverse = fn.emit(f"xor i32 {mask}, -1")
    if combine:
        other = fn.pred(ins.operands[3])
        mask = fn.emit(f"{combine} i32 {mask}, {other}")
        inverse = fn.emit(f"{combine} i32 {inverse}, {other}")
    fn.set_pred(first, mask)
    fn.set_pred(second, inverse)


def compare(fn: Fn, cmp: str, ty: str, a: object, b: object, ftz: str | None) -> str:
    """<32 x i1> of a comparison."""
    if ty == "f32":
        x, y = flushed(fn, ftz, fn.f32(a)), flushed(fn, ftz, fn.f32(b))
        return fn.emit(f"fcmp {FLOAT_COMPARE[cmp]} {F32} {x}, {y}")
    if ty == "f64":
        return fn.emit(f"fcmp {FLOAT_COMPARE[cmp]} {F64} {fn.f64(a)}, {fn.f64(b)}")
    if ty not in ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"):
        raise fn.refuse(f"comparison of .{ty} is not modelled")
    width = int(ty[1:])
    if cmp in INT_COMPARE:
        code = INT_COMPARE[cmp]
    elif cmp in ("lt", "le", "gt", "ge"):
        code = ("s" if ty[0] == "s" else "u") + cmp
    else:
        raise fn.refuse(f"comparison .{cmp} of .{ty} is not an integer comparison")
    return fn.emit(f"icmp {code} <32 x i{width}> {fn.i(a, width)}, {fn.i(b, width)}")


# -- conversions --------------------------------------------------------------------------------------------------
def f32_to_bf16(fn: Fn, a: str, mode: str) -> str:
    """<32 x i32> with the bf16 in its low half."""
    bits = fn.emit(f"bitcast {F32} {a} to {I32}")
    top = fn.emit(f"lshr {I32} {bits}, splat (i32 16)")
    if mode == "rn":
        odd = fn.emit(f"and {I32} {top}, splat (i32 1)")
        bias = fn.emit(f"add {I32} {odd}, splat (i32 32767)")
        top = fn.emit(f"lshr {I32} {fn.emit(f'add {I32} {bits}, {bias}')}, splat (i32 16)")
    elif mode != "rz":
        raise fn.refuse(f"rounding .{mode} to bf16 is not modelled")
    nan = fn.emit(f"fcmp uno {F32} {a}, zeroinitializer")
    return fn.emit(f"select {I1} {nan}, {I32} splat (i32 32767), {I32} {top}")


def f32_to_f16(fn: Fn, a: str, mode: str) -> str:
    if mode != "rn":
        raise fn.refuse(f"rounding .{mode} to f16 is not modelled")
    half = fn.emit(f"fptrunc {F32} {a} to <32 x half>")
    bits = fn.emit(f"zext {I16} {fn.emit(f'bitcast <32 x half> {half} to {I16}')} to {I32}")
    nan = fn.emit(f"fcmp uno {F32} {a}, zeroinitializer")
    return fn.emit(f"select {I1} {nan}, {I32} splat (i32 32767), {I32} {bits}")


def f32_to_fp8(fn: Fn, a: str, ty: str) -> str:
    """e4m3 or e5m2 with saturation (.satfinite), round to nearest even; NaN gives 0x7f."""
    mant, bias, top = (3, 7, 0x7E) if ty == "e4m3" else (2, 15, 0x7B)
    bits = fn.emit(f"bitcast {F32} {a} to {I32}")
    sign = fn.emit(f"and {I32} {fn.emit(f'lshr {I32} {bits}, splat (i32 24)')}, splat (i32 128)")
    mag = fn.emit(f"and {I32} {bits}, splat (i32 2147483647)")
    shift = 23 - mant
    odd = fn.emit(f"and {I32} {fn.emit(f'lshr {I32} {mag}, splat (i32 {shift})')}, splat (i32 1)")
    rounded = fn.emit(f"add {I32} {fn.emit(f'add {I32} {mag}, {odd}')}, splat (i32 {(1 << (shift - 1)) - 1})")
    code = fn.emit(
        f"sub {I32} {fn.emit(f'lshr {I32} {rounded}, splat (i32 {shift})')}, splat (i32 {(127 - bias) << mant})"
    )
    # Subnormal results: add a power of two whose unit is the smallest step, so that the float addition rounds.
    magic = (127 + 23 - (bias - 1) - mant) << 23
    magf = fn.emit(f"bitcast {I32} {mag} to {F32}")
    summed = fn.emit(f"fadd {F32} {magf}, bitcast ({I32} splat (i32 {magic}) to {F32})")
    small = fn.emit(f"sub {I32} {fn.emit(f'bitcast {F32} {summed} to {I32}')}, splat (i32 {magic})")
    is_small = fn.emit(f"icmp ult {I32} {mag}, splat (i32 {(128 - bias) << 23})")
    code = fn.emit(f"select {I1} {is_small}, {I32} {small}, {I32} {code}")
    over = fn.emit(f"icmp ugt {I32} {code}, splat (i32 {top})")
    keep = fn.emit(f"xor {I1} {is_small}, splat (i1 true)")
    over = fn.emit(f"and {I1} {over}, {keep}")
    code = fn.emit(f"select {I1} {over}, {I32} splat (i32 {top}), {I32} {code}")
    code = fn.emit(f"or {I32} {code}, {sign}")
    nan = fn.emit(f"fcmp uno {F32} {a}, zeroinitializer")
    return fn.emit(f"select {I1} {nan}, {I32} splat (i32 127), {I32} {code}")


def emit_cvt_float(fn: Fn, ins: Instr, mods: Mods, dst: str, src: str) -> None:
    """Every cvt with a floating-point side; integer-only ones are elsewhere."""
    mode = mods.take("rn", "rz", "rm", "rp")
    relu, ftz = mods.take("relu"), mods.take("ftz")
    if dst in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2") and src == "f32":
        satfinite = mods.take("satfinite")
        mods.done()
        if satfinite and dst in ("bf16x2", "f16x2"):
            raise fn.refuse("modifier .satfinite of a 16-bit conversion is not modelled")
        values = [fn.f32(o) for o in ins.operands[1:3]]
        if relu:
            values = [helper(fn, "max_nan", v, "zeroinitializer") for v in values]
        high, low = (_narrow(fn, v, dst[:-2], mode or "") for v in values)
        step = 8 if dst[0] == "e" else 16
        packed = fn.emit(f"or {I32} {fn.emit(f'shl {I32} {high}, splat (i32 {step})')}, {low}")
        if step == 8:
            fn.set_i(ins.operands[0], fn.emit(f"trunc {I32} {packed} to {I16}"), 16)
        else:
            fn.set_i(ins.operands[0], packed, 32)
        return
    if dst in ("bf16", "f16") and src == "f32":
        mods.done()
        value = fn.f32(ins.operands[1])
        if relu:
            value = helper(fn, "max_nan", value, "zeroinitializer")
        fn.set_i(ins.operands[0], fn.emit(f"trunc {I32} {_narrow(fn, value, dst, mode or '')} to {I16}"), 16)
        return
    if relu:
        raise fn.refuse("modifier .relu is not modelled here")
    if dst == "f32" and src in ("bf16", "f16"):
        mods.done()
        fn.set_f32(ins.operands[0], to_f32(fn, ins.operands[1], src))
    elif dst == "f32" and src == "f64":
        mods.done()
        if mode != "rn":
            raise fn.refuse("only rounding .rn is modelled here")
        fn.set_f32(ins.operands[0], flushed(fn, ftz, fn.emit(f"fptrunc {F64} {fn.f64(ins.operands[1])} to {F32}")))
    elif dst == "f64" and src == "f32":
        mods.done()
        fn.set_f64(ins.operands[0], fn.emit(f"fpext {F32} {flushed(fn, ftz, fn.f32(ins.operands[1]))} to {F64}"))
    elif dst == "f32" and src == "f32":
        _round_f32(fn, ins, mods, ftz)
    elif src in ("f32", "f64") and dst[0] in "su":
        _float_to_int(fn, ins, mods, dst, src, ftz)
    elif dst in ("f32", "f64") and src[0] in "su":
        _int_to_float(fn, ins, mods, dst, src, mode)
    else:
        raise fn.refuse(f"conversion .{dst}.{src} is not modelled")


def _narrow(fn: Fn, value: str, ty: str, mode: str) -> str:
    if ty == "bf16":
        return f32_to_bf16(fn, value, mode)
    if ty == "f16":
        return f32_to_f16(fn, value, mode)
    return f32_to_fp8(fn, value, ty)


_ROUND = {"rni": "llvm.roundeven", "rzi": "llvm.trunc", "rmi": "llvm.floor", "rpi": "llvm.ceil"}


def _round_f32(fn: Fn, ins: Instr, mods: Mods, ftz: str | None) -> None:
    how, sat = mods.take(*_ROUND), mods.take("sat")
    mods.done()
    out = flushed(fn, ftz, fn.f32(ins.operands[1]))
    if how:
        out = intrinsic(fn, f"{_ROUND[how]}.v32f32", F32, out)
    fn.set_f32(ins.operands[0], saturate(fn, out) if sat else out)


def _float_to_int(fn: Fn, ins: Instr, mods: Mods, dst: str, src: str, ftz: str | None) -> None:
    """Integer conversions clamp to the destination's range; NaN gives 0 (1 << 63 in 64 bits)."""
    how = mods.take(*_ROUND)
    mods.take("sat")
    mods.done()
    if how is None:
        raise fn.refuse("float to integer conversion needs .rni, .rzi, .rmi or .rpi")
    width = int(dst[1:])
    if width not in (16, 32, 64):
        raise fn.refuse(f"conversion to .{dst} is not modelled")
    ty, suffix = (F32, "v32f32") if src == "f32" else (F64, "v32f64")
    value = flushed(fn, ftz, fn.f32(ins.operands[1])) if src == "f32" else fn.f64(ins.operands[1])
    value = intrinsic(fn, f"{_ROUND[how]}.{suffix}", ty, value)
    name = f"llvm.fpto{'s' if dst[0] == 's' else 'u'}i.sat.v32i{width}.{suffix}"
    fn.helpers.add(f"declare <32 x i{width}> @{name}({ty})")
    out = fn.emit(f"call <32 x i{width}> @{name}({ty} {value})")
    if width == 64:
        nan = fn.emit(f"fcmp uno {ty} {value}, zeroinitializer")
        out = fn.emit(f"select {I1} {nan}, {I64} splat (i64 {1 << 63}), {I64} {out}")
    fn.set_i(ins.operands[0], out, width)


def _int_to_float(fn: Fn, ins: Instr, mods: Mods, dst: str, src: str, mode: str | None) -> None:
    mods.done()
    if mode != "rn":
        raise fn.refuse(f"rounding .{mode} of an integer is not modelled")
    width = int(src[1:])
    value = fn.i(ins.operands[1], max(16, width))
    op = "sitofp" if src[0] == "s" else "uitofp"
    if width == 8:
        value = fn.emit(f"trunc {I16} {value} to <32 x i8>")
    out = fn.emit(f"{op} <32 x i{width}> {value} to {F32 if dst == 'f32' else F64}")
    if dst == "f32":
        fn.set_f32(ins.operands[0], out)
    else:
        fn.set_f64(ins.operands[0], out)


def value_f32(fn: Fn, name: str) -> Val:
    return Val("f", name)
