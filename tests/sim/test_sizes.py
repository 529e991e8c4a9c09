"""Problems whose tensors pass 2^31 elements or bytes, at their real extents, strides and addresses.

Simulated memory is sparse: only the batch entries that the chosen CTAs touch are mapped, so that an offset which wraps
at 32 bits lands outside and is a finding, not a wrong number that a tolerance might let through. Case ids: public
reports.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fmha_gen.errors import SimError
from fmha_gen.reference import check, from_bits, reference, to_bits
from fmha_gen.runtime import Bundle, TensorArg
from fmha_gen.sim.driver import SimDriver
from tests.edited_bundle import one_kernel

pytestmark = [pytest.mark.sim, pytest.mark.compile]
BATCH, ROWS, HEADS = 1600, 16, 729
LSE_STRIDES = (HEADS * ROWS * 128, ROWS * 128, 128)  # LSE as one column of a padded buffer: 2,388,787,200 elements
BASES = {"q": 1 << 40, "k": 2 << 40, "v": 3 << 40, "out": 4 << 40, "lse": 5 << 40}
TILES = [(0, 0), (0, HEADS - 1), (899, 364), (BATCH - 1, 0), (BATCH - 1, HEADS - 1)]  # (batch entry, head)


def place(driver: SimDriver, name: str, dim: int, entries: list[int], dtype: str) -> tuple[TensorArg, dict]:
    """A BSHD tensor of the whole problem, of which only `entries` exist: (what the launcher sees, entry -> bits)."""
    stride = ROWS * HEADS * dim
    parts = {}
    for b in entries:
        values = np.random.default_rng([b, ord(name[0])]).standard_normal((ROWS, HEADS, dim), np.float32)
        parts[b] = to_bits(values, dtype)
        driver.place(f"{name} {b}", parts[b], dtype, BASES[name] + 2 * stride * b)
    return TensorArg(BASES[name], (BATCH, ROWS, HEADS, dim), (stride, HEADS * dim, dim, 1), dtype, -1), parts


def run_big(bundle: Path, dim: int, causal: bool, stages: int) -> None:
    """One launch over the whole problem, of which the CTAs of `TILES` run; checks what they wrote, and nothing else."""
    dtype, entries = "bf16", sorted({b for b, _ in TILES})
    # One tile per head and batch entry, in this order under either schedule: CTA = entry * HEADS + head.
    driver = SimDriver(ctas=[b * HEADS + h for b, h in TILES])
    (q_t, q), (k_t, k), (v_t, v), (out_t, out) = (place(driver, n, dim, entries, dtype) for n in ("q", "k", "v", "out"))
    lse = {b: np.full((HEADS, ROWS, 128), 777, np.float32) for b in entries}
    for b, part in lse.items():
        driver.place(f"lse {b}", part, address=BASES["lse"] + 4 * LSE_STRIDES[0] * b)
    lse_t = TensorArg(BASES["lse"], (BATCH, HEADS, ROWS), LSE_STRIDES, "float32", -1)
    before = {b: a.copy() for b, a in out.items()}
    Bundle.open(bundle, driver).attention(
        q_t, k_t, v_t, out_t, lse=lse_t, causal=causal, variant=f"*-q{stages}-*", num_sms=BATCH * HEADS
    )
    for b, h in TILES:
        one = [from_bits(t[b][None, :, h : h + 1], dtype) for t in (q, k, v)]
        ref = reference(*one, dtype, softmax_scale=1 / math.sqrt(dim), causal=causal)
        assert check(from_bits(out[b][None, :, h : h + 1], dtype), lse[b][None, h : h + 1, :, 0], ref, dtype) == []
        out[b][:, h] = before[b][:, h]
        lse[b][h, :, 0] = 777
    for b in entries:
        assert np.array_equal(out[b], before[b]) and (lse[b] == 777).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("stages", [1, 2])
def test_t09_tensors_beyond_2_to_the_31(core_bundle: Path, dim: int, causal: bool, stages: int) -> None:
    """T09: B 1600, S 16, H 729: 2.39e9 bytes at D 64, 2.39e9 elements at D 128, and an LSE of 2.39e9 elements."""
    assert 2 * BATCH * ROWS * HEADS * 64 > 2**31 and BATCH * ROWS * HEADS * 128 > 2**31
    assert (BATCH - 1) * LSE_STRIDES[0] > 2**31
    run_big(core_bundle, dim, causal, stages)


def test_t09_an_offset_cut_to_32_bits_is_caught(core_bundle: Path, tmp_path: Path) -> None:
    """The same on a kernel whose LSE offsets are sign-extended from 32 bits, which small problems do not notice."""
    cut = (r"(mad\.lo\.s64 \t(%rd\d+), [^;]*;)", r"\1\n\tshl.b64 \2, \2, 32;\n\tshr.s64 \2, \2, 32;")
    root = one_kernel(core_bundle, tmp_path / "bundle", "fmha_fwd-sm100a-bf16-d64-full-q1", cut)
    with pytest.raises(SimError, match="global"):
        run_big(root, 64, False, 1)
