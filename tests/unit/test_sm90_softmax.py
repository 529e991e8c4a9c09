"""Softmax functions of rendered sm_90a kernels that compute S again, run on float32 lanes in numpy, against float64.

The functions are the rendered source's own; what they call of the DSL and of `fmha_gen.device` is stood in for, one
array of 32 lanes a value. A warp has 8 x 2 rows, each shared by four lanes.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace

import numpy as np
import pytest

from fmha_gen.plan import make_plan
from fmha_gen.render import render
from fmha_gen.spec import KernelSpec

FUNCTIONS = {"exact_rows", "quick_rows", "settle_rows", "scaled_block", "exact_block", "lower_shift"}
F32 = np.float32


class _Float32:
    inf = F32(np.inf)

    def __new__(cls, x):
        return F32(x)


def over_quad(op, value):
    return op.reduce(value.reshape(8, 4), axis=1).repeat(4).astype(F32)


class Softmax:
    """A warp's walk over blocks of S, (16 rows, keys) in log2 units. O is the sum of P: V is 1."""

    def __init__(self, threshold: float) -> None:
        spec = KernelSpec("fmha_fwd", "sm_90a", "bf16", 96, 96, "full", rescale_threshold=threshold, source="s.yaml:1")
        plan = make_plan(spec)
        assert plan.wgmma is not None and plan.wgmma.recompute_s and plan.spec.tile_n
        self.tile_n, self.times_again = plan.spec.tile_n, 0
        body = [f for f in ast.parse(render(plan).text).body if getattr(f, "name", None) in FUNCTIONS]
        assert {f.name for f in body} == FUNCTIONS  # type: ignore[attr-defined]
        self.functions: dict = {**self.stand_ins(), "MAX_SUM": 2.0**threshold, "MAX_SCALED": 2.0**100}
        exec(compile(ast.Module(body, []), "kernel.py", "exec"), self.functions)
        self.shift, self.sums = [np.full(32, 3e38, F32)] * 2, [np.zeros(32, F32)] * 2
        self.o, self.largest_p = [np.zeros(32, F32)] * 2, F32(0)

    def stand_ins(self) -> dict:
        arch = SimpleNamespace(
            fmax=lambda a, b: np.fmax(a, b).astype(F32), exp2=lambda x: self.flush(np.exp2(x).astype(F32))
        )
        fragment = SimpleNamespace(
            row=lambda acc, r: [acc[4 * j + 2 * r + e] for j in range(len(acc) // 4) for e in range(2)],
            exponentials=lambda values, scale, shift: [
                arch.exp2((x.astype(float) * scale + shift).astype(F32)) for x in values
            ],
            total=lambda values: np.sum(np.array(values), axis=0, dtype=F32),
            quad_max=lambda value: over_quad(np.fmax, value),
            row_maxima=lambda rows: [over_quad(np.fmax, np.fmax.reduce(np.array(r))) for r in rows],
        )
        return {
            "cutlass": SimpleNamespace(range_constexpr=range, select_=lambda c, a, b: np.where(c, a, b).astype(F32)),
            "cute": SimpleNamespace(jit=lambda f: f, arch=arch),
            "fragment": fragment,
            "softmax": SimpleNamespace(log2=lambda x: np.log2(x).astype(F32)),
            "ptx": SimpleNamespace(any_above=lambda a, b, limit: bool((~(a <= limit) | ~(b <= limit)).any())),
            "Float32": _Float32,
            "s_again": self.again,
        }

    @staticmethod
    def flush(x):
        return np.where(np.abs(x) < 2.0**-126, F32(0), x)

    def again(self, *_):
        self.times_again += 1
        return self.s

    def block(self, s) -> None:
        """s: (16, tile_n)."""
        lane = np.arange(32)
        columns = [8 * j + 2 * (lane % 4) + e for j in range(self.tile_n // 8) for e in range(2)]
        rows = [[s[lane // 4 + 8 * r, c].astype(F32) for c in columns] for r in range(2)]
        self.s = [rows[r][2 * j + e] for j in range(self.tile_n // 8) for r in range(2) for e in range(2)]
        problem = SimpleNamespace(softmax_scale_log2=F32(1))
        first = self.shift[0][0] == F32(3e38) and not self.sums[0].any()
        if first:
            p, self.shift, self.sums, factors = self.functions["exact_rows"](self.s, self.shift, self.sums, problem)
        else:
            quick = self.functions["quick_rows"]
            p, self.shift, self.sums, factors, _ = quick(self.s, self.shift, self.sums, None, None, None, problem)
        self.o = [(self.o[r] * factors[r] + np.sum(np.array(p[r]), axis=0)).astype(F32) for r in range(2)]
        self.largest_p = np.fmax(self.largest_p, np.nanmax(np.array(p)))

    def finish(self):
        """(O of a V of ones, LSE in log2 units) of the 16 rows."""
        total = [over_quad(np.add, x) for x in self.sums]
        o = [over_quad(np.add, self.o[r]) / total[r] for r in range(2)]
        lse = [np.log2(total[r]) - self.shift[r] for r in range(2)]
        return np.concatenate([x[::4] for x in o]), np.concatenate([x[::4] for x in lse])


def walk(threshold, blocks):
    """Runs the blocks of (16, tile_n) S and compares with float64, rows with a NaN with NaN."""
    kernel = Softmax(threshold)
    with np.errstate(all="ignore"):
        for s in blocks:
            kernel.block(s)
        o, lse = kernel.finish()
        s = np.concatenate(blocks, axis=1).astype(float)
        top = s.max(axis=1)
        want = top + np.log2(np.exp2(s - top[:, None]).sum(axis=1))
    np.testing.assert_allclose(lse, want, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(o, np.where(np.isnan(want), np.nan, 1.0), rtol=1e-5)
    return kernel


def random_blocks(count, spread=2.0):
    rng = np.random.default_rng(0)
    return [rng.normal(0, spread, (16, 128)) for _ in range(count)]


@pytest.mark.parametrize("threshold", [0.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("slope", [-4.0, -2.5, -0.9, 0.0, 0.9, 7.0])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_rows_that_rise_or_fall_all_the_way(threshold, slope, spread):
    """Also alike elements, whose sum is above a low threshold while the largest falls: no reason to move a shift."""
    blocks = [s + slope * i for i, s in enumerate(random_blocks(160, spread))]
    kernel = walk(threshold, blocks)
    assert kernel.times_again == 0
    assert kernel.largest_p <= max(2.0**threshold, 1.0) * (1 + 2**-20)


@pytest.mark.parametrize("jump", [9.0, 60.0, 85.0, 115.0, 127.0, 129.0, 300.0, 1e5])
def test_jumps_of_some_rows_beside_others_that_stay(jump):
    blocks = random_blocks(6)
    for row in range(0, 16, 3):
        blocks[2][row, 5 * row] += jump
        blocks[4][row, 77] += 2 * jump if row % 2 else 0
    kernel = walk(8.0, blocks)
    assert (kernel.times_again > 0) == (jump > 100)
    assert kernel.largest_p <= 2.0**8


def test_hidden_keys_nan_and_infinity_beside_normal_rows():
    blocks = random_blocks(5)
    blocks[0][3, 10:] = blocks[2][4] = -np.inf
    blocks[1][7, 33] = blocks[3][12] = np.nan
    kernel = walk(8.0, blocks)
    assert kernel.times_again == 0  # NaN is no overflow
    blocks[3][9, 64] = np.inf
    with np.errstate(all="ignore"):
        kernel = Softmax(8.0)
        for s in blocks:
            kernel.block(s)
        o, _ = kernel.finish()
    assert set(np.flatnonzero(np.isnan(o))) == {7, 9, 12} and np.allclose(o[~np.isnan(o)], 1)
