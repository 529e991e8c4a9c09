"""The torch reference of the device tests against the numpy one."""

from __future__ import annotations

import numpy as np
import pytest

from fmha_gen.reference import reference as numpy_reference

torch = pytest.importorskip("torch", reason="needs torch")
from tests.device import torch_reference  # noqa: E402 (it needs torch)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("sq", "sk", "scale"), [(1, 1, None), (70, 33, 0.0), (33, 70, 0.4), (5, 0, None), (65, 64, None)]
)
def test_both_references_agree(
    causal: bool, sq: int, sk: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_reference, "MAX_LOGITS", 6 * 70 * 20)  # several chunks of rows
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, s, h, d).to(torch.bfloat16) for s, h, d in ((sq, 6, 64), (sk, 2, 64), (sk, 2, 32)))
    got = torch_reference.reference(q, k, v, scale, causal)
    as_numpy = [t.float().numpy() for t in (q, k, v)]
    want = numpy_reference(*as_numpy, "bf16", softmax_scale=scale, causal=causal)
    np.testing.assert_allclose(got.out, want.out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(got.abs_pv, want.abs_pv, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(got.small_pv, want.small_pv, rtol=1e-12, atol=1e-20)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-12, atol=1e-13)
    assert got.rms == pytest.approx(want.rms, rel=0.05, abs=1e-9)
    lse = torch.from_numpy(got.lse).float()
    assert torch_reference.problems(torch.from_numpy(got.out).to(torch.bfloat16), lse, got) == []
    if sk:
        assert torch_reference.problems(torch.from_numpy(got.out * 1.1 + 0.1).to(torch.bfloat16), lse, got)
