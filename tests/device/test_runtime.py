"""The launcher with real attention kernels on a GPU: streams, threads, graphs, contexts, errors.

Case ids refer to public reports. tests/device/test_launcher.py has more, with a kernel that computes nothing.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fmha_gen.errors import BundleError, DriverError, ProblemError, SelectionError
from fmha_gen.manifest import KernelEntry
from fmha_gen.runtime import Bundle, Device
from fmha_gen.runtime.cuda import CudaDriver
from fmha_gen.runtime.driver import ARCH_CAPABILITY
from fmha_gen.runtime.select import runs_on
from fmha_gen.verify.bench import CudaBench
from fmha_gen.verify.cases import quick_cases
from fmha_gen.verify.kernel import KernelCheck
from tests.launcher_fixtures import make_record, write_bundle

torch = pytest.importorskip("torch", reason="needs torch to make and compare tensors")
pytestmark = pytest.mark.device

CANARY = 777.0
ROOT = Path(__file__).resolve().parents[2]


class Problem:
    """Tensors for one kernel of the bundle, and what it gives for them."""

    def __init__(self, bundle: Bundle, entry: KernelEntry, sq: int = 300, sk: int = 420, batch: int = 2) -> None:
        serves = entry.serves
        self.bundle, self.entry = bundle, entry
        self.causal = serves.masks == ("causal",)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[serves.dtype]
        d, dv = serves.head_dim_qk, serves.head_dim_v
        shapes = {"q": (batch, sq, 6, d), "k": (batch, sk, 2, d), "v": (batch, sk, 2, dv), "out": (batch, sq, 6, dv)}
        self.q, self.k, self.v, self.out = (torch.randn(s, device="cuda").to(dtype) for s in shapes.values())
        self.lse = torch.empty(batch, 6, sq, device="cuda")
        self.reset()

    def reset(self) -> None:
        self.out.fill_(CANARY)
        self.lse.fill_(CANARY)

    def launch(self, bundle: Bundle | None = None, **options: Any) -> None:
        options = {"causal": self.causal, "variant": self.entry.id} | options
        (bundle or self.bundle).attention(self.q, self.k, self.v, self.out, lse=self.lse, **options)

    def prepare(self, bundle: Bundle | None = None) -> Any:
        return (bundle or self.bundle).prepare(
            self.q, self.k, self.v, self.out, lse=self.lse, causal=self.causal, variant=self.entry.id
        )

    def wrong(self) -> list[str]:
        """What is wrong with out and lse as they are; [] is right."""
        from tests.device.torch_reference import problems, reference

        torch.cuda.synchronize()
        return problems(self.out, self.lse, reference(self.q, self.k, self.v, None, self.causal))


def first(bundle: Bundle, gpu: Device, causal: bool = False) -> KernelEntry:
    mine = [e for e in bundle.kernels if runs_on(e, gpu) and e.serves.masks == (("causal",) if causal else ("full",))]
    if not mine:
        pytest.skip(f"the bundle has no {'causal' if causal else 'full'} kernel for {gpu.describe()}")
    return min(mine, key=lambda e: (e.serves.dtype != "bf16", e.serves.head_dim_qk != 128, e.rank, e.id))


@pytest.fixture
def problem(bundle: Bundle, gpu: Device) -> Problem:
    return Problem(bundle, first(bundle, gpu))


@pytest.fixture
def fresh(bundle_path: Path) -> Bundle:
    """The bundle with nothing loaded."""
    return Bundle.open(bundle_path)


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread that has touched no CUDA; raises what it raised."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as e:
            failure.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


# ---- streams


def test_r01_runs_in_order_on_a_side_stream(problem: Problem) -> None:
    source = problem.q.clone()
    problem.q.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # 50 ms
        problem.q.copy_(source)
        problem.launch()  # torch's current stream
        seen, seen_lse = problem.out.clone(), problem.lse.clone()
    stream.synchronize()
    problem.out, problem.lse = seen, seen_lse
    assert not problem.wrong()


@pytest.mark.parametrize("spell", ["int", "torch", "protocol"])
def test_r01_streams_by_every_spelling(problem: Problem, spell: str) -> None:
    stream = torch.cuda.Stream()

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, stream.cuda_stream)

    given = {"int": stream.cuda_stream, "torch": stream, "protocol": Protocol()}[spell]
    source = problem.q.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        problem.q.copy_(source * 2)
    problem.launch(stream=given)
    assert not problem.wrong()


def test_r01_two_streams_at_once(bundle: Bundle, gpu: Device) -> None:
    """Launches that overlap on the device do not disturb each other."""
    problems = [
        Problem(bundle, first(bundle, gpu, causal), sq=100 + 77 * i) for i in range(4) for causal in (False, True)
    ]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        for p, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                p.reset()
                p.launch()
    assert [p.wrong() for p in problems] == [[]] * len(problems)


# ---- threads and contexts


def test_several_threads_on_one_bundle(fresh: Bundle, gpu: Device) -> None:
    """Eight threads, each its own stream and shapes, from a bundle that has loaded nothing: first calls race too."""
    problems = [Problem(fresh, first(fresh, gpu, causal=i % 2 == 1), sq=64 + 53 * i, sk=32 + 97 * i) for i in range(8)]
    torch.cuda.synchronize()
    start, failures = threading.Barrier(8), []

    def work(p: Problem) -> None:
        try:
            stream = torch.cuda.Stream()
            start.wait()
            with torch.cuda.stream(stream):
                for n in range(1, 60):
                    grown = p.k[:, : 1 + n % p.k.shape[1]], p.v[:, : 1 + n % p.k.shape[1]]
                    fresh.attention(p.q, *grown, p.out, lse=p.lse, causal=p.causal, variant=p.entry.id)
                p.reset()
                p.launch()
            stream.synchronize()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(p,)) for p in problems]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert [p.wrong() for p in problems] == [[]] * 8


def current_context(driver: CudaDriver) -> int:
    return int(driver.check(driver.api.cuCtxGetCurrent(), "test"))


def test_r04_a_thread_without_a_context_gets_none_left_behind(problem: Problem, fresh: Bundle) -> None:
    """First load, first launch and a repeated one, all from a thread that has touched no CUDA."""
    driver = CudaDriver()
    torch.cuda.synchronize()

    def work() -> list[int]:
        seen = [current_context(driver)]
        prepared = problem.prepare(fresh)
        for _ in range(2):
            prepared(0)
            seen.append(current_context(driver))
        problem.launch(fresh, stream=0)
        return [*seen, current_context(driver)]

    assert in_thread(work) == [0, 0, 0, 0]
    assert not problem.wrong()


def test_r04_a_context_of_the_callers_own_is_used_and_kept(problem: Problem, bundle_path: Path) -> None:
    """A context that is not the primary one: kernels are loaded there too, and it stays current, also after errors."""
    bench = CudaBench(bundle_path)
    driver = bench.driver
    problem.launch(bench.bundle)  # loaded in the primary context already
    torch.cuda.synchronize()

    def work() -> list[Any]:
        api = driver.api
        device = driver.check(api.cuDeviceGet(0), "test")
        params = [None, 0, device] if len(_parameters(api.cuCtxCreate)) == 3 else [0, device]
        mine = driver.check(api.cuCtxCreate(*params), "test")
        try:
            check = KernelCheck(bench, problem.entry, range(2))
            wrong = [check.case(case).problems for case in quick_cases()[:3]]
            assert current_context(driver) == int(mine)
            with pytest.raises(ProblemError):
                bench.bundle.attention(problem.q, problem.k, problem.v[:, 1:], problem.out, stream=0)
            assert current_context(driver) == int(mine)
            return wrong
        finally:
            driver.check(api.cuCtxDestroy(mine), "test")

    assert in_thread(work) == [(), (), ()]
    problem.reset()
    problem.launch(bench.bundle)
    assert not problem.wrong()


def _parameters(function: Any) -> list[str]:
    """Parameter names of a binding, from the first line of its documentation."""
    head = (function.__doc__ or "").partition(")")[0].partition("(")[2]
    return [p for p in head.split(",") if p.strip()]


def test_r03_two_gpus_in_one_process(fresh: Bundle, gpu: Device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    problems = {}
    for device in (0, 1):
        with torch.cuda.device(device):
            problems[device] = Problem(fresh, first(fresh, gpu))
    for device in (0, 1):
        torch.cuda.synchronize(device)

    def work(order: tuple[int, ...]) -> None:
        for device in order:
            p = problems[device]
            p.launch(stream=torch._C._cuda_getCurrentRawStream(device))

    failures: list[BaseException] = []

    def guarded(order: tuple[int, ...]) -> None:
        try:
            work(order)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(order,)) for order in ((0, 1, 0, 1), (1, 0, 1, 0))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    work((0, 1, 0, 1))  # device 0 is current throughout
    assert torch.cuda.current_device() == 0
    for device in (0, 1):
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            assert not problems[device].wrong()
    mixed = problems[0]
    with pytest.raises(ProblemError, match="all tensors of a launch must be on one device"):
        fresh.attention(mixed.q, problems[1].k, mixed.v, mixed.out)


# ---- graphs


def test_graph_replays_on_new_data(problem: Problem) -> None:
    problem.bundle.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.launch()
        problem.prepare()(torch.cuda.current_stream().cuda_stream)  # its argument block is gone before the replay
    gc.collect()
    for seed in range(3):
        torch.manual_seed(seed)
        for t in (problem.q, problem.k, problem.v):
            t.copy_(torch.randn(t.shape, device="cuda"))
        problem.reset()
        graph.replay()
        assert not problem.wrong(), f"replay {seed}"


def test_r07_first_call_inside_a_capture(problem: Problem, fresh: Bundle) -> None:
    """Nothing is loaded before the capture. The capture survives, and replays rightly."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.launch(fresh)
    problem.reset()
    graph.replay()
    assert not problem.wrong()


