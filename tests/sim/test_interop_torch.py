"""`fmha_gen.interop.torch` on compiled kernels: CPU tensors are the simulator's memory, at their own addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fmha_gen.runtime import Bundle
from fmha_gen.sim.driver import SimDriver

torch = pytest.importorskip("torch", reason="needs torch")
from fmha_gen.interop import torch as interop  # noqa: E402

pytestmark = [pytest.mark.sim, pytest.mark.compile]


class TorchMemory(Bundle):
    """A bundle that maps the storage of the tensors of a call into the simulator's memory first."""

    def attend(self, q: Any, k: Any, v: Any, out: Any, lse: Any, *more: Any) -> None:
        driver = self.driver
        assert isinstance(driver, SimDriver)
        driver.reset(driver.seed)
        storages = {}
        for name, t in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)):
            if t is not None:
                storages[t.untyped_storage().data_ptr()] = (name, t)  # out and lse last: they may be written
        for address, (name, t) in storages.items():
            data = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy()
            driver.memory.map(name, data, address, writable=name in ("out", "lse"))
        super().attend(q, k, v, out, lse, *more)


@pytest.fixture
def bundle(core_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bundle]:
    bundle = TorchMemory.open(core_bundle, SimDriver())
    monkeypatch.setattr(interop, "_bundle", bundle)
    yield bundle


def check(q: Any, k: Any, v: Any, out: Any, causal: bool) -> None:
    """Against torch in float32: what attention of these sizes rounds to bf16."""
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=4e-3)


def test_fused_qkv_compiled_and_sdpa(bundle: Bundle) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 130, 4 * 64).bfloat16()

    def block(x: Any) -> tuple[Any, Any]:
        q, k, v = (t.unflatten(2, (-1, 64)) for t in x.split([128, 64, 64], 2))
        return interop.flash_attn_func(q, k, v, causal=True, return_lse=True)

    q, k, v = (t.unflatten(2, (-1, 64)).transpose(1, 2) for t in x.split([128, 64, 64], 2))
    out, lse = block(x)
    check(q, k, v, out.transpose(1, 2), causal=True)
    s = (q.float() * 0.125) @ k.float().repeat_interleave(2, 1).mT
    s = s.masked_fill(~torch.ones(130, 130, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(lse, s.logsumexp(-1), rtol=1e-5, atol=2e-4)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for got, want in zip(compiled(x), (out, lse), strict=True):
            assert torch.equal(got, want)
    sdpa = interop.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(sdpa.transpose(1, 2), out), "the same kernel, the same bits"


def test_expanded_heads_and_no_keys(bundle: Bundle) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 3, 70, 128).bfloat16().unbind(0)
    k, v = (t[:, :1].expand(1, 3, 70, 128) for t in (k, v))
    check(q, k, v, interop.scaled_dot_product_attention(q, k, v), causal=False)
    out, lse = interop.flash_attn_func(q.transpose(1, 2), *(t.transpose(1, 2)[:, :0] for t in (k, v)), return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
