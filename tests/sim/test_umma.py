"""tcgen05 semantics against expectations written element by element from the published layouts, and against numpy."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from fmha_gen.sim.umma import (
    Mma,
    TmemRect,
    TmemShapeError,
    UmmaError,
    decode_instr_desc,
    decode_operand,
    decode_smem_desc,
    execute,
    footprint,
    ldst_map,
)

SWIZZLE_CODE = {0: 0, 128: 2, 64: 4, 32: 6}
FORMAT_CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1}
SMEM_BYTES = 1 << 17


def smem_desc(start, lbo=16, sbo=1024, swizzle=128):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | SWIZZLE_CODE[swizzle] << 61


def instr(kind, fmt, m, n, a_mn=False, b_mn=False, cta_group=1, fmt_b=None, extra=0):
    code_a, code_b = FORMAT_CODE[fmt], FORMAT_CODE[fmt_b or fmt]
    word = 1 << 4 | code_a << 7 | code_b << 10 | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24 | extra
    return decode_instr_desc(word, kind, cta_group)


def chunk_place(byte, row, span):
    """Byte offset in a row of `span` bytes after the swizzle: chunk ^ (r%8), ^ (r/2%4) or ^ (r/4%2)."""
    shift = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}[span]
    return (byte // 16 ^ shift) * 16 + byte % 16


def put_k_major(smem, start, matrix, span, sbo):
    """Store [rows, K] so that each 8-row group is a dense 8 x span block, `sbo` apart. start: multiple of 8 * span."""
    raw = matrix.view(np.uint8).reshape(matrix.shape[0], -1)
    for r in range(raw.shape[0]):
        for b in range(raw.shape[1]):
            smem[start + r // 8 * sbo + r % 8 * span + chunk_place(b, r, span)] = raw[r, b]


def put_mn_major(smem, start, matrix, span, lbo, sbo):
    """Store [rows, K] MN-major: span bytes of rows side by side, 8 k's a block, blocks of rows lbo apart, of k sbo."""
    size = matrix.dtype.itemsize
    for r in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            byte = r * size
            at = start + byte // span * lbo + k // 8 * sbo + k % 8 * span + chunk_place(byte % span, k, span)
            smem[at : at + size] = matrix[r, k : k + 1].view(np.uint8)


def small_bf16(rng, shape):
    """bf16 bit patterns of small integers, and the values."""
    values = rng.integers(-8, 9, shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16), values.astype(np.float64)


def memories(ctas=1):
    smem = [np.full(SMEM_BYTES, 0xFF, np.uint8) for _ in range(ctas)]
    tmem = [np.full((128, 512), 0x7FBADBAD, np.uint32) for _ in range(ctas)]
    return smem, tmem


def f32(cells):
    return np.ascontiguousarray(cells).view(np.float32)


# ---------------------------------------------------------------- descriptors


def test_smem_descriptor_fields_of_a_known_kernel():
    # High word of every 128B-swizzled descriptor with SBO 1024: 0x40004040; low word: LBO 16384, start 0x8400.
    desc = decode_smem_desc(0x40004040 << 32 | 0x0400 << 16 | 0x0840)
    assert (desc.start, desc.lbo, desc.sbo, desc.swizzle_bytes) == (0x8400, 16384, 1024, 128)


@pytest.mark.parametrize(
    ("flip", "text"),
    [(1 << 46, "0b001"), (1 << 49, "base offset 1"), (1 << 52, "bit 52"), (1 << 55, "reserved"), (1 << 14, "reserved"),
     (3 << 61, "swizzle mode 1"), (1 << 61, "swizzle mode 3")],
)  # fmt: skip
def test_bad_smem_descriptors_are_named(flip, text):
    with pytest.raises(UmmaError, match=text):
        decode_smem_desc(smem_desc(1024) ^ flip)


def test_swizzled_operands_must_start_where_the_pattern_does():
    b = smem_desc(0)
    qk = instr("f16", "bf16", 128, 64)
    with pytest.raises(UmmaError, match="row 1 of its 128-byte swizzle pattern"):
        footprint(Mma(qk, 0, smem_desc(1024 + 128), b, False))
    with pytest.raises(UmmaError, match="leaves the row"):
        footprint(Mma(qk, 0, smem_desc(1024 + 112), b, False))


