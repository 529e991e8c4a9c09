"""IR helper functions: correctly rounded approximations, directed rounding, NaN-aware minimum and maximum.

Transcendentals are evaluated in double precision to about 2^-50 and rounded once to float, so the result is the
correctly rounded one (the hardware's .approx forms are within 1 or 2 units in the last place of it).
"""

from __future__ import annotations

import math
import struct

V8F = "<8 x float>"
V8D = "<8 x double>"
V8I = "<8 x i64>"


def dbl(value: float) -> str:
    """A double constant splat in IR spelling."""
    return f"splat (double 0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X})"


def _body8(name: str, lines: list[str], result: str) -> str:
    text = "\n  ".join(lines)
    return f"define internal {V8F} @{name}_8({V8F} %x) #1 {{\n  {text}\n  ret {V8F} {result}\n}}\n"


def _wrap32(name: str) -> str:
    """32-lane function from the 8-lane one."""
    lines = []
    parts = []
    for i in range(4):
        idx = ", ".join(f"i32 {8 * i + j}" for j in range(8))
        lines.append(f"%p{i} = shufflevector <32 x float> %x, <32 x float> poison, <8 x i32> <{idx}>")
        lines.append(f"%r{i} = call {V8F} @{name}_8({V8F} %p{i})")
        parts.append(f"%r{i}")
    idx16 = ", ".join(f"i32 {j}" for j in range(16))
    idx32 = ", ".join(f"i32 {j}" for j in range(32))
    lines.append(f"%a = shufflevector {V8F} {parts[0]}, {V8F} {parts[1]}, <16 x i32> <{idx16}>")
    lines.append(f"%b = shufflevector {V8F} {parts[2]}, {V8F} {parts[3]}, <16 x i32> <{idx16}>")
    lines.append(f"%o = shufflevector <16 x float> %a, <16 x float> %b, <32 x i32> <{idx32}>")
    text = "\n  ".join(lines)
    return f"define internal <32 x float> @{name}(<32 x float> %x) #2 {{\n  {text}\n  ret <32 x float> %o\n}}\n"


def _horner(x: str, coefficients: list[float], prefix: str) -> tuple[list[str], str]:
    """Lines evaluating sum c[k] x^k with fused multiply-adds; coefficients low order first."""
    lines = []
    acc = dbl(coefficients[-1])
    for k, c in enumerate(reversed(coefficients[:-1])):
        lines.append(f"%{prefix}{k} = call {V8D} @llvm.fma.v8f64({V8D} {acc}, {V8D} {x}, {V8D} {dbl(c)})")
        acc = f"%{prefix}{k}"
    return lines, acc


_EXP2 = [math.log(2) ** k / math.factorial(k) for k in range(15)]
_MAGIC = 1.5 * 2.0**52


def _exp2_core(x: str, low: float, high: float) -> list[str]:
    """Lines computing, for double %x: %f in [-1/2, 1/2], %n (i64) with 2^x = 2^n 2^f; NaN goes through %f."""
    return [
        f"%lt = fcmp olt {V8D} {x}, {dbl(low)}",
        f"%c0 = select <8 x i1> %lt, {V8D} {dbl(low)}, {V8D} {x}",
        f"%gt = fcmp ogt {V8D} %c0, {dbl(high)}",
        f"%c1 = select <8 x i1> %gt, {V8D} {dbl(high)}, {V8D} %c0",
        f"%t = fadd {V8D} %c1, {dbl(_MAGIC)}",
        f"%nf = fsub {V8D} %t, {dbl(_MAGIC)}",
        f"%f = fsub {V8D} %c1, %nf",
        f"%tb = bitcast {V8D} %t to {V8I}",
        f"%n = shl {V8I} %tb, splat (i64 52)",
    ]


def exp2() -> str:
    lines = [f"%d = fpext {V8F} %x to {V8D}", *_exp2_core("%d", -170.0, 140.0)]
    poly, acc = _horner("%f", _EXP2, "h")
    lines += poly
    lines += [
        f"%pb = bitcast {V8D} {acc} to {V8I}",
        f"%sb = add {V8I} %pb, %n",
        f"%s = bitcast {V8I} %sb to {V8D}",
        f"%nan = fcmp uno {V8D} %d, %d",
        f"%r = select <8 x i1> %nan, {V8D} %d, {V8D} %s",
        f"%o = fptrunc {V8D} %r to {V8F}",
    ]
    return _body8("exp2", lines, "%o") + _wrap32("exp2")


