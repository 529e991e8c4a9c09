"""Kernels of the default bundle on probes with closed-form answers, in the simulator. Case ids: public reports.

Probes: Q = 0 weighs all visible keys alike, so LSE is the logarithm of their number; V = 1 makes out 1 where there is a
key and 0 where there is none; V[j] = j shows which keys were seen. `fmha_gen.verify` has the random problems.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmha_gen.errors import ProblemError, SelectionError
from fmha_gen.reference import check, from_bits, reference, round_to, to_bits
from fmha_gen.runtime import Bundle
from fmha_gen.sim.driver import SimDriver

pytestmark = [pytest.mark.sim, pytest.mark.compile]
BOTH_STAGES = pytest.mark.parametrize("variant", ["*-q1-*", "*-q2-*"])


class Kernels:
    """Runs problems on the bundle; loaded kernels are kept between tests."""

    def __init__(self, path: Path) -> None:
        self.driver = SimDriver()
        self.bundle = Bundle.open(path, self.driver)

    def __call__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str = "bf16", sms: int | None = None, seed: int = 0,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """(out, lse) as float32, over canaries."""
        self.driver.reset(seed)
        named = {n: self.driver.place(n, np.ascontiguousarray(to_bits(a, dtype)), dtype) for n, a in
                 (("q", q), ("k", k), ("v", v))}  # fmt: skip
        out = to_bits(np.full((*q.shape[:3], v.shape[3]), 777, np.float32), dtype)
        lse = np.full((q.shape[0], q.shape[2], q.shape[1]), 777, np.float32)
        self.bundle.attention(
            **named, out=self.driver.place("out", out, dtype), lse=self.driver.place("lse", lse), num_sms=sms, **options
        )
        return from_bits(out, dtype), lse


@pytest.fixture(scope="module")
def kernels(core_bundle: Path) -> Kernels:
    return Kernels(core_bundle)


def zeros(batch: int, rows: int, heads: int, dim: int = 64) -> np.ndarray:
    return np.zeros((batch, rows, heads, dim), np.float32)


def indices(batch: int, rows: int, heads: int, dim: int = 64) -> np.ndarray:
    return np.broadcast_to(np.arange(rows, dtype=np.float32)[None, :, None, None], (batch, rows, heads, dim))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@BOTH_STAGES
@pytest.mark.parametrize("missing", [1, 127, 128, 129])
def test_m02_more_queries_than_keys(kernels: Kernels, variant: str, missing: int) -> None:
    """M02: causal, bottom-right: the first rows see no key: out 0, LSE -inf, not what was in the buffer."""
    sk = 130
    q, k = zeros(1, sk + missing, 1), random(1, sk, 1, 64)
    out, lse = kernels(q, k, zeros(1, sk, 1) + 1, causal=True, variant=variant)
    assert (out[0, :missing] == 0).all() and (lse[0, 0, :missing] == -np.inf).all()
    assert (out[0, missing:] == 1).all()
    np.testing.assert_allclose(lse[0, 0, missing:], np.log(np.arange(1, sk + 1)), atol=2e-4)
    assert lse[0, 0, missing] == 0


@BOTH_STAGES
def test_m03_bottom_right_alignment(kernels: Kernels, variant: str) -> None:
    """M03: Sq 2, Sk 5 sees 4 and 5 keys (top-left would see 1 and 2); one query sees all of 300 keys."""
    out, lse = kernels(zeros(1, 2, 1), random(1, 5, 1, 64), indices(1, 5, 1), causal=True, variant=variant)
    np.testing.assert_allclose(out[0, :, 0, 0], [1.5, 2.0], atol=1e-2)
    np.testing.assert_allclose(lse[0, 0], np.log([4, 5]), atol=2e-4)
    v = indices(1, 300, 1) % 2
    out, lse = kernels(zeros(1, 1, 1), random(1, 300, 1, 64), v, causal=True, variant=variant)
    np.testing.assert_allclose(out[0, 0, 0], 0.5, atol=2e-3)
    np.testing.assert_allclose(lse, math.log(300), atol=2e-4)


def test_m01_causal_spelled_as_a_window_is_the_same_kernel(kernels: Kernels) -> None:
    """M01: the flag and (None, 0) agree bit for bit; (-1, 0) is refused, never an empty band."""
    q, k = random(1, 140, 2, 64), random(1, 200, 1, 64, seed=1)
    results = [kernels(q, k, k, **o) for o in ({"causal": True}, {"window": (None, 0)},
                                               {"causal": True, "window": (None, None)})]  # fmt: skip
    for out, lse in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(lse, results[0][1])
    with pytest.raises(ProblemError, match="window_left: -1"):
        kernels(q, k, k, window=(-1, 0))
    with pytest.raises(SelectionError, match="mask window is not built"):
        kernels(q, k, k, window=(128, 0))


def test_m07_every_row_of_causal_sees_its_own_keys(kernels: Kernels) -> None:
    """M07, M08 re-dimensioned: key j is seen by rows >= j only, across tiles and blocks."""
    rows = 300
    v = zeros(1, rows, 1)
    v[0, np.arange(0, rows, 5), 0, np.arange(0, rows, 5) // 5] = 1  # element i marks key 5 i
    out, _ = kernels(zeros(1, rows, 1), random(1, rows, 1, 64), v, causal=True)
    seen = out[0, :, 0, : rows // 5] != 0
    assert np.array_equal(seen, np.arange(rows)[:, None] >= 5 * np.arange(rows // 5)[None, :])


@BOTH_STAGES
@pytest.mark.parametrize("causal", [False, True])
def test_l01_lse_is_natural(kernels: Kernels, variant: str, causal: bool) -> None:
    """L01: ln 256 = 5.545177, not log2 256 = 8; the manifest says so."""
    _, lse = kernels(zeros(1, 1, 1), random(1, 256, 1, 64), zeros(1, 256, 1), causal=causal, variant=variant)
    np.testing.assert_allclose(lse, 5.545177, atol=2e-4)
    assert kernels.bundle.manifest.lse_base == "e"


@BOTH_STAGES
@pytest.mark.parametrize("causal", [False, True])
def test_l02_no_keys(kernels: Kernels, variant: str, causal: bool) -> None:
    """L02, Z06: LSE -inf (not +inf), out 0, also over several tiles of one CTA."""
    none = zeros(2, 0, 1)
    out, lse = kernels(random(2, 130, 2, 64), none, none, causal=causal, variant=variant, sms=1)
    assert (out == 0).all() and (lse == -np.inf).all()


@BOTH_STAGES
@pytest.mark.parametrize(
    ("scale", "out0", "lse0"), [(None, 0.88080, 2.12693), (0.0, 0.5, 0.69315), (0.125, 0.88080, 2.12693)]
)
def test_s04_scales(kernels: Kernels, variant: str, scale: float | None, out0: float, lse0: float) -> None:
    """S04: logits 2 and 0 at the default scale; 0 is uniform and not the default, although masked keys are 0 x -inf."""
    q, k, v = zeros(1, 1, 1), zeros(1, 2, 1), zeros(1, 2, 1)
    q[..., 0], k[0, 0, 0, 0], v[0, 0] = 4, 4, 1
    out, lse = kernels(q, k, v, softmax_scale=scale, variant=variant)
    np.testing.assert_allclose(out, out0, atol=4e-3)
    np.testing.assert_allclose(lse, lse0, atol=2e-4)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 28])
def test_h01_decode_maps_heads_to_their_kv_head(kernels: Kernels, ratio: int) -> None:
    """H01: q head h reads KV head h // ratio."""
    v = np.broadcast_to(np.array([3, 5], np.float32)[None, None, :, None], (1, 70, 2, 64))
    out, lse = kernels(zeros(1, 1, 2 * ratio), random(1, 70, 2, 64), v, sms=4)
    assert (out[0, 0, :ratio] == 3).all() and (out[0, 0, ratio:] == 5).all()
    np.testing.assert_allclose(lse, math.log(70), atol=2e-4)