@pytest.mark.parametrize(
    ("word", "group", "m", "n", "b_major"),
    [(0x8200490, 1, 128, 128, "k"), (0x8210490, 1, 128, 128, "mn"), (0x10200490, 2, 256, 128, "k")],
)
def test_instruction_descriptors_of_known_kernels(word, group, m, n, b_major):
    got = decode_instr_desc(word, "f16", group)
    assert (got.m, got.n, got.k, got.a_format, got.b_format) == (m, n, 16, "bf16", "bf16")
    assert (got.a_major, got.b_major, got.negate_a, got.negate_b) == ("k", b_major, False, False)


@pytest.mark.parametrize(
    ("word", "kind", "group", "text"),
    [
        (0x8200490 | 4, "f16", 1, "sparse"),
        (0x8200490 | 8, "f16", 1, "saturate"),
        (0x8200490 & ~0x30, "f16", 1, "accumulator format 0"),
        (0x8200490 | 2 << 7, "f16", 1, "format 3 of A"),
        (0x8200490 & ~(1 << 7), "f16", 1, "needs one format"),
        (0x10200490, "f16", 1, "M 256"),
        (0x4200490, "f16", 2, "M 64"),
        (0x8200490 | 1 << 17, "f16", 1, "N 136"),
        (0x8000490, "f16", 1, "N 0"),
        (0x8200490, "i8", 1, "kinds f16, tf32, f8f6f4"),
        (0x8210910, "tf32", 1, "MN-major 32-bit"),
        (0x10060010 | 1 << 18, "f8f6f4", 2, "multiple of 32"),
    ],
)
def test_bad_instruction_descriptors_are_named(word, kind, group, text):
    with pytest.raises(UmmaError, match=text):
        decode_instr_desc(word, kind, group)


# ---------------------------------------------------------------- operands and accumulators


@pytest.mark.parametrize("span", [128, 64, 32])
@pytest.mark.parametrize("b_mn", [False, True])
def test_swizzled_operands_against_numpy(span, b_mn):
    rng = np.random.default_rng(span)
    (a_bits, a), (b_bits, b) = small_bf16(rng, (128, 16)), small_bf16(rng, (64, 16))
    (smem,), (tmem,) = memories()
    put_k_major(smem, 4096, a_bits, span, 8 * span)
    if b_mn:
        lbo, sbo = 4 * 8 * span, 8 * span
        put_mn_major(smem, 65536, b_bits, span, lbo, sbo)
        b_desc = smem_desc(65536, lbo, sbo, span)
    else:
        put_k_major(smem, 65536, b_bits, span, 16 * span)  # every other block is a gap
        b_desc = smem_desc(65536, 0, 16 * span, span)
    mma = Mma(instr("f16", "bf16", 128, 64, b_mn=b_mn), 32, smem_desc(4096, 0, 8 * span, span), b_desc, False)
    execute([mma], [smem], [tmem])
    assert np.array_equal(f32(tmem[:, 32:96]), a @ b.T)
    assert (tmem[:, :32] == 0x7FBADBAD).all() and (tmem[:, 96:] == 0x7FBADBAD).all()


def test_second_k_step_lies_32_bytes_further_in_the_row():
    rng = np.random.default_rng(2)
    (a_bits, a), (b_bits, b) = small_bf16(rng, (128, 64)), small_bf16(rng, (16, 64))
    (smem,), (tmem,) = memories()
    put_k_major(smem, 0, a_bits, 128, 1024)
    put_k_major(smem, 32768, b_bits, 128, 1024)
    desc = instr("f16", "bf16", 128, 16)
    for step in range(4):
        a_desc, b_desc = smem_desc(32 * step), smem_desc(32768 + 32 * step)
        execute([Mma(desc, 0, a_desc, b_desc, step > 0)], [smem], [tmem])
    assert np.array_equal(f32(tmem[:, :16]), a @ b.T)