def log2() -> str:
    coefficients = [2.0 / math.log(2.0) / (2 * k + 1) for k in range(14)]
    sqrt2 = struct.unpack("<q", struct.pack("<d", math.sqrt(2.0)))[0] & ((1 << 52) - 1)
    lines = [
        f"%d = fpext {V8F} %x to {V8D}",
        f"%b = bitcast {V8D} %d to {V8I}",
        f"%e0 = ashr {V8I} %b, splat (i64 52)",
        f"%m0 = and {V8I} %b, splat (i64 {(1 << 52) - 1})",
        f"%big = icmp sgt {V8I} %m0, splat (i64 {sqrt2})",
        f"%bias = select <8 x i1> %big, {V8I} splat (i64 1022), {V8I} splat (i64 1023)",
        f"%e = sub {V8I} %e0, %bias",
        f"%mb = shl {V8I} %bias, splat (i64 52)",
        f"%m1 = or {V8I} %m0, %mb",
        f"%m = bitcast {V8I} %m1 to {V8D}",
        f"%num = fsub {V8D} %m, {dbl(1.0)}",
        f"%den = fadd {V8D} %m, {dbl(1.0)}",
        f"%s = fdiv {V8D} %num, %den",
        f"%s2 = fmul {V8D} %s, %s",
    ]
    poly, acc = _horner("%s2", coefficients, "h")
    lines += poly
    lines += [
        f"%ef = sitofp {V8I} %e to {V8D}",
        f"%v = call {V8D} @llvm.fma.v8f64({V8D} {acc}, {V8D} %s, {V8D} %ef)",
        f"%neg = fcmp olt {V8D} %d, zeroinitializer",
        f"%zero = fcmp oeq {V8D} %d, zeroinitializer",
        f"%inf = fcmp oeq {V8D} %d, {dbl(math.inf)}",
        f"%nan = fcmp uno {V8D} %d, %d",
        f"%v1 = select <8 x i1> %neg, {V8D} {dbl(math.nan)}, {V8D} %v",
        f"%v2 = select <8 x i1> %zero, {V8D} {dbl(-math.inf)}, {V8D} %v1",
        f"%v3 = select <8 x i1> %inf, {V8D} {dbl(math.inf)}, {V8D} %v2",
        f"%v4 = select <8 x i1> %nan, {V8D} %d, {V8D} %v3",
        f"%o = fptrunc {V8D} %v4 to {V8F}",
    ]
    return _body8("log2", lines, "%o") + _wrap32("log2")


def tanh() -> str:
    """tanh(x) = -m / (m + 2) with m = exp(-2|x|) - 1, kept relative near zero by separating 2^n - 1."""
    lines = [
        f"%d = fpext {V8F} %x to {V8D}",
        f"%a = call {V8D} @llvm.fabs.v8f64({V8D} %d)",
        f"%y = fmul {V8D} %a, {dbl(-2.0 / math.log(2.0))}",
        *_exp2_core("%y", -100.0, 0.0),
    ]
    poly, acc = _horner("%f", _EXP2[1:], "h")
    lines += poly
    lines += [
        f"%em = fmul {V8D} {acc}, %f",
        f"%one = add {V8I} %n, splat (i64 {1023 << 52})",
        f"%sc = bitcast {V8I} %one to {V8D}",
        f"%sc1 = fsub {V8D} %sc, {dbl(1.0)}",
        f"%m = call {V8D} @llvm.fma.v8f64({V8D} %em, {V8D} %sc, {V8D} %sc1)",
        f"%den = fadd {V8D} %m, {dbl(2.0)}",
        f"%nm = fneg {V8D} %m",
        f"%q = fdiv {V8D} %nm, %den",
        f"%sg = call {V8D} @llvm.copysign.v8f64({V8D} %q, {V8D} %d)",
        f"%nan = fcmp uno {V8D} %d, %d",
        f"%r = select <8 x i1> %nan, {V8D} %d, {V8D} %sg",
        f"%o = fptrunc {V8D} %r to {V8F}",
    ]
    return _body8("tanh", lines, "%o") + _wrap32("tanh")


