"""Register instructions against exact arithmetic."""

# ruff: noqa: E501 (PTX text and tables of it)
from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.sim.ptx_kit import evaluate

SPECIAL = np.array(
    [
        0x00000000,
        0x80000000,
        0x3F800000,
        0xBF800000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x00000001,
        0x80000001,
        0x00800000,
        0x80800000,
        0x007FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x3F800001,
        0xC2FE0000,
    ],
    np.uint32,
)


def floats(seed: int, n: int = 1600) -> np.ndarray:
    """Bit patterns: random ones, ordinary magnitudes, and near-cancelling neighbours."""
    rng = np.random.default_rng(seed)
    any_bits = rng.integers(0, 1 << 32, n // 2, dtype=np.uint64).astype(np.uint32)
    tame = rng.normal(size=n - n // 2).astype(np.float32).view(np.uint32)
    out = np.concatenate([any_bits, tame])
    rng.shuffle(out)
    return out


def pairs(seed: int):
    a, b = floats(seed), floats(seed + 1)
    b[::5] = a[::5] ^ np.uint32(0x80000001)  # cancellation
    a = np.concatenate([np.repeat(SPECIAL, SPECIAL.size), a])
    b = np.concatenate([np.tile(SPECIAL, SPECIAL.size), b])
    return a, b


def as_float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def rounded(value: Fraction, mode: str, zero_sign: int) -> int:
    """Bits of an exact value rounded to float32."""
    if value == 0:
        return 0x80000000 if zero_sign else 0
    sign, mag = (1, -value) if value < 0 else (0, value)
    exponent = max(mag.numerator.bit_length() - mag.denominator.bit_length(), -126)
    while mag >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and mag < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    steps, rest = divmod(mag, unit)
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and steps & 1),
        "rz": False,
        "rm": bool(sign and rest),
        "rp": bool(not sign and rest),
    }[mode]
    steps += up
    if steps * unit >= Fraction(2) ** 128:
        away = mode == "rn" or (mode == "rp" and not sign) or (mode == "rm" and sign)
        return (sign << 31) | (0x7F800000 if away else 0x7F7FFFFF)
    bits = int(steps)
    if exponent > -126 or bits >= 1 << 23:
        bits = int(steps) + ((exponent + 126) << 23)
    return (sign << 31) | bits


def expected(op: str, mode: str, *args: int) -> int | None:
    """None: NaN."""
    x = [as_float(a) for a in args]
    if any(math.isnan(v) for v in x) or any(math.isinf(v) for v in x):
        with np.errstate(all="ignore"):
            y = [np.float64(v) for v in x]
            r = (
                y[0] + y[1]
                if op == "add"
                else y[0] - y[1]
                if op == "sub"
                else y[0] * y[1]
                if op == "mul"
                else y[0] * y[1] + y[2]
            )
        return None if math.isnan(r) else int(np.float32(r).view(np.uint32))
    f = [Fraction(v) for v in x]
    signs = [math.copysign(1, v) < 0 for v in x]
    if op == "mul":
        return rounded(f[0] * f[1], mode, signs[0] != signs[1])
    if op == "fma":
        p, q, ps, qs = f[0] * f[1], f[2], signs[0] != signs[1], signs[2]
    else:
        p, q, ps, qs = f[0], f[1] if op == "add" else -f[1], signs[0], signs[1] != (op == "sub")
    zero = ps if (p == 0 and q == 0 and ps == qs) else mode == "rm"
    return rounded(p + q, mode, zero)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float_operations_round_exactly(op, mode):
    a, b = pairs(1)
    args = [a, b] if op != "fma" else [a, b, np.concatenate([np.tile(SPECIAL[::-1], SPECIAL.size), floats(7)])]
    if op == "fma":  # cancellation of the product
        with np.errstate(all="ignore"):
            product = (a.view(np.float32) * b.view(np.float32)).view(np.uint32) ^ np.uint32(0x80000000)
        args[2][::3] = product[::3]
    names = ", ".join("{" + "abc"[k] + "}" for k in range(len(args)))
    got = evaluate(f"{op}.{mode}.f32 {{o}}, {names};", args)
    for row in zip(got.tolist(), *(x.tolist() for x in args), strict=True):
        want = expected(op, mode, *row[1:])
        assert row[0] == (0x7FFFFFFF if want is None else want), [hex(v) for v in row]


