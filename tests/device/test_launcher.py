"""The launcher on a real GPU, with a kernel that shows whether every argument arrived (see probe_kernel.py).

FMHA_GEN_PROBE_BUNDLE names a bundle that was built elsewhere, for machines without the compiler. Case ids refer to
public reports.
"""

from __future__ import annotations

import gc
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fmha_gen.errors import DriverError, FmhaGenError, SelectionError
from fmha_gen.runtime import Bundle
from fmha_gen.runtime.cuda import CudaDriver
from fmha_gen.runtime.driver import ARCH_CAPABILITY

torch = pytest.importorskip("torch", reason="needs torch to make and compare tensors")
pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    try:
        device = CudaDriver().device(0)
    except FmhaGenError as e:
        pytest.skip(f"needs a GPU: {e}")
    given = os.environ.get("FMHA_GEN_PROBE_BUNDLE")
    if given:
        return Bundle.open(given)
    arch = next((a for a, cc in ARCH_CAPABILITY.items() if cc == device.compute_capability), None)
    if arch is None:
        pytest.skip(f"no architecture of fmha-gen runs on {device.describe()}")
    from tests.device.probe_bundle import build

    return Bundle.open(build(tmp_path_factory.mktemp("probe"), arch))


def random(*shape: int) -> Any:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def expected(q: Any, k: Any, v: Any) -> Any:
    ratio = q.shape[2] // k.shape[2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    rows = min(q.shape[1], k.shape[1])
    for h in range(q.shape[2]):
        if h % 3 == 0:
            out[:, :, h] = q[:, :, h]
        else:
            out[:, :rows, h] = (k if h % 3 == 1 else v)[:, :rows, h // ratio]
    return out


def expected_lse(q: Any, k: Any, scale: float) -> Any:
    """One rounding, as the kernel's fused multiply-add has."""
    rows = torch.arange(q.shape[1], device="cuda", dtype=torch.float64)
    scale_log2 = torch.tensor(scale * math.log2(math.e), dtype=torch.float32, device="cuda").double()
    return (rows * scale_log2 + k.shape[1]).float().expand(q.shape[0], q.shape[2], -1)


def check(bundle: Bundle, q: Any, k: Any, v: Any, out: Any, **options: Any) -> None:
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device="cuda")
    bundle.attention(q, k, v, out, lse=lse, softmax_scale=0.5, **options)
    torch.cuda.synchronize()
    assert torch.equal(out, expected(q, k, v))
    assert torch.equal(lse, expected_lse(q, k, 0.5))


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (127, 300), (128, 128), (129, 64), (300, 511)])
@pytest.mark.parametrize(("heads", "heads_kv"), [(6, 6), (6, 2), (6, 1), (7, 1)])
def test_every_argument_arrives(bundle: Bundle, sq: int, sk: int, heads: int, heads_kv: int) -> None:
    q, k, v = random(3, sq, heads, 128), random(3, sk, heads_kv, 128), random(3, sk, heads_kv, 128)
    check(bundle, q, k, v, torch.full_like(q, 777))


@pytest.mark.parametrize("num_sms", [1, 7, 148, 1000])
def test_r11_any_grid_gives_the_same(bundle: Bundle, num_sms: int) -> None:
    q, k, v = random(2, 300, 6, 128), random(2, 300, 2, 128), random(2, 300, 2, 128)
    check(bundle, q, k, v, torch.full_like(q, 777), num_sms=num_sms)


def test_t02_t04_strides_as_frameworks_give_them(bundle: Bundle) -> None:
    """Fused QKV slices, transposed views, every second row, expanded heads, size-1 axes; canaries around out."""
    qkv = random(2, 300, 3 * 6, 128)
    room = torch.full((2, 6, 300, 256), 777.0, device="cuda", dtype=torch.bfloat16)
    out = room[..., :128].transpose(1, 2)
    check(bundle, qkv[:, :, :6], qkv[:, :, 6:12], qkv[:, :, 12:], out)
    assert (room[..., 128:] == 777).all(), "memory beside out was written"
    k = random(2, 600, 2, 128)[:, ::2]
    v = random(2, 2, 300, 128).transpose(1, 2)
    q = random(2, 300, 6, 128)
    check(bundle, q, k, v, torch.full_like(q, 777))
    check(bundle, q, k[:, :, :1].expand(-1, -1, 6, -1), v[:, :, :1].expand(-1, -1, 6, -1), torch.full_like(q, 777))
    one = random(128).as_strided((1, 1, 1, 128), (7, 0, 2**40, 1))
    check(bundle, one, one, one, torch.full((1, 1, 1, 128), 777, device="cuda", dtype=torch.bfloat16))


def test_z06_no_keys(bundle: Bundle) -> None:
    """Null pointers and a zero extent; head 0 of the probe reads q only, as a kernel without keys does."""
    q, none = random(2, 5, 1, 128), random(2, 0, 1, 128)
    assert none.data_ptr() == 0
    check(bundle, q, none, none, torch.full_like(q, 777))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_z05_no_queries(bundle: Bundle, shape: tuple[int, int]) -> None:
    q, k = random(*shape, 6, 128), random(shape[0], 9, 2, 128)
    bundle.attention(q, k, k, torch.empty_like(q))
    torch.cuda.synchronize()