def _via_double(name: str, lines: list[str]) -> str:
    head = [f"%d = fpext {V8F} %x to {V8D}"]
    return _body8(name, head + lines + [f"%o = fptrunc {V8D} %r to {V8F}"], "%o") + _wrap32(name)


def rcp() -> str:
    return _via_double("rcp", [f"%r = fdiv {V8D} {dbl(1.0)}, %d"])


def rsqrt() -> str:
    return _via_double("rsqrt", [
        f"%q = call {V8D} @llvm.sqrt.v8f64({V8D} %d)",
        f"%r = fdiv {V8D} {dbl(1.0)}, %q",
    ])  # fmt: skip


V = "<32 x float>"
D = "<32 x double>"
B = "<32 x i1>"
I32 = "<32 x i32>"


def minmax(name: str, is_max: bool, nan: bool) -> str:
    """PTX min/max: -0 < +0; a NaN gives the other operand, or NaN with `.NaN`; two NaN give NaN."""
    cmp, bit = ("ogt", "and") if is_max else ("olt", "or")
    lines = [
        f"%p = fcmp {cmp} {V} %a, %b",
        f"%s = select {B} %p, {V} %a, {V} %b",
        f"%eq = fcmp oeq {V} %a, %b",
        f"%ai = bitcast {V} %a to {I32}",
        f"%bi = bitcast {V} %b to {I32}",
        f"%ti = {bit} {I32} %ai, %bi",
        f"%tf = bitcast {I32} %ti to {V}",
        f"%s1 = select {B} %eq, {V} %tf, {V} %s",
        f"%an = fcmp uno {V} %a, zeroinitializer",
        f"%bn = fcmp uno {V} %b, zeroinitializer",
    ]
    if nan:
        lines += [f"%s2 = select {B} %an, {V} %a, {V} %s1", f"%s3 = select {B} %bn, {V} %b, {V} %s2"]
    else:
        lines += [f"%s2 = select {B} %bn, {V} %a, {V} %s1", f"%s3 = select {B} %an, {V} %b, {V} %s2"]
    text = "\n  ".join(lines)
    return f"define internal {V} @{name}({V} %a, {V} %b) #1 {{\n  {text}\n  ret {V} %s3\n}}\n"


def _directed_tail(mode: str) -> list[str]:
    """From %s (double) and its error %e: the float nearest to %s, stepped by one unit where the mode asks for it."""
    lines = [
        f"%r = fptrunc {D} %s to {V}",
        f"%rd = fpext {V} %r to {D}",
        f"%diff0 = fsub {D} %s, %rd",
        f"%diff = fadd {D} %diff0, %e",
        f"%ri = bitcast {V} %r to {I32}",
        f"%up = fcmp ogt {D} %diff, zeroinitializer",
        f"%dn = fcmp olt {D} %diff, zeroinitializer",
        f"%neg = icmp slt {I32} %ri, zeroinitializer",
        f"%zr = fcmp oeq {V} %r, zeroinitializer",
    ]
    down = [  # next float towards -inf
        f"%d1 = select {B} %neg, {I32} splat (i32 1), {I32} splat (i32 -1)",
        f"%d2 = add {I32} %ri, %d1",
        f"%d3 = select {B} %zr, {I32} splat (i32 -2147483647), {I32} %d2",
    ]
    up = [
        f"%u1 = select {B} %neg, {I32} splat (i32 -1), {I32} splat (i32 1)",
        f"%u2 = add {I32} %ri, %u1",
        f"%u3 = select {B} %zr, {I32} splat (i32 1), {I32} %u2",
    ]
    if mode == "rm":
        lines += [*down, f"%oi = select {B} %dn, {I32} %d3, {I32} %ri"]
    elif mode == "rp":
        lines += [*up, f"%oi = select {B} %up, {I32} %u3, {I32} %ri"]
    else:  # rz: step towards zero when the nearest float is farther from zero than the value
        lines += [
            f"%pos = xor {B} %neg, splat (i1 true)",
            f"%c1 = and {B} %pos, %dn",
            f"%c2 = and {B} %neg, %up",
            f"%c3 = or {B} %c1, %c2",
            f"%nz = xor {B} %zr, splat (i1 true)",
            f"%c4 = and {B} %c3, %nz",
            f"%z1 = add {I32} %ri, splat (i32 -1)",
            f"%oi = select {B} %c4, {I32} %z1, {I32} %ri",
        ]
    # A zero sum of nonzero terms is -0 when rounding down; the sum of equal zeros keeps its sign.
    if mode == "rm":
        lines += [
            f"%sz = fcmp oeq {D} %s, zeroinitializer",
            f"%pb = bitcast {D} %p to <32 x i64>",
            f"%qb = bitcast {D} %q to <32 x i64>",
            "%sgn = or <32 x i64> %pb, %qb",
            "%sneg = icmp slt <32 x i64> %sgn, zeroinitializer",
            f"%mz = and {B} %sz, %sneg",
            f"%oj = select {B} %mz, {I32} splat (i32 -2147483648), {I32} %oi",
        ]
    else:
        lines += [f"%oj = add {I32} %oi, zeroinitializer"]
    lines += [f"%o = bitcast {I32} %oj to {V}"]
    return lines