@pytest.mark.parametrize("op,mode", [("add", "rm"), ("mul", "rn"), ("fma", "rn"), ("sub", "rn"), ("fma", "rz")])
def test_packed_floats_are_two_scalars(op, mode):
    a, b = pairs(3)
    c = np.roll(a, 3)
    pack = [x.astype(np.uint64) | np.roll(x, 1).astype(np.uint64) << np.uint64(32) for x in (a, b, c)]
    n = 3 if op == "fma" else 2
    names = ", ".join("{" + "abc"[k] + "}" for k in range(n))
    got = evaluate(f"{op}.{mode}.f32x2 {{o}}, {names};", pack[:n], out_bits=64)
    scalar = evaluate(f"{op}.{mode}.f32 {{o}}, {names};", [a, b, c][:n])
    assert np.array_equal(got & np.uint64(0xFFFFFFFF), scalar.astype(np.uint64))
    assert np.array_equal(got >> np.uint64(32), np.roll(scalar, 1).astype(np.uint64))


def test_ftz_flushes_inputs_and_results():
    a = np.array([0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000], np.uint32)
    b = np.array([0x3F800000, 0x3F800000, 0x3F000000, 0x3F800000], np.uint32)
    assert evaluate("mul.ftz.f32 {o}, {a}, {b};", [a, b]).tolist() == [0, 0x80000000, 0, 0x3F800000]
    assert evaluate("mul.f32 {o}, {a}, {b};", [a, b]).tolist() == [1, 0x807FFFFF, 0x00400000, 0x3F800000]


def test_sat_clamps():
    a = np.array([-1.0, -0.0, 0.25, 2.0, np.nan, np.inf], np.float32)
    got = evaluate("add.sat.f32 {o}, {a}, 0f00000000;", [a]).view(np.float32)
    assert got.tolist() == [0, 0, 0.25, 1, 0, 1]
    assert not np.signbit(got).any()


@pytest.mark.parametrize("op", ["min", "max"])
def test_minmax_nan_and_zero(op):
    a, b = pairs(5)
    fa, fb = a.view(np.float32), b.view(np.float32)
    got = evaluate(f"{op}.f32 {{o}}, {{a}}, {{b}};", [a, b])
    pick = np.fmax(fa, fb) if op == "max" else np.fmin(fa, fb)
    want = np.where((fa == fb), a & b if op == "max" else a | b, pick.view(np.uint32))
    want = np.where(np.isnan(fa) & np.isnan(fb), np.uint32(0x7FFFFFFF), want)
    assert np.array_equal(got, want)
    nan = evaluate(f"{op}.NaN.f32 {{o}}, {{a}}, {{b}};", [a, b])
    assert np.array_equal(nan, np.where(np.isnan(fa) | np.isnan(fb), np.uint32(0x7FFFFFFF), want))


def test_three_input_max():
    a, b, c = floats(1), floats(2), floats(3)
    got = evaluate("max.f32 {o}, {a}, {b}, {c};", [a, b, c]).view(np.float32)
    want = np.fmax(np.fmax(a.view(np.float32), b.view(np.float32)), c.view(np.float32))
    assert np.array_equal(got[~np.isnan(want)], want[~np.isnan(want)])


