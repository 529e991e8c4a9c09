"""`fmha_gen.interop.torch` on CPU tensors: a driver computes from the packed arguments what a kernel would.

tests/sim/test_interop_torch.py runs compiled kernels behind the same functions, tests/device/test_interop.py a GPU.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fmha_gen.errors import DriverError, ProblemError, SelectionError
from fmha_gen.runtime import Bundle
from fmha_gen.runtime.cuda import CudaDriver
from tests.host_driver import HostDriver
from tests.launcher_fixtures import FakeCuda, make_record, write_bundle

torch = pytest.importorskip("torch", reason="needs torch")
from fmha_gen.interop import torch as interop  # noqa: E402
from fmha_gen.interop.torch import covers, flash_attn_func, scaled_dot_product_attention  # noqa: E402

OP = torch.ops.fmha_gen.fwd.default


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels = [
        make_record(dtype, dims, mask)
        for dtype in ("bf16", "fp16")
        for dims in ((64, 64), (192, 128))
        for mask in ("full", "causal")
    ]
    return write_bundle(tmp_path_factory.mktemp("bundle"), kernels)[0]


@pytest.fixture(autouse=True)
def driver(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """Every test starts with a fresh bundle in use."""
    driver = HostDriver()
    monkeypatch.setattr(interop, "_bundle", Bundle.open(path, driver))
    yield driver


def random(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape).to(dtype)


def make(b: int = 2, sq: int = 7, sk: int = 9, h: int = 4, hk: int = 2, d: int = 64, dv: int = 64, **how: Any) -> Any:
    torch.manual_seed(b + 10 * sq + 100 * sk)
    return random(b, sq, h, d, **how), random(b, sk, hk, d, **how), random(b, sk, hk, dv, **how)


def expected(q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None) -> tuple[Any, Any]:
    """(out, lse) by torch in float64, causal aligned bottom-right."""
    ratio = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~keep, -math.inf)
    out = torch.nan_to_num(s.softmax(-1)) @ v
    return out.transpose(1, 2), s.logsumexp(-1)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got.double(), want, rtol=2**-8 if got.dtype == torch.bfloat16 else 2**-10, atol=1e-6)


# ---- flash_attn_func


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (192, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func_gives_out_and_lse(dtype: Any, d: int, dv: int, causal: bool) -> None:
    q, k, v = make(d=d, dv=dv, dtype=dtype)
    want, want_lse = expected(q, k, v, causal)
    out = flash_attn_func(q, k, v, causal=causal)
    assert out.shape == (2, 7, 4, dv) and out.dtype == dtype
    close(out, want)
    for flag in ("return_lse", "return_attn_probs"):
        out, lse = flash_attn_func(q, k, v, causal=causal, **{flag: True})
        close(out, want)
        assert lse.dtype == torch.float32 and lse.shape == (2, 4, 7)
        close(lse, want_lse)


def test_softmax_scale_and_rows_without_keys() -> None:
    q, k, v = make(sq=9, sk=7)
    out, lse = flash_attn_func(q, k, v, causal=True, softmax_scale=0.25, return_lse=True)
    want, want_lse = expected(q, k, v, True, 0.25)
    close(out, want)
    close(lse, want_lse)
    assert (out[:, :2] == 0).all() and (lse[:, :, :2] == -math.inf).all()


def test_given_outputs_are_written_and_returned(driver: HostDriver) -> None:
    q, k, v = make()
    want, want_lse = expected(q, k, v)
    room = torch.full((2, 4, 10, 64), 777.0, dtype=torch.bfloat16)
    out = room[:, :, 1:8].transpose(1, 2)
    lse = torch.full((2, 7, 4), 777.0).transpose(1, 2)
    got = flash_attn_func(q, k, v, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    close(out, want)
    close(lse, want_lse)
    assert (room[:, :, 0] == 777).all() and (room[:, :, 8:] == 777).all()
    assert flash_attn_func(q, k, v, out=out) is out
    # neither a given tensor nor one that was made is copied
    addresses = [arg.address for arg in driver.launches[0].args[:4]]
    assert addresses == [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()]


@pytest.mark.parametrize(
    ("window", "causal", "mask"),
    [
        ((-1, -1), False, "full"), ((None, None), False, "full"), (None, False, "full"), ([-1, None], False, "full"),
        ((-7, -1), False, "full"), ((-1, 0), False, "causal"), ((None, 0), False, "causal"), ((-1, -1), True, "causal"),
        ((-1, 5), True, "causal"),
    ],
)  # fmt: skip
def test_either_spelling_of_an_unbounded_window(driver: HostDriver, window: Any, causal: bool, mask: str) -> None:
    flash_attn_func(*make(), window_size=window, causal=causal)
    assert f"-{mask}-" in driver.launches[0].kernel


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window_size": (128, 0)}, "window_size: (128, 0): bounded windows are not built yet"),
        ({"window_size": (-1, 3)}, "window_size: (-1, 3): bounded"),
        ({"window_size": (0, None), "causal": True}, "window_size: (0, None): bounded"),
        ({"window_size": 3}, "window_size: 3; it is a pair"),
        ({"window_size": (True, 1)}, "window_size: (True, 1); a bound is an int"),
        ({"softcap": 30.0}, "softcap: 30.0: not built yet"),
        ({"dropout_p": 0.1}, "dropout_p: 0.1: not built yet"),
        ({"num_splits": 4}, "num_splits: 4: not built yet"),
        ({"pack_gqa": True}, "pack_gqa: True: not built yet"),
        ({"sm_margin": 8}, "sm_margin: 8"),
        ({"attention_chunk": 64}, "attention_chunk: 64"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: tensor of shape (4,): not built yet"),
        ({"learnable_sink": torch.zeros(4)}, "learnable_sink: tensor of shape (4,)"),
        ({"s_aux": torch.zeros(4)}, "s_aux: tensor of shape (4,)"),
        ({"qv": torch.zeros(1)}, "qv: tensor"),
        ({"k_descale": torch.ones(2, 2)}, "k_descale: tensor of shape (2, 2)"),
        ({"causal": 1}, "causal: 1 is no bool"),
        ({"softmax_scale": torch.tensor(0.1)}, "softmax_scale: a tensor"),
        ({"softmax_scale": -0.1}, "softmax_scale: -0.1 is negative"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(driver: HostDriver, options: Any, words: str) -> None:
    with pytest.raises(ProblemError) as e:
        flash_attn_func(*make(), **options)
    assert str(e.value).startswith(words)
    assert not driver.launches


@pytest.mark.parametrize(
    "options", [{"softcap": None}, {"num_splits": 0}, {"pack_gqa": False}, {"deterministic": True}]
)
def test_values_that_switch_an_option_off_run(driver: HostDriver, options: Any) -> None:
    flash_attn_func(*make(), **options)
    assert len(driver.launches) == 1


def test_options_are_named_and_explicit() -> None:
    """Engines look for features by parameter name, and flash-attn's versions order parameters differently."""
    parameters = inspect.signature(flash_attn_func).parameters
    assert [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == ["q", "k", "v"]
    assert not [p for p in parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    ours = inspect.signature(scaled_dot_product_attention).parameters
    assert list(ours) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("call", [flash_attn_func, lambda q, k, v, out: OP(q, k, v, out, None)])
def test_a_tensor_that_requires_grad_is_refused_by_name(driver: HostDriver, name: str, call: Any) -> None:
    named = dict(zip(("q", "k", "v"), make(), strict=True))
    named["out"] = torch.empty_like(named["q"])
    named[name] = named[name].requires_grad_()
    with pytest.raises(ProblemError, match=f"^{name}: requires grad; .*no_grad"):
        call(**named)
    assert not driver.launches
    with torch.no_grad():
        flash_attn_func(**named)
    assert len(driver.launches) == 1


def test_wrong_tensors_are_refused_in_words() -> None:
    q, k, v = make()
    for bad, words in (
        ((q.float(), k.float(), v.float()), "dtype: q float32"),
        ((q, k[..., :32], v), "k: shape"),
        ((q[0], k, v), "q: shape .* wanted 4 axes"),
        ((q, k, v.mT), "v: shape"),
        ((q[..., ::2], k[..., ::2], v[..., ::2]), "q: stride of axis 3"),
        ((q.view(2, 7, 2, 128)[..., 1:65], k, v), "num_heads_q|aligned"),
    ):
        with pytest.raises(ProblemError, match=words):
            flash_attn_func(*bad)
    with pytest.raises(SelectionError, match="head_dim 32 is not built"):
        flash_attn_func(*(t[..., :32].contiguous() for t in (q, k, v)))


# ---- views run without a copy


def addresses_of(driver: HostDriver) -> list[int]:
    return [arg.address for arg in driver.launches[-1].args[:3]]


def test_t02_slices_of_a_fused_qkv_and_bhsd_views(driver: HostDriver) -> None:
    qkv = random(2, 9, 3, 4, 64)
    q, k, v = qkv.unbind(2)
    close(flash_attn_func(q, k, v), expected(q, k, v)[0])
    assert addresses_of(driver) == [t.data_ptr() for t in (q, k, v)]
    packed = random(2, 9, 8 * 64).split([256, 128, 128], 2)  # one projection, 4 q heads and 2 KV heads
    q, k, v = (t.unflatten(2, (-1, 64)) for t in packed)
    close(flash_attn_func(q, k, v, causal=True), expected(q, k, v, True)[0])
    assert addresses_of(driver) == [t.data_ptr() for t in (q, k, v)]
    q, k, v = (random(2, h, 9, 64).transpose(1, 2) for h in (4, 2, 2))
    out = flash_attn_func(q, k, v)
    close(out, expected(q, k, v)[0])
    assert addresses_of(driver) == [t.data_ptr() for t in (q, k, v)]


def test_expanded_k_and_v(driver: HostDriver) -> None:
    q, k, v = make(hk=1)
    many = [t.expand(2, 9, 4, 64) for t in (k, v)]
    close(flash_attn_func(q, *many), expected(q, k, v)[0])
    one = [t[:1].expand(2, 9, 1, 64) for t in (k, v)]
    close(flash_attn_func(q, *one), expected(q, *one)[0])
    assert addresses_of(driver)[1:] == [t.data_ptr() for t in (k, v)]


@pytest.mark.parametrize("odd", [0, 1, 7, 2**40])
def test_t04_axes_of_one_element_take_any_stride(odd: int) -> None:
    one = random(64).as_strided((1, 1, 1, 64), (odd, odd, odd, 1))
    out, lse = flash_attn_func(one, one, one, return_lse=True)
    assert torch.equal(out, one)
    close(lse, expected(one, one, one)[1])


def test_empty_problems(driver: HostDriver) -> None:
    q, k, v = make()
    assert flash_attn_func(q[:0], k[:0], v[:0]).shape == (0, 7, 4, 64)
    assert flash_attn_func(q[:, :0], k, v).shape == (2, 0, 4, 64)
    assert not driver.launches
    out, lse = flash_attn_func(q, k[:, :0], v[:, :0], return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


# ---- scaled_dot_product_attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_sdpa_agrees_with_torch(driver: HostDriver, causal: bool, scale: float | None) -> None:
    q, k, v = (t.transpose(1, 2) for t in make(sq=9, sk=9))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal, scale=scale, enable_gqa=True
    )
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()
    close(out, want)
    contiguous = [t.contiguous() for t in (q, k, v)]
    close(scaled_dot_product_attention(*contiguous, is_causal=causal, scale=scale, enable_gqa=True), want)
    assert addresses_of(driver) == [t.data_ptr() for t in contiguous]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": torch.ones(7, 9, dtype=torch.bool)}, "attn_mask: not built"),
        ({"dropout_p": 0.5}, "dropout_p: 0.5"),
        ({"is_causal": True}, "is_causal: seqlen_q 7, seqlen_k 9: torch aligns the causal mask top-left"),
        ({"is_causal": None}, "is_causal: None is no bool"),
        ({"enable_gqa": False}, "enable_gqa: False, with 4 query heads on 2 KV heads"),
        ({"scale": torch.tensor(1.0)}, "scale: a tensor"),
    ],
)
def test_sdpa_refuses_by_name(driver: HostDriver, options: Any, words: str) -> None:
    q, k, v = (t.transpose(1, 2) for t in make())
    with pytest.raises(ProblemError) as e:
        scaled_dot_product_attention(q, k, v, **{"enable_gqa": True} | options)
    assert str(e.value).startswith(words)
    with pytest.raises(ProblemError, match="query: shape .* has 3 axes"):
        scaled_dot_product_attention(q[0], k[0], v[0], enable_gqa=True)
    assert not driver.launches


