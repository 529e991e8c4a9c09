"""The float64 reference against closed forms, and the tolerance against planted errors."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from fmha_gen.errors import ProblemError
from fmha_gen.reference import (
    attention_fp32_rounded_p,
    attention_fp64,
    check,
    from_bits,
    reference,
    round_to,
    to_bits,
    visible,
)


def zero_queries(seqlen_q, seqlen_k, heads=1, dim=4, value="index"):
    """Uniform weights over the visible keys: q is 0. v is 1, or the key's index."""
    q = np.zeros((1, seqlen_q, heads, dim), np.float32)
    k = np.random.default_rng(0).normal(size=(1, seqlen_k, heads, dim)).astype(np.float32)
    column = np.arange(seqlen_k, dtype=np.float32) if value == "index" else np.ones(seqlen_k, np.float32)
    return q, k, np.broadcast_to(column[None, :, None, None], (1, seqlen_k, heads, dim)).copy()


def normal(shape, seed, dtype="bf16"):
    return round_to(np.random.default_rng(seed).normal(size=shape), dtype)


def test_causal_with_more_queries_than_keys():
    ref = attention_fp64(*zero_queries(2048, 1024, value="ones"), causal=True)
    assert (ref.out[0, :1024] == 0).all() and np.isneginf(ref.lse[0, 0, :1024]).all()
    assert (ref.out[0, 1024:] == pytest.approx(1)) and ref.lse[0, 0, 1024] == 0
    assert ref.lse[0, 0, 2047] == pytest.approx(6.9315, abs=1e-4)


def test_causal_is_aligned_to_the_bottom_right():
    ref = attention_fp64(*zero_queries(2, 5), causal=True)
    assert ref.out[0, :, 0, 0] == pytest.approx([1.5, 2.0])
    assert ref.lse[0, 0] == pytest.approx([math.log(4), math.log(5)])
    ref = attention_fp64(*zero_queries(1, 300), causal=True)
    assert ref.out[0, 0, 0, 0] == pytest.approx(149.5)


def test_lse_is_natural():
    assert attention_fp64(*zero_queries(3, 256)).lse[0, 0] == pytest.approx([5.545177] * 3, abs=1e-6)


def test_no_keys():
    q, k, v = zero_queries(3, 0)
    ref = attention_fp64(q, k, v)
    assert (ref.out == 0).all() and np.isneginf(ref.lse).all()
    ref = attention_fp64(*zero_queries(3, 5), seqused_k=[0])
    assert (ref.out == 0).all() and np.isneginf(ref.lse).all()
    ref = attention_fp64(q, k, v, sink=np.array([2.5]))
    assert (ref.out == 0).all() and (ref.lse == 2.5).all()


def two_keys():
    """Head dim 64: logits 2 and 0 at the default scale 1/8, values 1 and 0."""
    q, k, v = np.zeros((1, 1, 1, 64)), np.zeros((1, 2, 1, 64)), np.zeros((1, 2, 1, 1))
    q[..., 0], k[0, 0, 0, 0], v[0, 0] = 4, 4, 1
    return q, k, v


@pytest.mark.parametrize(
    ("options", "out", "lse"),
    [
        ({}, 0.88080, math.log(math.e**2 + 1)),
        ({"softmax_scale": 0.0}, 0.5, 0.69315),
        ({"softmax_scale": 0.25}, 1 / (1 + math.exp(-4)), math.log(math.e**4 + 1)),
        ({"softcap": 2.0}, 0.82101, 1.72041),
        ({"softcap": 0.0}, 0.88080, math.log(math.e**2 + 1)),
        ({"sink": np.array([0.0])}, math.e**2 / (math.e**2 + 2), math.log(math.e**2 + 2)),
        ({"sink": np.array([-np.inf])}, 0.88080, math.log(math.e**2 + 1)),
    ],
)
def test_scale_softcap_and_sink(options, out, lse):
    ref = attention_fp64(*two_keys(), **options)
    assert ref.out[0, 0, 0, 0] == pytest.approx(out, abs=1e-5)
    assert ref.lse[0, 0, 0] == pytest.approx(lse, abs=1e-5)


def test_scale_zero_with_masked_keys_is_uniform():
    q, k, v = zero_queries(3, 3)
    q = q + 1e30
    ref = attention_fp64(q, k, v, softmax_scale=0.0, causal=True)
    assert ref.out[0, :, 0, 0] == pytest.approx([0, 0.5, 1.0])