def test_r07_loading_in_another_thread_while_this_one_captures(problem: Problem, fresh: Bundle) -> None:
    problem.bundle.preload()
    other = Problem(fresh, problem.entry, sq=77)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.launch()
        in_thread(lambda: other.prepare(fresh))
        dropped = Bundle.open(fresh.path)
        del dropped
        gc.collect()
    problem.reset()
    graph.replay()
    assert not problem.wrong()


# ---- frozen


def test_frozen_serves_what_is_loaded_and_nothing_else(problem: Problem, fresh: Bundle, gpu: Device) -> None:
    assert fresh.preload(problem.entry.id, freeze=True) == (problem.entry.id,)
    problem.launch(fresh)
    assert not problem.wrong()
    other = Problem(fresh, first(fresh, gpu, causal=True))
    with pytest.raises(DriverError, match=r"causal.*not loaded.*frozen; preload"):
        other.launch(fresh)
    assert (other.out == CANARY).all()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        problem.launch(fresh)


# ---- what cannot be launched is an error in words before anything is launched


def test_a01_a_bundle_for_other_gpus(problem: Problem, gpu: Device, tmp_path: Path) -> None:
    """A bundle for another architecture never reaches the driver's loader, whatever is called."""
    other = next(a for a, cc in ARCH_CAPABILITY.items() if cc != gpu.compute_capability)
    foreign_path = os.environ.get("FMHA_GEN_OTHER_ARCH_BUNDLE")
    if foreign_path is None:
        foreign_path, _ = write_bundle(tmp_path, [make_record(arch=other), make_record(arch=other, q_stage=1)])
    foreign = Bundle.open(foreign_path)
    major, minor = gpu.compute_capability
    with pytest.raises(SelectionError, match=f"compute capability {major}.{minor}") as e:
        foreign.attention(problem.q, problem.k, problem.v, problem.out)
    assert "only" in str(e.value) and "archs: [" in str(e.value), "says what runs where, and the spec line to add"
    with pytest.raises(BundleError, match=r"no kernel matches .* it holds archs sm_"):
        foreign.preload()
    with pytest.raises(DriverError, match="which device 0 .* cannot run"):
        foreign.preload(foreign.kernels[0].id)
    assert not foreign.driver._libraries, "no image was given to the driver"  # type: ignore[attr-defined]
    assert (problem.out == CANARY).all()