def correctly_rounded(f, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return f(x.astype(np.longdouble)).astype(np.float32)


@pytest.mark.parametrize("op,reference,low,high", [
    ("ex2.approx", np.exp2, -155.0, 130.0), ("lg2.approx", np.log2, 1e-44, 3e38), ("rcp.approx", lambda x: 1 / x, -1e38, 1e38),
    ("rsqrt.approx", lambda x: 1 / np.sqrt(x), 1e-38, 1e38), ("tanh.approx", np.tanh, -12.0, 12.0), ("sqrt.rn", np.sqrt, 0, 1e38),
])  # fmt: skip
def test_approximations_are_correctly_rounded(op, reference, low, high):
    rng = np.random.default_rng(0)
    x = rng.uniform(low, high, 3000).astype(np.float32)
    x = np.concatenate(
        [
            x,
            (x * np.float32(1e-3)),
            np.float32(1) + np.arange(-50, 50, dtype=np.float32) * np.float32(2**-23),
            np.arange(-20, 20, dtype=np.float32),
            x * np.float32(1e-6),
        ]
    )
    if low >= 0:
        x = np.abs(x)
    got = evaluate(f"{op}.f32 {{o}}, {{a}};", [x]).view(np.float32)
    want = correctly_rounded(reference, x)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    assert same.all(), (x[~same][:5], got[~same][:5], want[~same][:5])


@pytest.mark.parametrize("op,inputs,outputs", [
    ("ex2.approx.ftz", [-np.inf, np.inf, np.nan, -127.0, -126.0, 128.0], [0, np.inf, np.nan, 0, 2.0**-126, np.inf]),
    ("lg2.approx.ftz", [0.0, -0.0, 1e-40, -1.0, np.inf, np.nan], [-np.inf, -np.inf, -np.inf, np.nan, np.inf, np.nan]),
    ("rcp.approx.ftz", [0.0, -0.0, np.inf, -np.inf, 1e-40], [np.inf, -np.inf, 0, -0.0, np.inf]),
    ("tanh.approx", [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-30], [1, -1, np.nan, 0, -0.0, 1e-30]),
])  # fmt: skip
def test_approximations_at_the_edges(op, inputs, outputs):
    got = evaluate(f"{op}.f32 {{o}}, {{a}};", [np.array(inputs, np.float32)]).view(np.float32)
    want = np.array(outputs, np.float32)
    assert np.array_equal(got, want, equal_nan=True) and np.array_equal(
        np.signbit(got[want == 0]), np.signbit(want[want == 0])
    )


def test_bf16_conversion_rounds_to_nearest_even():
    a, b = pairs(9)
    got = evaluate("cvt.rn.bf16x2.f32 {o}, {a}, {b};", [a, b])
    for half, bits in ((got >> 16, a), (got & 0xFFFF, b)):
        wide = bits.astype(np.uint64)
        want = ((wide + 0x7FFF + (wide >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint32)
        want = np.where(np.isnan(bits.view(np.float32)), np.uint32(0x7FFF), want)
        assert np.array_equal(half, want)


def test_f16_conversions():
    a, b = pairs(11)
    got = evaluate("cvt.rn.f16x2.f32 {o}, {a}, {b};", [a, b])
    with np.errstate(over="ignore"):
        for half, bits in ((got >> 16, a), (got & 0xFFFF, b)):
            f = bits.view(np.float32)
            want = np.where(np.isnan(f), np.uint16(0x7FFF), f.astype(np.float16).view(np.uint16))
            assert np.array_equal(half.astype(np.uint16), want)
    h = np.arange(0, 65536, 7, dtype=np.uint16)
    back = evaluate("cvt.f32.f16 {o}, {a};", [h]).view(np.float32)
    assert np.array_equal(back, h.view(np.float16).astype(np.float32), equal_nan=True)
    wide = evaluate("cvt.f32.bf16 {o}, {a};", [h])
    nan = (h & 0x7FFF) > 0x7F80
    assert np.array_equal(wide[~nan], h[~nan].astype(np.uint32) << 16)


@pytest.mark.parametrize("name,mant,bias,top", [("e4m3", 3, 7, 448.0), ("e5m2", 2, 15, 57344.0)])
def test_fp8_conversion(name, mant, bias, top):
    codes = np.arange(128)
    exponent, fraction = codes >> mant, codes & ((1 << mant) - 1)
    value = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias - mant), (1 + fraction / (1 << mant)) * 2.0 ** (exponent - bias)
    )
    value = value[value <= top]
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [
            rng.uniform(-1, 1, 3000) * 2.0 ** rng.integers(-20, 18, 3000),
            (value[1:] + value[:-1]) / 2,
            value,
            [1e9, -1e9, np.inf, -np.inf],
        ]
    ).astype(np.float32)
    got = evaluate(f"cvt.rn.satfinite.{name}x2.f32 {{o}}, {{a}}, {{b}};", [x, np.roll(x, 1)], out_bits=16)
    mag = np.minimum(np.abs(x.astype(np.float64)), top)
    at = np.searchsorted(value, mag)
    at = np.clip(at, 1, value.size - 1)
    low, high = value[at - 1], value[at]
    pick = np.where((mag - low < high - mag) | ((mag - low == high - mag) & ((at - 1) % 2 == 0)), at - 1, at)
    pick = np.where(mag == 0, 0, pick)
    want = pick | np.where(np.signbit(x), 0x80, 0)
    assert np.array_equal(got >> 8, want.astype(np.uint16))
    assert np.array_equal(got & 0xFF, np.roll(want, 1).astype(np.uint16))


