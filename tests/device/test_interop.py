"""Framework tensors on a real GPU, through kernels of a bundle that FMHA_GEN_BUNDLE names.

Results are compared with attention in float64.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from fmha_gen.errors import FmhaGenError, ProblemError
from fmha_gen.runtime import Bundle
from fmha_gen.runtime.select import runs_on

torch = pytest.importorskip("torch", reason="needs torch")
from fmha_gen.interop import torch as interop  # noqa: E402
from fmha_gen.interop.torch import flash_attn_func, scaled_dot_product_attention  # noqa: E402

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    given = os.environ.get("FMHA_GEN_BUNDLE")
    if not given:
        pytest.skip("FMHA_GEN_BUNDLE names no bundle")
    opened = Bundle.open(given)
    try:
        device = opened.driver.device(0)
    except FmhaGenError as e:
        pytest.skip(f"needs a GPU: {e}")
    if not any(runs_on(e, device) for e in opened.kernels):
        pytest.skip(f"{given} holds no kernel for {device.describe()}")
    return interop.use_bundle(opened)


@pytest.fixture(params=["bf16-128x128", "fp16-128x128", "bf16-64x64", "bf16-192x128", "bf16-256x256"])
def kind(request: pytest.FixtureRequest, bundle: Bundle) -> tuple[Any, int, int]:
    """(dtype, head_dim_qk, head_dim_v) of kernels that the bundle holds."""
    name, dims = request.param.split("-")
    d, dv = (int(n) for n in dims.split("x"))
    device = bundle.driver.device(0)
    served = {(e.serves.dtype, e.serves.head_dim_qk, e.serves.head_dim_v) for e in bundle.kernels if runs_on(e, device)}
    if (name, d, dv) not in served:
        pytest.skip(f"the bundle holds no {request.param} kernel")
    return (torch.bfloat16 if name == "bf16" else torch.float16), d, dv


def random(kind: tuple[Any, int, int], b: int, sq: int, sk: int, h: int, hk: int) -> tuple[Any, Any, Any]:
    dtype, d, dv = kind
    return tuple(
        torch.randn(shape, device="cuda").to(dtype) for shape in ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))
    )  # type: ignore[return-value]


def expected(q: Any, k: Any, v: Any, causal: bool = False) -> tuple[Any, Any]:
    ratio = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        keep = torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda").tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~keep, -torch.inf)
    p = torch.nan_to_num(s.softmax(-1))
    return (p @ v).transpose(1, 2), s.logsumexp(-1), (p @ v.abs()).transpose(1, 2)  # type: ignore[return-value]


def close(got: Any, want: tuple[Any, Any, Any]) -> None:
    """The project's tolerance: u * |o| + (u + 2e-4) * sum(p * |v|)."""
    out, _, scale = want  # type: ignore[misc]
    u = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-11
    assert ((got.double() - out).abs() <= u * out.abs() + (u + 2e-4) * scale).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (77, 200), (300, 129), (513, 513)])
def test_flash_attn_func(kind: Any, causal: bool, sq: int, sk: int) -> None:
    q, k, v = random(kind, 2, sq, sk, 6, 2)
    want = expected(q, k, v, causal)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    close(out, want)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-5, atol=2e-4)
    assert torch.equal(flash_attn_func(q, k, v, causal=causal), out), "the same call, the same bits"