class Spy:
    """cuda.bindings.driver with some calls replaced, noting those that load or launch."""

    def __init__(self, **replaced: Any) -> None:
        from cuda.bindings import driver

        self._real, self._replaced, self.noted = driver, replaced, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("cuLibraryLoadData", "cuLaunchKernelEx"):
            self.noted.append(name)
        return self._replaced.get(name) or getattr(self._real, name)


def test_a15_a_driver_that_is_too_old(problem: Problem) -> None:
    success = type(CudaDriver().api.cuInit(0)[0])(0)
    spy = Spy(cuDriverGetVersion=lambda: (success, 12080))
    old = Bundle.open(problem.bundle.path, CudaDriver(spy))
    with pytest.raises(DriverError, match=r"supports CUDA 12\.8 \(branch 570\).*need driver 580 or newer.*update it"):
        problem.launch(old)
    assert not [n for n in spy.noted if n == "cuLibraryLoadData"]
    assert (problem.out == CANARY).all()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
    )  # fmt: skip


def test_a15_no_driver(bundle_path: Path, tmp_path: Path) -> None:
    """libcuda.so.1 is no library: importing and opening work, loading says what is missing."""
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    found = run_python(
        f"""
from fmha_gen.errors import DriverError
from fmha_gen.runtime import Bundle
bundle = Bundle.open({str(bundle_path)!r})
print(len(bundle.kernels))
try:
    bundle.preload()
except DriverError as e:
    print(e)
""",
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert int(lines[0]) > 0
    assert "no NVIDIA driver: libcuda.so.1 cannot be loaded" in lines[1] and "install the NVIDIA driver" in lines[1]


def test_no_gpu_is_visible(bundle_path: Path) -> None:
    code = f"""
from fmha_gen.errors import DriverError
from fmha_gen.runtime import Bundle
try:
    Bundle.open({str(bundle_path)!r}).preload()
except DriverError as e:
    print(e)
"""
    found = run_python(code, CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 0, found.stderr
    assert "NO_DEVICE (100)" in found.stdout and "CUDA_VISIBLE_DEVICES" in found.stdout


@pytest.mark.parametrize("call", ["seen before", "new", "preload"])
def test_fork_after_init(bundle_path: Path, gpu: Device, call: str) -> None:
    """A forked child must not use its parent's CUDA: a clear error, whatever is called; the parent goes on."""
    found = run_python(f"""
import os, torch
from fmha_gen.errors import DriverError
from fmha_gen.runtime import Bundle
from tests.device.test_runtime import Problem, first
bundle = Bundle.open({str(bundle_path)!r})
p = Problem(bundle, first(bundle, bundle.driver.device(0)))
p.launch(stream=0)
torch.cuda.synchronize()
q, out = p.q[:, 7:], p.out[:, 7:]  # torch asks CUDA for its device when it makes a view, and a child's cannot say
child = os.fork()
if not child:
    try:
        if {call!r} == "preload":
            Bundle.open(bundle.path).preload()
        elif {call!r} == "new":
            bundle.attention(q, p.k, p.v, out, causal=p.causal, stream=0)
        else:
            p.launch(stream=0)
        print("launched", flush=True)
    except Exception as e:
        print(type(e).__name__, e, flush=True)
    finally:
        os._exit(0)
os.waitpid(child, 0)
p.reset()
p.launch(stream=0)
print("parent", p.wrong(), flush=True)
""")
    assert found.returncode == 0, found.stderr
    child, parent = found.stdout.splitlines()
    assert child.startswith("DriverError "), child
    assert "NOT_INITIALIZED (3)" in child and "a forked child must not use its parent's CUDA: spawn it" in child
    assert parent == "parent []"


def test_spawned_process(bundle_path: Path, gpu: Device) -> None:
    """R11: a process of its own asks the device for its multiprocessors and gets them right."""
    found = run_python(f"""
from fmha_gen.runtime import Bundle
from tests.device.test_runtime import Problem, first
bundle = Bundle.open({str(bundle_path)!r})
device = bundle.driver.device(0)
p = Problem(bundle, first(bundle, device))
p.launch()
print(device.num_sms, p.wrong())
""")
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(gpu.num_sms), "[]"]


def test_z10_t05_h02_wrong_arguments(problem: Problem) -> None:
    p, run = problem, problem.bundle.attention
    spread = p.v.repeat_interleave(2, -1)[..., ::2]
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("dtype: q .*, k float32", (p.q, p.k.float(), p.v, p.out)),
        ("dtype: q .*, out float32", (p.q, p.k, p.v, p.out.float())),
        ("host memory", (p.q.cpu(), p.k.cpu(), p.v.cpu(), p.out.cpu())),
        ("device: ", (p.q, p.k.cpu(), p.v, p.out)),
        ("num_heads_q: 5 with num_heads_kv 2", (p.q[:, :, :5], p.k, p.v, p.out[:, :, :5])),
        ("q: pointer must be 16-byte aligned, is at offset 2", (shifted(p.q, 1), p.k, p.v, p.out)),
        ("k: pointer must be 16-byte aligned, is at offset 8", (p.q, shifted(p.k, 4), p.v, p.out)),
        ("v: stride of axis 3 .* must be contiguous", (p.q, p.k, spread, p.out)),
        ("out: stride of axis 0 .* must not write one element twice", (p.q, p.k, p.v, p.out[:1].expand(2, -1, -1, -1))),
        ("v: shape", (p.q, p.k, p.v[:, 1:], p.out)),
    ]  # fmt: skip
    for words, args in wrong:
        with pytest.raises(ProblemError, match=words):
            run(*args, causal=p.causal, stream=0)
    torch.cuda.synchronize()
    assert (p.out == CANARY).all()


def shifted(t: Any, elements: int) -> Any:
    """A copy of `t` whose memory starts so many elements behind an aligned address."""
    room = torch.empty(t.numel() + elements, device=t.device, dtype=t.dtype)
    return room[elements:].view(t.shape).copy_(t)