# ---- covers


def test_covers_says_why_not_and_launches_nothing(driver: HostDriver) -> None:
    q, k, v = make()
    assert covers(q, k, v) == [] and covers(q, k, v, causal=True, return_lse=True) == []
    assert covers(*(t[..., :32].contiguous() for t in (q, k, v))) == [
        "head_dim (64, 64), wanted (32, 32)", "head_dim (192, 128), wanted (32, 32)"
    ]  # fmt: skip
    (why,) = covers(q, k, v, window_size=(5, 0))
    assert why.startswith("window_size")
    (why,) = covers(q.float(), k, v)
    assert why.startswith("dtype: q float32")
    (why,) = covers(q.clone().requires_grad_(), k, v)
    assert why.startswith("q: requires grad")
    (why,) = covers(q[0], k, v)
    assert why.startswith("q: shape")
    assert not driver.launches and not driver.loads


# ---- the bundle in use


def test_no_bundle_is_an_error_that_says_how_to_name_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "_bundle", None)
    monkeypatch.delenv("FMHA_GEN_BUNDLE", raising=False)
    with pytest.raises(ProblemError, match=r"bundle: none in use; call .*use_bundle\(PATH\) or set FMHA_GEN_BUNDLE"):
        flash_attn_func(*make())
    monkeypatch.setenv("FMHA_GEN_BUNDLE", str(path))
    assert interop.current_bundle().path == path and interop.current_bundle() is interop.current_bundle()
    other = interop.use_bundle(path)
    assert interop.current_bundle() is other and interop.use_bundle(other) is other


