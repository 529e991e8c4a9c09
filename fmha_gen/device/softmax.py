"""Row arithmetic of the online softmax: one thread owns one row, values are Python lists of registers.

Exponentials are base 2 of scaled logits, ``2^(s * scale_log2 + shift)`` with the row's shift near minus its scaled
maximum. Packed operations work on pairs of neighbouring columns.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.arch import inline_ptx

# 2^f on [0, 1) as a cubic with constant term 1: largest relative error 8.8e-5 (FlashAttention-4's published
# coefficients). The constant term keeps 2^n exact.
EXP2_C1, EXP2_C2, EXP2_C3 = 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625
# Adding it rounds to an integer in the low mantissa bits: 1.5 * 2^23.
MAGIC = 12582912.0


def max3(a: Float32, b: Float32, c: Float32) -> Float32:
    """Largest of three; NaN if any is."""
    return inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def maximum(values: list[Float32], chains: int = 3) -> Float32:
    """Largest of `values`, as independent chains of three-input maxima; NaN if any is."""
    acc, rest = values[:chains], values[chains:]
    for i in range(0, len(rest) - 1, 2):
        acc[i // 2 % chains] = max3(acc[i // 2 % chains], rest[i], rest[i + 1])
    acc += rest[len(rest) // 2 * 2 :]
    while len(acc) > 2:
        acc = [max3(*acc[:3]), *acc[3:]]
    return acc[0] if len(acc) == 1 else cute.arch.fmax(acc[0], acc[1], nan=True)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return inline_ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def fma2(a, b, c, rnd=None):
    return cute.arch.fma_packed_f32x2(a, b, c) if rnd is None else cute.arch.fma_packed_f32x2(a, b, c, rnd=rnd)


def add2(a, b, rnd=None):
    return cute.arch.add_packed_f32x2(a, b) if rnd is None else cute.arch.add_packed_f32x2(a, b, rnd=rnd)


def scale(values: list[Float32], factor: Float32) -> list[Float32]:
    """Every value times factor, in packed pairs."""
    out = []
    for i in range(0, len(values), 2):
        out += cute.arch.mul_packed_f32x2((values[i], values[i + 1]), (factor, factor))
    return out


def pack(values: list[Float32], fmt: str) -> list[Int32]:
    """Neighbouring pairs as 16-bit values of one register each; fmt ``bf16`` or ``f16``."""
    return [pack_pair(values[i], values[i + 1], fmt) for i in range(0, len(values), 2)]


def pack_pair(lo: Float32, hi: Float32, fmt: str) -> Int32:
    """Two float32 as one register of 16-bit values, round to nearest; fmt ``bf16`` or ``f16``."""
    return inline_ptx(
        f"cvt.rn.{fmt}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=[lo, hi]
    )


def _exp2_bits(poly: Float32, floor_bits: Float32) -> Float32:
    """poly * 2^n, with n in the low bits of `floor_bits`: an integer add into the exponent."""
    return inline_ptx(
        "{ .reg .b32 t; shl.b32 t, {$r1}, 23; add.s32 {$w0}, t, {$r0}; }",
        write_only_types=[Float32],
        read_only_args=[poly, floor_bits],
    )


def exp2_pair_fma(x):
    """2^x of a pair on the FMA pipe. x <= 127; below -127 the result is 0."""
    x = (cute.arch.fmax(x[0], Float32(-127.0)), cute.arch.fmax(x[1], Float32(-127.0)))
    magic = (Float32(MAGIC), Float32(MAGIC))
    n = add2(x, magic, rnd="rm")
    f = add2(n, (Float32(-MAGIC), Float32(-MAGIC)))
    f = fma2(f, (Float32(-1.0), Float32(-1.0)), x)
    p = fma2(f, (Float32(EXP2_C3), Float32(EXP2_C3)), (Float32(EXP2_C2), Float32(EXP2_C2)))
    p = fma2(p, f, (Float32(EXP2_C1), Float32(EXP2_C1)))
    p = fma2(p, f, (Float32(1.0), Float32(1.0)))
    return _exp2_bits(p[0], n[0]), _exp2_bits(p[1], n[1])


def exponentials(s: list[Float32], scale_log2: Float32, shift: Float32, emulated: tuple[int, ...]) -> list[Float32]:
    """2^(s * scale_log2 + shift) of one run of columns; the pairs listed in `emulated` use the FMA pipe."""
    out = []
    for pair in range(len(s) // 2):
        x = fma2((s[2 * pair], s[2 * pair + 1]), (scale_log2, scale_log2), (shift, shift))
        if pair in emulated:
            out += exp2_pair_fma(x)
        else:
            out += [cute.arch.exp2(x[0]), cute.arch.exp2(x[1])]
    return out


def log2(x: Float32) -> Float32:
    """Base-2 logarithm by the special-function unit."""
    return inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def row_sum(p: list[Float32], start, factor: Float32, chains: int = 4):
    """`start` (a pair of partial sums) * factor + the sum of `p`, as a pair of partial sums."""
    pairs = [(p[i], p[i + 1]) for i in range(0, len(p), 2)]
    acc = [fma2(start, (factor, factor), pairs[0]), *pairs[1:chains]]
    for i, pair in enumerate(pairs[chains:]):
        acc[i % chains] = add2(acc[i % chains], pair)
    while len(acc) > 1:
        acc = [add2(acc[i], acc[i + 1]) for i in range(0, len(acc), 2)]
    return acc[0]


def mask_bits(num_visible: Int32, first_col: int) -> Int32:
    """32 bits, one a column from `first_col`: set where the column is among the first `num_visible` of the block."""
    return inline_ptx(
        "{ .reg .s32 t; sub.s32 t, {$r1}, {$r0}; max.s32 t, t, 0; shr.u32 {$w0}, 0xffffffff, t; }",
        write_only_types=[Int32],
        read_only_args=[num_visible, Int32(first_col + 32)],
    )


def select_bits(s: list[Float32], bits: Int32) -> list[Float32]:
    """32 values with those whose bit is clear replaced by -inf."""
    return [
        inline_ptx(
            f"{{ .reg .pred p; .reg .b32 t; and.b32 t, {{$r1}}, {1 << i:#x}; setp.ne.b32 p, t, 0;"
            " selp.f32 {$w0}, {$r0}, 0fFF800000, p; }",
            write_only_types=[Float32],
            read_only_args=[value, bits],
        )
        for i, value in enumerate(s)
    ]