def test_windows_by_hand():
    assert visible(3, 3, False, (1, 0)).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert visible(2, 4, False, (0, 1)).tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert visible(2, 3, True, (None, 5)).tolist() == [[1, 1, 0], [1, 1, 1]]
    ref = attention_fp64(*zero_queries(8, 8), causal=True, window=(3, None))
    assert ref.out[0, 7, 0, 0] == pytest.approx(5.5) and ref.lse[0, 0, 7] == pytest.approx(math.log(4))
    ref = attention_fp64(*zero_queries(129, 32, value="ones"), window=(32, 64))
    assert np.isneginf(ref.lse[0, 0, :33]).all() and (ref.out[0, :33] == 0).all() and np.isfinite(ref.lse[0, 0, 33])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"softmax_scale": -0.125}, "softmax_scale: -0.125"),
        ({"softmax_scale": math.nan}, "softmax_scale: nan"),
        ({"window": (-1, 0)}, "left is -1"),
        ({"window": (0, -1)}, "right is -1"),
        ({"softcap": -1.0}, "softcap: -1.0"),
        ({"softcap": math.inf}, "softcap: inf"),
        ({"sink": np.array([np.nan])}, "sink"),
        ({"sink": np.zeros(2)}, "sink"),
    ],
)
def test_values_outside_the_conventions_are_named(options, text):
    with pytest.raises(ProblemError, match=text):
        attention_fp64(*two_keys(), **options)


def test_shapes_outside_the_conventions_are_named():
    q, k, v = two_keys()
    with pytest.raises(ProblemError, match="num_heads_q 3 is not a multiple of num_heads_kv 2"):
        attention_fp64(np.zeros((1, 1, 3, 64)), np.zeros((1, 2, 2, 64)), np.zeros((1, 2, 2, 1)))
    with pytest.raises(ProblemError, match="q and k head_dim"):
        attention_fp64(q[..., :32], k, v)
    with pytest.raises(ProblemError, match="q: shape"):
        attention_fp64(q[0], k, v)
    with pytest.raises(ProblemError, match="dtype 'fp8'"):
        round_to(q, "fp8")


def test_grouped_heads_read_their_key_head():
    q, k, v = normal((2, 5, 6, 8), 1), normal((2, 7, 2, 8), 2), normal((2, 7, 2, 8), 3)
    ref = attention_fp64(q, k, v, causal=True)
    wide = attention_fp64(q, np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2), causal=True)
    assert np.array_equal(ref.out, wide.out) and np.array_equal(ref.lse, wide.lse)