def test_t10_strides_beyond_32_bits(bundle: Bundle) -> None:
    stride = 2**31 + 64
    big = torch.empty(stride + 300 * 256, device="cuda", dtype=torch.bfloat16)
    k = big.as_strided((2, 300, 2, 128), (stride, 256, 128, 1))
    k.copy_(random(2, 300, 2, 128))
    q = random(2, 300, 6, 128)
    check(bundle, q, k, k, torch.full_like(q, 777))
    out = big.as_strided((2, 300, 2, 128), (stride, 256, 128, 1))
    check(bundle, q[:, :, :2], random(2, 300, 2, 128), random(2, 300, 2, 128), out)


def test_r01_runs_in_order_on_a_side_stream(bundle: Bundle) -> None:
    q, k = random(2, 300, 6, 128), random(2, 300, 2, 128)
    source, out = q.clone(), torch.full_like(q, 777)
    q.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        q.copy_(source)  # the producer, behind a spinning kernel
        bundle.attention(q, k, k, out)  # torch's current stream
        seen = out.clone()  # the consumer
    stream.synchronize()
    assert torch.equal(seen, expected(source, k, k))


def test_r01_r07_graph_capture(bundle: Bundle) -> None:
    """A captured launch replays on new data; dropping another bundle during capture does no harm."""
    q, k, out = random(2, 300, 6, 128), random(2, 300, 2, 128), torch.full((2, 300, 6, 128), 777.0, device="cuda")
    out = out.to(torch.bfloat16)
    bundle.preload()
    other = Bundle.open(bundle.path)
    other.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bundle.attention(q, k, k, out)
        del other
        gc.collect()
    q.copy_(random(2, 300, 6, 128))
    out.fill_(777)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected(q, k, k))


def test_r04_threads_without_a_context(bundle: Bundle) -> None:
    driver = CudaDriver()
    q, k = random(2, 300, 6, 128), random(2, 300, 2, 128)
    out = torch.full_like(q, 777)
    torch.cuda.synchronize()
    before, after, failures = [], [], []

    def work() -> None:
        try:
            before.append(int(driver.check(driver.api.cuCtxGetCurrent(), "test")))
            Bundle.open(bundle.path).prepare(q, k, k, out)(0)
            after.append(int(driver.check(driver.api.cuCtxGetCurrent(), "test")))
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures and before == [0] and after == [0]
    assert torch.equal(out, expected(q, k, k))


def test_inputs_other_than_torch_tensors(bundle: Bundle) -> None:
    """__cuda_array_interface__ (no device in it) and DLPack, from a thread without a context too."""
    q, k = random(2, 300, 6, 128), random(2, 300, 2, 128)

    class Cai:
        def __init__(self, t: Any) -> None:
            self.__cuda_array_interface__ = {
                "shape": tuple(t.shape), "typestr": "<V2", "data": (t.data_ptr(), False), "version": 3,
                "strides": tuple(2 * s for s in t.stride()),
            }  # fmt: skip

    class Dlpack:
        def __init__(self, t: Any) -> None:
            self.t = t

        def __dlpack__(self, stream: Any = None) -> Any:
            return self.t.__dlpack__(stream=stream)

        def __dlpack_device__(self) -> Any:
            return self.t.__dlpack_device__()

    for wrap in (Cai, Dlpack):
        out = torch.full_like(q, 777)
        torch.cuda.synchronize()
        named = {"q": wrap(q), "k": wrap(k), "v": wrap(k), "out": wrap(out)}
        thread = threading.Thread(target=lambda n=named: bundle.attention(**n, stream=0))
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert torch.equal(out, expected(q, k, k)), wrap.__name__


def test_repeated_calls_see_new_addresses_and_data(bundle: Bundle) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        q, k = random(1, 200, 3, 128), random(1, 200, 1, 128)
        for _ in range(2):
            check(bundle, q, k, k, torch.full_like(q, 777))


def test_driver_errors_in_words(bundle: Bundle, tmp_path: Path) -> None:
    """What the driver says about an image of another architecture: 209, at the symbol, not at the launch."""
    other = os.environ.get("FMHA_GEN_OTHER_ARCH_BUNDLE")
    if other is None:
        pytest.skip("FMHA_GEN_OTHER_ARCH_BUNDLE names no bundle for another architecture")
    foreign = Bundle.open(other)
    q = random(1, 128, 3, 128)
    with pytest.raises(SelectionError, match="compute capability"):
        foreign.attention(q, q, q, torch.empty_like(q))
    record = foreign.record(foreign.kernels[0])
    driver = CudaDriver()
    with driver.context(0), pytest.raises(DriverError, match=r"NO_BINARY_FOR_GPU \(209\).*another GPU architecture"):
        driver._get_kernel(record, (foreign.path / record.cubin.path).read_bytes(), "foreign.cubin")


def test_run_npz_on_the_gpu(bundle: Bundle, tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    from fmha_gen.run import RunOptions, run_npz

    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((2, 70, h, 128), np.float32) for n, h in (("q", 6), ("k", 2), ("v", 2))}
    np.savez(tmp_path / "in.npz", **arrays)
    result = run_npz(bundle.path, str(tmp_path / "in.npz"), str(tmp_path / "out.npz"), RunOptions(scale=0.5))
    assert result.driver == "cuda"
    q, k, v = (torch.from_numpy(a).to(torch.bfloat16).cuda() for a in arrays.values())
    with np.load(tmp_path / "out.npz") as got:
        assert np.array_equal(got["out"], expected(q, k, v).float().cpu().numpy())
        assert np.array_equal(got["lse"], expected_lse(q, k, 0.5).cpu().numpy())
