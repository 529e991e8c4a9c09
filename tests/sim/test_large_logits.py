"""Logits as large as docs/correctness.md allows: the rounding of the row's shift cancels, block by block."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fmha_gen.reference import UNIT_ROUNDOFF
from fmha_gen.run import RunOptions, run_arrays

pytestmark = [pytest.mark.sim, pytest.mark.compile]
Q, K, DIM, TILE_N, BLOCKS = 129.0, 131.0, 64, 128, 3  # exact in 16 bits; their product times a scale is not in 24
LOGIT = DIM * Q * K

LOGITS = (1.3 * 2.0**20, 1.9 * 2.0**26, 1.1 * 2.0**27, 1.7 * 2.0**27, 1.9 * 2.0**29, 1.3 * 2.0**30)  # log2 units
LIMITS = {"bf16": 2.0**31, "fp16": 2.0**28}


@pytest.mark.parametrize(
    ("dtype", "m"),
    [
        pytest.param(dtype, m, id=f"{dtype}-{m:.3g}")
        for dtype, limit in LIMITS.items()
        for m in (*LOGITS, math.nextafter(limit, 0))
        if m < limit
    ],
)
def test_equal_large_logits_weigh_every_block_alike(core_bundle: Path, dtype: str, m: float):
    """Values differ by block, so that a block whose weight is lost shows: the mean of 0, 1, 2 is 1."""
    q = np.full((1, 1, 1, DIM), Q, np.float32)
    k = np.full((1, BLOCKS * TILE_N, 1, DIM), K, np.float32)
    v = np.repeat(np.arange(BLOCKS, dtype=np.float32), TILE_N)[None, :, None, None] * np.ones_like(k)
    scale = m / LOGIT / math.log2(math.e)
    variant = f"fmha_fwd-sm100a-{dtype}-d64-full-q1"
    options = RunOptions(driver="sim", dtype=dtype, scale=scale, variant=variant)
    result = run_arrays(core_bundle, {"q": q, "k": k, "v": v}, options)
    u = UNIT_ROUNDOFF[dtype]
    assert np.abs(result.out - 1).max() <= u + (u + 2e-4) * 1
    assert result.lse is not None
    assert result.lse == pytest.approx(m * math.log(2) + math.log(BLOCKS * TILE_N), rel=1e-5)