def test_against_exact_fractions():
    """One row, integer-power-of-two weights: logits 0, ln 2, ln 4 give weights 1/7, 2/7, 4/7."""
    q, k = np.ones((1, 1, 1, 1)), np.log([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1)
    v = np.array([1.0, -3.0, 5.0]).reshape(1, 3, 1, 1)
    ref = attention_fp64(q, k, v, softmax_scale=1.0)
    assert ref.out.item() == pytest.approx(float(Fraction(1 - 6 + 20, 7)), rel=1e-14)
    assert ref.abs_pv.item() == pytest.approx(27 / 7, rel=1e-14)
    assert ref.lse.item() == pytest.approx(math.log(7), rel=1e-14)


def test_logits_of_any_size_stay_finite():
    q, k, v = normal((1, 4, 1, 8), 4), normal((1, 9, 1, 8), 5), normal((1, 9, 1, 8), 6)
    for factor in (1e4, -1e4):
        ref = attention_fp64(q * 0 + factor, np.abs(k), v)
        assert np.isfinite(ref.out).all() and np.isfinite(ref.lse).all()


def test_what_a_row_must_not_use_does_not_matter():
    q, k, v = normal((1, 4, 1, 8), 7), normal((1, 4, 1, 8), 8), normal((1, 4, 1, 8), 9)
    clean = attention_fp64(q, k, v, causal=True)
    v[0, 3], k[0, 3] = np.nan, np.inf
    dirty = attention_fp64(q, k, v, causal=True)
    assert np.allclose(clean.out[:, :3], dirty.out[:, :3], rtol=1e-14, atol=0)
    assert np.array_equal(clean.lse[..., :3], dirty.lse[..., :3])
    assert np.isnan(dirty.out[:, 3]).all()


# ---------------------------------------------------------------- rounding


def test_bf16_rounding_by_hand():
    one = 2.0**-7  # an ulp of 1
    cases = [(1 + one / 2, 1.0), (1 + 3 * one / 2, 1 + 2 * one), (1 + one * 0.51, 1 + one), (-1 - one / 2, -1.0),
             (3.4e38, math.inf), (1e-45, 0.0), (0.1, 0.10009765625)]  # fmt: skip
    for x, want in cases:
        assert round_to(np.array([x]), "bf16")[0] == np.float32(want), x
    assert np.isnan(round_to(np.array([np.nan, -np.nan]), "bf16")).all()


def test_doubles_are_rounded_once():
    # 2^-40 above a tie: by way of float32 it would look like the tie and go to even.
    x = 1 + 2.0**-8 + 2.0**-40
    assert round_to(np.array([x]), "bf16")[0] == 1 + 2.0**-7
    assert round_to(np.array([-x]), "bf16")[0] == -1 - 2.0**-7
    assert round_to(np.array([1 + 2.0**-8 - 2.0**-40]), "bf16")[0] == 1
    assert round_to(np.array([1 + 3 * 2.0**-8 - 2.0**-40]), "bf16")[0] == 1 + 2.0**-7


def test_bits_round_trip():
    bits = np.arange(65536, dtype=np.uint16)
    for dtype in ("bf16", "fp16"):
        values = from_bits(bits, dtype)
        numbers = ~np.isnan(values)
        assert np.array_equal(to_bits(values, dtype)[numbers], bits[numbers])
        assert np.isnan(from_bits(to_bits(values, dtype), dtype)[~numbers]).all()
    assert round_to(np.array([65520.0, 2.0**-25]), "fp16").tolist() == [math.inf, 0]


# ---------------------------------------------------------------- tolerance


@pytest.fixture(params=["bf16", "fp16"])
def problem(request):
    dtype = request.param
    q, k, v = (normal((1, 160, 2, 32), seed, dtype) for seed in (10, 11, 12))
    ref = reference(q, k, v, dtype, causal=True)
    return dtype, ref, attention_fp32_rounded_p(q, k, v, dtype, causal=True)


def test_the_rounded_computation_passes(problem):
    dtype, ref, good = problem
    assert check(good, ref.lse.astype(np.float32), ref, dtype) == []
    assert 0 < ref.rms < 2e-2


def test_one_wrong_element_is_found(problem):
    dtype, ref, good = problem
    u = {"bf16": 1 / 256, "fp16": 1 / 2048}[dtype]
    bad = good.copy()
    limit = u * abs(ref.out[0, 77, 1, 5]) + (u + 2e-4) * ref.abs_pv[0, 77, 1, 5]
    if dtype == "fp16":
        assert ref.small_pv[0, 77, 1, 5] < 1e-3 * limit, "no row of the problem is steep"
    bad[0, 77, 1, 5] = ref.out[0, 77, 1, 5] + 0.98 * limit
    assert check(bad, None, ref, dtype) == []
    bad[0, 77, 1, 5] = ref.out[0, 77, 1, 5] + 1.02 * limit
    (text,) = check(bad, None, ref, dtype)
    assert "1 of 10240" in text and "[0, 77, 1, 5]" in text


def test_small_probabilities_in_fp16_have_half_a_subnormal_step():
    """One key takes nearly all; P of the others is 2.4 of fp16's smallest steps, so that each loses 0.4."""
    p = np.array([1.0] + [2.4 * 2.0**-24] * 40)
    q, k = np.ones((1, 1, 1, 1)), np.log(p)[None, :, None, None]
    v = np.array([0.0] + [3.0] * 40)[None, :, None, None]
    ref = attention_fp64(q, k, v, 1.0)
    assert ref.small_pv.item() == pytest.approx(40 * 0.5 * 2.0**-24 * 3 / p.sum(), rel=1e-12)
    rounded = np.full((1, 1, 1, 1), round_to(p, "fp16") @ v[0, :, 0, 0] / p.sum())
    assert check(rounded, None, ref, "fp16") == []
    assert "1 of 1 elements" in check(rounded, None, ref, "bf16")[0], "bf16 has float32's exponents"
    assert "1 of 1 elements" in check(rounded - 0.3 * ref.small_pv, None, ref, "fp16")[0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_a_number_is_found(problem, value):
    dtype, ref, good = problem
    bad = good.copy()
    bad[0, 3, 0, 0] = value
    assert "[0, 3, 0, 0]" in check(bad, None, ref, dtype)[0]


def test_noise_inside_the_elementwise_limit_fails_by_rms(problem):
    dtype, ref, _ = problem
    u = {"bf16": 1 / 256, "fp16": 1 / 2048}[dtype]
    sign = np.random.default_rng(13).choice([-1, 1], ref.out.shape)
    limit = u * np.abs(ref.out) + (u + 2e-4) * ref.abs_pv
    (text,) = check(ref.out + 0.9 * sign * limit, None, ref, dtype)
    assert "RMS error" in text


def test_lse_limits(problem):
    dtype, ref, good = problem
    lse = ref.lse.copy()
    lse[0, 1, 50] += 0.9 * (2e-4 + 1e-5 * abs(lse[0, 1, 50]))
    assert check(good, lse, ref, dtype) == []
    lse[0, 1, 50] = ref.lse[0, 1, 50] * math.log2(math.e)
    assert "lse: 1 of 320" in check(good, lse, ref, dtype)[0]


def test_empty_rows_must_be_exact():
    q, k, v = zero_queries(4, 2, value="ones")
    ref = attention_fp64(q, k, v, causal=True)
    out, lse = ref.out.copy(), ref.lse.copy()
    assert check(out, lse, ref, "bf16") == []
    out[0, 0, 0, 0], lse[0, 0, 1] = 1e-30, -1e30
    assert [p[:3] for p in check(out, lse, ref, "bf16")] == ["out", "lse"]


def test_wrong_shapes_are_named(problem):
    dtype, ref, good = problem
    assert "shape (1, 160, 2, 31)" in check(good[..., 1:], ref.lse, ref, dtype)[0]