def test_unswizzled_core_matrices():
    """Core matrices of 8 rows x 16 bytes. K-major: LBO along K, SBO along rows; MN-major: the other way round."""
    rng = np.random.default_rng(3)
    (a_bits, a), (b_bits, b) = small_bf16(rng, (64, 16)), small_bf16(rng, (24, 16))
    (smem,), (tmem,) = memories()
    for r in range(64):  # A K-major: two chunks of K 2048 bytes apart, row groups 128 bytes apart
        for c in range(2):
            at = 1024 + r // 8 * 128 + r % 8 * 16 + c * 2048
            smem[at : at + 16] = a_bits[r, 8 * c : 8 * c + 8].view(np.uint8)
    for k in range(16):  # B MN-major: 8 rows a chunk; groups of rows 256 bytes apart, groups of k 1024 bytes apart
        for g in range(3):
            at = 32768 + g * 256 + k % 8 * 16 + k // 8 * 1024
            smem[at : at + 16] = np.ascontiguousarray(b_bits[8 * g : 8 * g + 8, k]).view(np.uint8)
    a_desc, b_desc = smem_desc(1024, 2048, 128, 0), smem_desc(32768, 1024, 256, 0)
    execute([Mma(instr("f16", "bf16", 64, 24, b_mn=True), 0, a_desc, b_desc, False)], [smem], [tmem])
    want = a @ b.T
    for row in range(64):  # M 64: 16 rows in the lower half of each warp's 32 lanes
        assert np.array_equal(f32(tmem[32 * (row // 16) + row % 16, :24]), want[row])
    assert (tmem[16:32] == 0x7FBADBAD).all()


def test_a_mn_major_against_numpy():
    rng = np.random.default_rng(4)
    (a_bits, a), (b_bits, b) = small_bf16(rng, (128, 16)), small_bf16(rng, (16, 16))
    (smem,), (tmem,) = memories()
    put_mn_major(smem, 0, a_bits, 128, 2048, 1024)
    put_k_major(smem, 32768, b_bits, 32, 256)
    mma = Mma(
        instr("f16", "bf16", 128, 16, a_mn=True), 0, smem_desc(0, 2048, 1024), smem_desc(32768, 0, 256, 32), False
    )
    execute([mma], [smem], [tmem])
    assert np.array_equal(f32(tmem[:, :16]), a @ b.T)


def test_a_from_tensor_memory_packs_even_k_low():
    rng = np.random.default_rng(5)
    (p_bits, p), (v_bits, v) = small_bf16(rng, (128, 16)), small_bf16(rng, (128, 16))
    (smem,), (tmem,) = memories()
    put_mn_major(smem, 0, v_bits, 128, 2048, 1024)
    for k in range(0, 16, 2):
        tmem[:, 64 + k // 2] = p_bits[:, k].astype(np.uint32) | p_bits[:, k + 1].astype(np.uint32) << 16
    tmem[:, 256:384] = np.float32(3).view(np.uint32)
    mma = Mma(instr("f16", "bf16", 128, 128, b_mn=True), 256, 64, smem_desc(0, 2048, 1024), True, a_in_tmem=True)
    execute([mma], [smem], [tmem])
    assert np.array_equal(f32(tmem[:, 256:384]), 3 + p @ v.T)
    foot = footprint(mma)
    assert foot.tmem_reads == (TmemRect(0, 128, 64, 8), TmemRect(0, 128, 256, 128))
    assert foot.tmem_writes == (TmemRect(0, 128, 256, 128),)
    assert foot.smem_chunks.tolist() == list(range(4096 // 16))


def test_cta_pair_of_256_rows_splits_a_by_rows_and_b_by_columns():
    rng = np.random.default_rng(6)
    (a_bits, a), (b_bits, b) = small_bf16(rng, (256, 16)), small_bf16(rng, (64, 16))
    smem, tmem = memories(2)
    for cta in range(2):
        put_k_major(smem[cta], 0, a_bits[128 * cta : 128 * cta + 128], 128, 1024)
        put_k_major(smem[cta], 32768, b_bits[32 * cta : 32 * cta + 32], 128, 1024)
    execute([Mma(instr("f16", "bf16", 256, 64, cta_group=2), 0, smem_desc(0), smem_desc(32768), False)], smem, tmem)
    want = a @ b.T
    for cta in range(2):
        assert np.array_equal(f32(tmem[cta][:, :64]), want[128 * cta : 128 * cta + 128])


def test_cta_pair_of_128_rows_folds_columns_into_the_upper_lanes():
    rng = np.random.default_rng(7)
    (a_bits, a), (b_bits, b) = small_bf16(rng, (128, 16)), small_bf16(rng, (64, 16))
    smem, tmem = memories(2)
    for cta in range(2):
        put_k_major(smem[cta], 0, a_bits[64 * cta : 64 * cta + 64], 128, 1024)
        put_k_major(smem[cta], 32768, b_bits[32 * cta : 32 * cta + 32], 128, 1024)
    mma = Mma(instr("f16", "bf16", 128, 64, cta_group=2), 0, smem_desc(0), smem_desc(32768), False)
    execute([mma], smem, tmem)
    want = a @ b.T
    for cta in range(2):
        rows = want[64 * cta : 64 * cta + 64]
        assert np.array_equal(f32(tmem[cta][:64, :32]), rows[:, :32])
        assert np.array_equal(f32(tmem[cta][64:, :32]), rows[:, 32:])
    assert footprint(mma).tmem_writes == (TmemRect(0, 64, 0, 32), TmemRect(64, 64, 0, 32))


def test_eight_bit_and_tf32_kinds():
    rng = np.random.default_rng(8)
    # Codes of 1, 1.5, 2, -1 in e4m3 (bias 7) and e5m2 (bias 15).
    values = np.array([1, 1.5, 2, -1])
    codes = {"e4m3": np.array([0x38, 0x3C, 0x40, 0xB8], np.uint8), "e5m2": np.array([0x3C, 0x3E, 0x40, 0xBC], np.uint8)}
    pick_a, pick_b = rng.integers(0, 4, (128, 32)), rng.integers(0, 4, (16, 32))
    (smem,), (tmem,) = memories()
    put_k_major(smem, 0, codes["e4m3"][pick_a], 128, 1024)
    put_k_major(smem, 32768, codes["e5m2"][pick_b], 128, 1024)
    desc = instr("f8f6f4", "e4m3", 128, 16, fmt_b="e5m2")
    execute([Mma(desc, 0, smem_desc(0), smem_desc(32768), False)], [smem], [tmem])
    assert desc.k == 32 and np.array_equal(f32(tmem[:, :16]), values[pick_a] @ values[pick_b].T)

    a, b = rng.integers(-9, 9, (128, 8)).astype(np.float32), rng.integers(-9, 9, (16, 8)).astype(np.float32)
    put_k_major(smem, 0, (a.view(np.uint32) | 0x1FFF).view(np.float32), 128, 1024)  # low bits are ignored
    put_k_major(smem, 32768, b, 128, 1024)
    desc = instr("tf32", "tf32", 128, 16)
    execute([Mma(desc, 0, smem_desc(0), smem_desc(32768), False)], [smem], [tmem])
    assert desc.k == 8 and np.array_equal(f32(tmem[:, :16]), a @ b.T)


def test_small_float_values():
    e4m3 = decode_operand(np.array([0x00, 0x01, 0x08, 0x7E, 0xFE, 0x7F], np.uint8), "e4m3")
    assert e4m3[:5].tolist() == [0, 2.0**-9, 2.0**-6, 448, -448] and np.isnan(e4m3[5])
    e5m2 = decode_operand(np.array([0x01, 0x04, 0x7B, 0x7C, 0xFC, 0x7D], np.uint8), "e5m2")
    assert e5m2[:5].tolist() == [2.0**-16, 2.0**-14, 57344, np.inf, -np.inf] and np.isnan(e5m2[5])
    halves = decode_operand(np.array([0x3C00, 0x0001, 0xFC00], np.uint16).view(np.uint8), "f16")
    assert halves.tolist() == [1, 2.0**-24, -np.inf]


def test_negated_operands():
    rng = np.random.default_rng(9)
    (a_bits, a), (b_bits, b) = small_bf16(rng, (128, 16)), small_bf16(rng, (16, 16))
    (smem,), (tmem,) = memories()
    put_k_major(smem, 0, a_bits, 128, 1024)
    put_k_major(smem, 32768, b_bits, 128, 1024)
    execute(
        [Mma(instr("f16", "bf16", 128, 16, extra=1 << 13), 0, smem_desc(0), smem_desc(32768), False)], [smem], [tmem]
    )
    assert np.array_equal(f32(tmem[:, :16]), -(a @ b.T))


# ---------------------------------------------------------------- numerics


def test_one_rounding_per_instruction():
    """1 + 16 * 2^-24 in one instruction rounds once to 1 + 2^-20; term by term each addition would round away."""
    (smem,), (tmem,) = memories()
    a = np.full((128, 16), 2.0**-12, np.float32)
    b = np.full((16, 16), 2.0**-12, np.float32)
    put_k_major(smem, 0, (a.view(np.uint32) >> 16).astype(np.uint16), 128, 1024)
    put_k_major(smem, 32768, (b.view(np.uint32) >> 16).astype(np.uint16), 128, 1024)
    tmem[:, :16] = np.float32(1).view(np.uint32)
    execute([Mma(instr("f16", "bf16", 128, 16), 0, smem_desc(0), smem_desc(32768), True)], [smem], [tmem])
    assert (f32(tmem[:, :16]) == np.float32(1 + 2.0**-20)).all()


def test_sum_is_exact_before_its_rounding():
    rng = np.random.default_rng(10)
    bits = (
        rng.integers(0x3000, 0x4800, (2, 128, 16)).astype(np.uint16)
        | rng.integers(0, 2, (2, 128, 16)).astype(np.uint16) << 15
    )
    (smem,), (tmem,) = memories()
    put_k_major(smem, 0, bits[0], 128, 1024)
    put_k_major(smem, 32768, bits[1][:16], 128, 1024)
    execute([Mma(instr("f16", "bf16", 128, 16), 0, smem_desc(0), smem_desc(32768), False)], [smem], [tmem])
    value = (bits.astype(np.uint32) << 16).view(np.float32)
    got = f32(tmem[:, :16])
    for row, col in [(0, 0), (1, 5), (77, 15), (127, 3)]:
        exact = sum(
            (Fraction(float(x)) * Fraction(float(y)) for x, y in zip(value[0, row], value[1, col], strict=True))
        )
        error = abs(Fraction(float(got[row, col])) - exact)
        assert error <= abs(exact) * Fraction(1, 1 << 24)


def test_a_batch_has_the_bits_of_one_call_per_instruction():
    rng = np.random.default_rng(11)
    smem = [rng.integers(0, 0x8000, SMEM_BYTES // 2).astype(np.uint16).view(np.uint8)]
    halves = smem[0].view(np.uint16)
    halves[:] = halves % 0x0C00 + 0x3400 + (rng.integers(0, 2, halves.size).astype(np.uint16) << 15)
    qk, pv = instr("f16", "bf16", 128, 128), instr("f16", "bf16", 128, 128, b_mn=True)
    program = [
        Mma(qk, 0, smem_desc(32 * (i % 4) + 16384 * (i // 4)), smem_desc(32768 + 32 * (i % 4)), i > 0) for i in range(8)
    ]
    program += [Mma(pv, 256, 64 + 8 * i, smem_desc(65536 + 2048 * i, 16384), i > 0, True) for i in range(4)]
    program += [Mma(pv, 64, 0, smem_desc(65536, 16384), True, True)]
    # A run that reads what it writes: the second instruction's A is the first one's D.
    program += [Mma(pv, 128, 384 + 8 * i, smem_desc(65536, 16384), True, True) for i in range(2)]
    program += [Mma(pv, 384, 384 + 8 * i, smem_desc(65536, 16384), True, True) for i in range(2)]
    start = rng.normal(size=(128, 512)).astype(np.float32).view(np.uint32)
    together, single = start.copy(), start.copy()
    execute(program, smem, [together])
    for mma in program:
        execute([mma], smem, [single])
    assert np.array_equal(together, single)
    assert not np.array_equal(single, start)


def test_operand_beyond_shared_memory_and_columns_beyond_tensor_memory():
    smem, tmem = memories()
    desc = instr("f16", "bf16", 128, 128)
    with pytest.raises(UmmaError, match="reads shared byte"):
        execute([Mma(desc, 0, smem_desc(SMEM_BYTES - 1024), smem_desc(0), False)], smem, tmem)
    with pytest.raises(UmmaError, match="400 \\+ 128 exceed 512"):
        footprint(Mma(desc, 400, smem_desc(0), smem_desc(0), False))
    with pytest.raises(UmmaError, match="lane 16"):
        footprint(Mma(desc, 16 << 16, smem_desc(0), smem_desc(0), False))
    with pytest.raises(UmmaError, match="needs 1 CTAs"):
        execute([Mma(desc, 0, smem_desc(0), smem_desc(0), False)], smem * 2, tmem * 2)


# ---------------------------------------------------------------- ld/st shapes


def test_32x32b_is_lane_per_thread_column_per_register():
    layout = ldst_map("32x32b", 4)
    assert layout.dense and layout.num_regs == 4 and (layout.lanes, layout.cols) == (32, 4)
    assert layout.lane[17].tolist() == [17] * 4 and layout.col[17].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "num", "thread", "cells"),
    [  # (lane, column) of every register of one thread, read off the figures
        ("16x64b", 2, 0, [(0, 0), (0, 2)]),
        ("16x64b", 2, 1, [(8, 0), (8, 2)]),
        ("16x64b", 2, 2, [(0, 1), (0, 3)]),
        ("16x64b", 1, 31, [(15, 1)]),
        ("16x128b", 1, 0, [(0, 0), (8, 0)]),
        ("16x128b", 2, 7, [(1, 3), (9, 3), (1, 7), (9, 7)]),
        ("16x256b", 1, 0, [(0, 0), (0, 1), (8, 0), (8, 1)]),
        ("16x256b", 2, 30, [(7, 4), (7, 5), (15, 4), (15, 5), (7, 12), (7, 13), (15, 12), (15, 13)]),
    ],
)
def test_sixteen_lane_shapes(shape, num, thread, cells):
    layout = ldst_map(shape, num)
    assert list(zip(layout.lane[thread].tolist(), layout.col[thread].tolist(), strict=True)) == cells
    assert layout.lanes == 16


@pytest.mark.parametrize("shape", ["16x64b", "16x128b", "16x256b", "32x32b"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_cell_belongs_to_one_register(shape, packed):
    layout = ldst_map(shape, 4, packed)
    cells = set(zip(layout.lane.ravel().tolist(), layout.col.ravel().tolist(), strict=True))
    step = 2 if packed else 1
    assert cells == {(lane, col) for lane in range(layout.lanes) for col in range(0, layout.cols, step)}
    assert layout.lane.size == len(cells)


def test_half_split_shape():
    layout = ldst_map("16x32bx2", 2, half_split=64)
    assert layout.lane[3].tolist() == [3, 3] and layout.col[3].tolist() == [0, 1]
    assert layout.lane[19].tolist() == [3, 3] and layout.col[19].tolist() == [64, 65]
    assert layout.cols == 66


def test_unknown_shapes_are_named():
    for shape, num, half, text in [("8x32b", 1, 0, "8x32b"), ("32x32b", 3, 0, "x3"), ("16x256b", 64, 0, "up to 32"),
                                   ("16x128b", 128, 0, "up to 64"), ("32x32b", 1, 8, "16x32bx2 only")]:  # fmt: skip
        with pytest.raises(TmemShapeError, match=text):
            ldst_map(shape, num, half_split=half)