def test_mixed_precision_add():
    h = np.array([0x3F80, 0xC000, 0x7FC0], np.uint16)
    f = np.array([0.5, 0.25, 1.0], np.float32)
    got = evaluate("add.rn.f32.bf16 {o}, {a}, {b};", [h, f]).view(np.float32)
    assert got[:2].tolist() == [1.5, -1.75] and np.isnan(got[2])


def ints(seed: int, n: int = 640) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32)
    x[:8] = [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 31, 32, 33]
    return x


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


M = (1 << 32) - 1


@pytest.mark.parametrize("code,f", [
    ("add.s32 {o}, {a}, {b};", lambda a, b: a + b), ("sub.s32 {o}, {a}, {b};", lambda a, b: a - b),
    ("mul.lo.s32 {o}, {a}, {b};", lambda a, b: a * b), ("mul.hi.u32 {o}, {a}, {b};", lambda a, b: a * b >> 32),
    ("mul.hi.s32 {o}, {a}, {b};", lambda a, b: signed(a) * signed(b) >> 32),
    ("and.b32 {o}, {a}, {b};", lambda a, b: a & b), ("or.b32 {o}, {a}, {b};", lambda a, b: a | b),
    ("xor.b32 {o}, {a}, {b};", lambda a, b: a ^ b), ("not.b32 {o}, {a};", lambda a, b: ~a),
    ("neg.s32 {o}, {a};", lambda a, b: -a), ("abs.s32 {o}, {a};", lambda a, b: abs(signed(a))),
    ("min.s32 {o}, {a}, {b};", lambda a, b: min(signed(a), signed(b))), ("max.u32 {o}, {a}, {b};", lambda a, b: max(a, b)),
    ("min.relu.s32 {o}, {a}, {b};", lambda a, b: max(0, min(signed(a), signed(b)))),
    ("shl.b32 {o}, {a}, {b};", lambda a, b: a << b if b < 32 else 0), ("shr.u32 {o}, {a}, {b};", lambda a, b: a >> b if b < 32 else 0),
    ("shr.s32 {o}, {a}, {b};", lambda a, b: signed(a) >> min(b, 31)),
    ("popc.b32 {o}, {a};", lambda a, b: a.bit_count()), ("clz.b32 {o}, {a};", lambda a, b: 32 - a.bit_length()),
    ("brev.b32 {o}, {a};", lambda a, b: int(f"{a:032b}"[::-1], 2)), ("bfind.u32 {o}, {a};", lambda a, b: a.bit_length() - 1),
    ("bfind.s32 {o}, {a};", lambda a, b: (a if a >> 31 == 0 else a ^ M).bit_length() - 1),
    ("div.u32 {o}, {a}, {b};", lambda a, b: a // b if b else -1), ("rem.u32 {o}, {a}, {b};", lambda a, b: a % b if b else a),
    ("div.s32 {o}, {a}, {b};", lambda a, b: int(math.trunc(Fraction(signed(a), signed(b)))) if b else -1),
    ("rem.s32 {o}, {a}, {b};", lambda a, b: signed(a) - signed(b) * int(math.trunc(Fraction(signed(a), signed(b)))) if b else a),
    ("mad.lo.s32 {o}, {a}, {b}, 77;", lambda a, b: a * b + 77),
    ("bfe.u32 {o}, {a}, {b}, 7;", lambda a, b: a >> (b & 255) & 127),
    ("bfe.s32 {o}, {a}, 20, 8;", lambda a, b: signed(a >> 20 & 255, 8)), ("bfe.s32 {o}, {a}, 28, 8;", lambda a, b: signed(a) >> 28),
    ("bfi.b32 {o}, {a}, {b}, 5, 9;", lambda a, b: b & ~(511 << 5) | (a & 511) << 5), ("bfi.b32 {o}, {a}, {b}, 28, 9;", lambda a, b: b & ~(15 << 28) | a << 28),
    ("lop3.b32 {o}, {a}, {b}, 0x0f0f0f0f, 0xd8;", lambda a, b: sum((0xD8 >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | (0x0F0F0F0F >> k & 1)) & 1) << k for k in range(32))),
    ("shf.l.wrap.b32 {o}, {a}, {b}, 13;", lambda a, b: (b << 32 | a) << 13 >> 32), ("shf.r.clamp.b32 {o}, {a}, {b}, 40;", lambda a, b: b),
    ("shf.r.wrap.b32 {o}, {a}, {b}, 40;", lambda a, b: (b << 32 | a) >> 8),
    ("prmt.b32 {o}, {a}, {b}, 0x7250;", lambda a, b: (a & 255) | (b >> 8 & 255) << 8 | (a >> 16 & 255) << 16 | (b >> 24) << 24),
    ("prmt.b32 {o}, {a}, {b}, 0x000b;", lambda a, b: (255 if a >> 31 else 0) | (a & 255) * 0x01010100),
])  # fmt: skip
def test_integer_operations(code, f):
    a, b = ints(1), ints(2)
    b[8::3] &= 63
    got = evaluate(code, [a, b])
    want = [f(x, y) & M for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert got.tolist() == want


def test_wide_and_64_bit():
    a, b = ints(3), ints(4)
    assert evaluate("mul.wide.u32 {o}, {a}, {b};", [a, b], 64).tolist() == [
        x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert evaluate("mul.wide.s32 {o}, {a}, {b};", [a, b], 64).tolist() == [
        signed(x) * signed(y) & (1 << 64) - 1 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    wide = a.astype(np.uint64) << np.uint64(32) | b
    assert evaluate("mul.lo.s64 {o}, {a}, {a};", [wide], 64).tolist() == [x * x & (1 << 64) - 1 for x in wide.tolist()]
    assert evaluate("shr.s64 {o}, {a}, 40;", [wide], 64).tolist() == [
        signed(x, 64) >> 40 & (1 << 64) - 1 for x in wide.tolist()
    ]
    assert evaluate("add.s64 {o}, {a}, -5;", [wide], 64).tolist() == [x - 5 & (1 << 64) - 1 for x in wide.tolist()]
    assert evaluate("cvt.s64.s32 {o}, {a};", [a], 64).tolist() == [signed(x) & (1 << 64) - 1 for x in a.tolist()]
    assert evaluate("cvt.u32.u64 {o}, {a};", [wide], 32).tolist() == b.tolist()
    assert evaluate(
        "{{ .reg .b32 lo, hi; mov.b64 {{lo, hi}}, {a}; mov.b64 {o}, {{hi, lo}}; }}", [wide], 64
    ).tolist() == [(x >> 32) | (x & M) << 32 for x in wide.tolist()]


def test_16_bit_and_packing():
    h, g = np.arange(0, 640, dtype=np.uint16) * np.uint16(101), np.arange(640, dtype=np.uint16)
    assert evaluate("add.s16 {o}, {a}, {b};", [h, g], 16).tolist() == [
        (x + y) & 0xFFFF for x, y in zip(h.tolist(), g.tolist(), strict=True)
    ]
    assert evaluate("mov.b32 {o}, {{{a}, {b}}};", [h, g]).tolist() == [
        x | y << 16 for x, y in zip(h.tolist(), g.tolist(), strict=True)
    ]
    assert evaluate("cvt.s32.s16 {o}, {a};", [h]).tolist() == [signed(x, 16) & M for x in h.tolist()]
    assert evaluate("cvt.u32.u8 {o}, {a};", [ints(1)]).tolist() == [x & 255 for x in ints(1).tolist()]
    assert evaluate("cvt.s32.s8 {o}, {a};", [ints(1)]).tolist() == [signed(x & 255, 8) & M for x in ints(1).tolist()]


@pytest.mark.parametrize(
    "how,f", [("rni", lambda v: round(v)), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)]
)
def test_float_to_integer(how, f):
    x = np.concatenate(
        [np.random.default_rng(4).normal(size=500) * 100, [0.5, 1.5, 2.5, -0.5, 3e9, -3e9, 1e20]]
    ).astype(np.float32)
    got = evaluate(f"cvt.{how}.s32.f32 {{o}}, {{a}};", [x]).view(np.int32)
    assert got.tolist() == [max(-(1 << 31), min((1 << 31) - 1, f(float(v)))) for v in x]
    unsigned = evaluate(f"cvt.{how}.u32.f32 {{o}}, {{a}};", [x])
    assert unsigned.tolist() == [max(0, min(M, f(float(v)))) for v in x]
    assert evaluate(f"cvt.{how}.s32.f32 {{o}}, {{a}};", [np.array([np.nan], np.float32)])[0] == 0
    back = evaluate("cvt.rn.f32.s32 {o}, {a};", [ints(5)]).view(np.float32)
    assert back.tolist() == [float(np.float32(signed(v))) for v in ints(5).tolist()]


COMPARES = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("cmp", COMPARES)
def test_compare(cmp):
    a, b = pairs(13)
    fa, fb = a.view(np.float32), b.view(np.float32)
    nan = np.isnan(fa) | np.isnan(fb)
    code = "setp.CMP.{ty} %p1, {{a}}, {{b}}; selp.b32 {{o}}, 7, 9, %p1;"
    floats = code.format(ty="f32")
    got = evaluate(floats.replace("CMP", cmp), [a, b])
    with np.errstate(invalid="ignore"):
        plain = COMPARES[cmp](fa, fb)
    assert np.array_equal(got, np.where(plain & ~nan, 7, 9))
    assert np.array_equal(evaluate(floats.replace("CMP", cmp + "u"), [a, b]), np.where(plain | nan, 7, 9))
    got = evaluate(code.format(ty="s32").replace("CMP", cmp), [a, b])
    assert np.array_equal(got, np.where(COMPARES[cmp](a.view(np.int32), b.view(np.int32)), 7, 9))


def test_setp_combines_and_gives_the_complement():
    a = np.arange(64, dtype=np.uint32)
    code = """{{ setp.lt.u32 %p2, {a}, 40; setp.gt.and.u32 %p1|%p3, {a}, 10, %p2;
              selp.b32 %r20, 1, 0, %p1; selp.b32 %r21, 2, 0, %p3; add.s32 {o}, %r20, %r21; }}"""
    want = [(1 if 10 < x < 40 else 0) + (2 if not x > 10 and x < 40 else 0) for x in range(64)]
    assert evaluate(code, [a]).tolist() == want
    code = "{{ setp.hi.or.u32 %p1, {a}, 50, !%p2; selp.b32 {o}, 1, 0, %p1; }}"
    assert evaluate("setp.lt.u32 %p2, {a}, 20; " + code, [a]).tolist() == [int(x > 50 or x >= 20) for x in range(64)]


def test_guarded_writes_keep_other_lanes():
    a = np.arange(32, dtype=np.uint32)
    code = "setp.lt.u32 %p1, {a}, 5; mov.u32 {o}, 100; @%p1 add.s32 {o}, {a}, 1; @!%p1 sub.s32 {o}, {o}, {a};"
    assert evaluate(code, [a]).tolist() == [x + 1 if x < 5 else 100 - x for x in range(32)]


def test_warp_operations():
    a = np.arange(32, dtype=np.uint32) * 3
    assert evaluate("shfl.sync.bfly.b32 {o}, {a}, 5, 31, -1;", [a]).tolist() == [3 * (x ^ 5) for x in range(32)]
    assert evaluate("shfl.sync.idx.b32 {o}, {a}, 7, 0x181f, -1;", [a]).tolist() == [
        3 * ((x & 24) + 7) for x in range(32)
    ]
    assert evaluate("shfl.sync.up.b32 {o}, {a}, 3, 0, -1;", [a]).tolist() == [
        3 * (x - 3 if x >= 3 else x) for x in range(32)
    ]
    code = "shfl.sync.down.b32 %r20|%p1, {a}, 3, 31, -1; selp.b32 {o}, %r20, 1000, %p1;"
    assert evaluate(code, [a]).tolist() == [3 * (x + 3) if x + 3 < 32 else 1000 for x in range(32)]
    assert evaluate("setp.lt.u32 %p1, {a}, 10; vote.sync.ballot.b32 {o}, %p1, -1;", [a]).tolist() == [0b1111] * 32
    code = "setp.lt.u32 %p1, {a}, 1000; vote.sync.all.pred %p2, %p1, -1; selp.b32 {o}, 1, 0, %p2;"
    assert evaluate(code, [a]).tolist() == [1] * 32
    assert evaluate("elect.sync %r20|%p1, -1; selp.b32 {o}, 5, %r20, %p1;", [a]).tolist() == [5] + [0] * 31
    assert evaluate("redux.sync.add.u32 {o}, {a}, -1;", [a]).tolist() == [int(a.sum())] * 32
    assert evaluate("redux.sync.min.s32 {o}, {a}, -1;", [a - 50]).view(np.int32).tolist() == [-50] * 32


def test_cvta_and_mapa_windows():
    a = np.array([0x12345678] * 32, np.uint32)
    code = "cvt.u64.u32 %rd20, {a}; cvta.shared.u64 %rd21, %rd20; cvta.to.shared.u64 {o}, %rd21;"
    assert evaluate(code, [a], 64).tolist() == [0x12345678] * 32
    assert evaluate("mapa.shared::cluster.u32 {o}, {a}, 3;", [a])[0] == 0x03345678