def test_cpu_tensors_on_a_gpu_bundle_are_refused_in_words(path: Path) -> None:
    api = FakeCuda()
    interop.use_bundle(Bundle.open(path, CudaDriver(api)))
    for call in (flash_attn_func, lambda q, k, v: OP(q, k, v, torch.empty_like(q), None)):
        with pytest.raises(ProblemError, match="q: host memory; a CUDA launch needs device memory"):
            call(*make())
    assert not api.launches


def test_a_machine_without_a_driver_says_so(path: Path) -> None:
    class NoLibrary(FakeCuda):
        def cuInit(self, flags: int) -> Any:
            raise OSError("libcuda.so.1: cannot open shared object file")

    interop.use_bundle(Bundle.open(path, CudaDriver(NoLibrary())))
    with pytest.raises(DriverError, match="no NVIDIA driver"):
        interop.current_bundle().preload()


def test_threads_share_a_bundle() -> None:
    failures: list[BaseException] = []

    def work(sq: int) -> None:
        try:
            q, k, v = make(sq=sq)
            for _ in range(3):
                close(flash_attn_func(q, k, v), expected(q, k, v)[0])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(sq,)) for sq in (3, 4, 5, 4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


# ---- the operator under torch's machinery


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(lse: bool, causal: bool) -> None:
    q, k, v = make()
    args = (q, k, v, torch.empty_like(q), torch.empty(2, 4, 7) if lse else None, 0.2, causal)
    results = torch.library.opcheck(OP, args)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4, results


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(driver: HostDriver, backend: str, dynamic: bool) -> None:
    def block(x: Any, y: Any) -> Any:
        q, k, v = (x * 2).unflatten(2, (4, 64)), y.unflatten(2, (4, 64)), (y + 1).unflatten(2, (4, 64))
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, window_size=(-1, -1))
        room = torch.zeros(x.shape[0], x.shape[1], 8, 64, dtype=x.dtype)
        flash_attn_func(q, k, v, out=room[:, :, :4])
        third = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out + room[:, :, :4] + third.transpose(1, 2), lse

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
    for length in (5, 6):
        x, y = random(2, length, 256), random(2, length, 256)
        with torch.no_grad():
            for got, want in zip(compiled(x, y), block(x, y), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(driver.launches) == 12


def test_compiled_code_refuses_tensors_that_require_grad() -> None:
    torch._dynamo.reset()
    q, k, v = make()
    compiled = torch.compile(lambda q: flash_attn_func(q * 1, k, v), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="requires grad; these kernels compute the forward pass only"):
        compiled(q.requires_grad_())


def test_export_keeps_the_operator() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return flash_attn_func(q, k, v, causal=True)

    q, k, v = make()
    program = torch.export.export(Module(), (q, k, v))
    assert "fmha_gen" in str(program.graph)
    torch.testing.assert_close(program.module()(q, k, v), flash_attn_func(q, k, v, causal=True), rtol=0, atol=0)


def test_modes_and_subclasses_go_through_the_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = make()
    with Watch():
        out = flash_attn_func(q, k, v)
    assert "fmha_gen.fwd.default" in seen
    close(out, expected(q, k, v)[0])
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
    assert flash_attn_func(*fakes).shape == q.shape


def test_meta_tensors_give_shapes(driver: HostDriver) -> None:
    q, k, v = (t.to("meta") for t in make(d=192, dv=128))
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert out.is_meta and out.shape == (2, 7, 4, 128) and lse.shape == (2, 4, 7) and not driver.launches


def test_importing_the_package_imports_no_torch_and_its_absence_is_said() -> None:
    code = "import sys, fmha_gen.interop; assert 'torch' not in sys.modules; sys.modules['torch'] = None\n"
    code += "import fmha_gen.interop.torch"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 1 and "fmha_gen.interop.torch needs PyTorch" in out.stderr and "pip install" in out.stderr