def directed(name: str, op: str, mode: str) -> str:
    """add, mul or fma rounded by `mode` (rz, rm, rp), exact: the double result and its error decide the last step.

    Sums p + q of doubles, p = a or a*b (exact in double), with the error by Knuth's two-sum. Infinite or NaN results
    pass through; a finite sum that overflows is stepped back from infinity where the mode asks for it.
    """
    args = {"add": f"{V} %a, {V} %b", "mul": f"{V} %a, {V} %b", "fma": f"{V} %a, {V} %b, {V} %c"}[op]
    lines = [f"%ad = fpext {V} %a to {D}", f"%bd = fpext {V} %b to {D}"]
    if op == "add":
        lines += [f"%p = fadd {D} %ad, {dbl(-0.0)}", f"%q = fadd {D} %bd, {dbl(-0.0)}"]
    elif op == "mul":
        lines += [f"%p = fmul {D} %ad, %bd", f"%q = fmul {D} %p, {dbl(0.0)}"]
    else:
        lines += [f"%p = fmul {D} %ad, %bd", f"%q = fpext {V} %c to {D}"]
    if op == "mul":
        lines += [f"%s = fadd {D} %p, {dbl(-0.0)}", f"%e = fsub {D} {dbl(0.0)}, {dbl(0.0)}"]
    else:
        lines += [
            f"%s = fadd {D} %p, %q",
            f"%bb = fsub {D} %s, %p",
            f"%aa = fsub {D} %s, %bb",
            f"%e1 = fsub {D} %p, %aa",
            f"%e2 = fsub {D} %q, %bb",
            f"%e = fadd {D} %e1, %e2",
        ]
    lines += _directed_tail(mode)
    if op == "mul" and mode == "rm":  # no sum: an exact zero keeps the product's sign
        lines = [
            x.replace("%mz = and <32 x i1> %sz, %sneg", "%mz = and <32 x i1> %sz, splat (i1 false)") for x in lines
        ]
    text = "\n  ".join(lines)
    return f"define internal {V} @{name}({args}) #2 {{\n  {text}\n  ret {V} %o\n}}\n"


def flush() -> str:
    lines = [
        f"%i = bitcast {V} %x to {I32}",
        f"%e = and {I32} %i, splat (i32 2139095040)",
        f"%z = icmp eq {I32} %e, zeroinitializer",
        f"%s = and {I32} %i, splat (i32 -2147483648)",
        f"%r = select {B} %z, {I32} %s, {I32} %i",
        f"%o = bitcast {I32} %r to {V}",
    ]
    text = "\n  ".join(lines)
    return f"define internal {V} @ftz({V} %x) #1 {{\n  {text}\n  ret {V} %o\n}}\n"


def build(name: str) -> str:
    """IR text of the helper function `name`."""
    simple = {"exp2": exp2, "log2": log2, "tanh": tanh, "rcp": rcp, "rsqrt": rsqrt, "ftz": flush}
    if name in simple:
        return simple[name]()
    if name in ("max", "min", "max_nan", "min_nan"):
        return minmax(name, name.startswith("max"), name.endswith("_nan"))
    op, mode = name.split("_")
    return directed(name, op, mode)


DECLARATIONS = f"""
declare {V8D} @llvm.fma.v8f64({V8D}, {V8D}, {V8D})
declare {V8D} @llvm.fabs.v8f64({V8D})
declare {V8D} @llvm.copysign.v8f64({V8D}, {V8D})
declare {V8D} @llvm.sqrt.v8f64({V8D})
"""