def test_views_run_without_a_copy(kind: Any) -> None:
    dtype, d, dv = kind
    fused = torch.randn(2, 150, 3 * (2 * d + dv), device="cuda").to(dtype)
    q, k, v = (
        t.unflatten(2, (3, -1)) for t in (fused[..., : 3 * d], fused[..., 3 * d : 6 * d], fused[..., 6 * d :])
    )  # fmt: skip
    room = torch.full((2, 3, 160, dv), 777.0, device="cuda").to(dtype)
    out = room[:, :, :150].transpose(1, 2)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    flash_attn_func(q, k, v, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "a call with out given allocates nothing"
    close(out, expected(q, k, v))
    assert (room[:, :, 150:] == 777).all()
    q, k, v = random(kind, 2, 70, 90, 4, 1)
    many = [t.expand(2, 90, 4, -1) for t in (k, v)]
    close(flash_attn_func(q, *many), expected(q, k, v))
    one = torch.randn(max(d, dv), device="cuda").to(dtype)
    q, v = (one.as_strided((1, 1, 1, n), (7, 0, 2**40, 1)) for n in (d, dv))
    assert torch.equal(flash_attn_func(q, q, v), v)


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa(kind: Any, causal: bool) -> None:
    q, k, v = random(kind, 2, 200, 200, 4, 2)
    views = [t.transpose(1, 2) for t in (q, k, v)]
    out = scaled_dot_product_attention(*views, is_causal=causal, enable_gqa=True)
    close(out.transpose(1, 2), expected(q, k, v, causal))
    dense = [t.contiguous() for t in views]
    assert torch.equal(scaled_dot_product_attention(*dense, is_causal=causal, enable_gqa=True), out)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole_and_as_a_graph(kind: Any, backend: str) -> None:
    def block(q: Any, k: Any, v: Any) -> Any:
        return flash_attn_func(q * 1, k, v, causal=True, window_size=(-1, -1)) + 1

    q, k, v = random(kind, 2, 150, 150, 4, 4)
    want = block(q, k, v)
    for mode in (None, "reduce-overhead") if backend == "inductor" else (None,):
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, backend=backend, mode=mode)
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(compiled(q, k, v), want)


def test_opcheck(kind: Any) -> None:
    q, k, v = random(kind, 1, 130, 130, 2, 2)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    results = torch.library.opcheck(torch.ops.fmha_gen.fwd.default, (q, k, v, out, None, 0.1, True))
    assert set(results.values()) == {"SUCCESS"}


def test_side_streams_and_capture(kind: Any) -> None:
    q, k, v = random(kind, 2, 150, 150, 4, 4)
    want = flash_attn_func(q, k, v)
    source, q = q, torch.zeros_like(q)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        q.copy_(source)
        out = flash_attn_func(q, k, v)
    side.synchronize()
    assert torch.equal(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_func(q, k, v)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, want)


def test_a_tensor_on_the_host_is_refused(kind: Any) -> None:
    q, k, v = random(kind, 1, 5, 5, 1, 1)
    with pytest.raises(ProblemError, match="device: .*k on host|device: q on cuda:0"):
        flash_attn_func(q, k.cpu(), v)
    with pytest.raises(ProblemError, match="q: host memory"):
        flash_attn_func(q.cpu(), k.cpu(), v.cpu())


def numbers(array: Any) -> Any:
    """A torch view of another framework's device array."""
    return torch.from_dlpack(array)


def test_arrays_of_cupy(kind: Any, bundle: Bundle) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if kind[0] is not torch.float16:
        pytest.skip("CuPy has no bf16")
    q, k, v = random(kind, 2, 70, 90, 4, 2)
    arrays = [cupy.from_dlpack(t) for t in (q, k, v)]
    out = cupy.full((*q.shape[:3], v.shape[3]), 777, cupy.float16)
    lse = cupy.full((2, 4, 70), 777, cupy.float32)
    stream = cupy.cuda.Stream()
    cupy.cuda.Device().synchronize()
    bundle.attention(*arrays, out, lse=lse, stream=stream.ptr)
    stream.synchronize()
    want = expected(q, k, v)
    close(numbers(out), want)
    torch.testing.assert_close(numbers(lse).double(), want[1], rtol=1e-5, atol=2e-4)


def test_arrays_of_jax(kind: Any, bundle: Bundle) -> None:
    """JAX arrays are read; JAX does not let its own arrays be written, so that the output is torch's."""
    pytest.importorskip("jax", reason="JAX is not installed")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = importlib.import_module("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    jnp = jax.numpy
    dtype = jnp.bfloat16 if kind[0] is torch.bfloat16 else jnp.float16
    shapes = ((2, 70, 4, kind[1]), (2, 90, 2, kind[1]), (2, 90, 2, kind[2]))
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]
    jax.block_until_ready(arrays)
    out = torch.empty(2, 70, 4, kind[2], device="cuda", dtype=kind[0])
    bundle.attention(*arrays, out, stream=0)
    torch.cuda.synchronize()
    close(out, expected(*(numbers(a) for a in arrays)))