@pytest.mark.parametrize("ratio", [3, 7])
def test_h01_prefill_maps_heads_to_their_kv_head(kernels: Kernels, ratio: int) -> None:
    v = np.broadcast_to(np.array([3, 5], np.float32)[None, None, :, None], (1, 130, 2, 64))
    out, _ = kernels(zeros(1, 130, 2 * ratio), random(1, 130, 2, 64), v, causal=True, sms=3)
    assert (out[0, :, :ratio] == 3).all() and (out[0, :, ratio:] == 5).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128)])
def test_r11_any_grid_and_seed_gives_the_same_bits(kernels: Kernels, dims: tuple[int, int], causal: bool) -> None:
    """R11: one CTA that walks every tile, several, and one each; other schedules of warps and copies."""
    q, k, v = random(2, 150, 2, dims[0]), random(2, 170, 1, dims[0], seed=1), random(2, 170, 1, dims[1], seed=2)
    results = [kernels(q, k, v, "fp16", sms=sms, seed=seed, causal=causal) for seed, sms in enumerate((1, 3, 148))]
    for out, lse in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(lse, results[0][1])
    ref = reference(*(round_to(a, "fp16") for a in (q, k, v)), "fp16", causal=causal)
    assert check(*results[0], ref, "fp16") == []


def test_d02_results_do_not_depend_on_company(kernels: Kernels) -> None:
    """D02: the same sequence alone and inside a batch, bit for bit."""
    q, k = random(3, 140, 2, 64), random(3, 260, 1, 64, seed=1)
    whole, whole_lse = kernels(q, k, k, causal=True)
    for b in range(3):
        out, lse = kernels(q[b : b + 1], k[b : b + 1], k[b : b + 1], causal=True)
        assert np.array_equal(out[0], whole[b]) and np.array_equal(lse[0], whole_lse[b])
