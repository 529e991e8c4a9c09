"""`fmha-gen bench`: what is timed, how samples are taken, and what is written. Times here are made up."""

from __future__ import annotations

import ctypes
import json
import sys
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from fmha_gen import bench
from fmha_gen.bench import BenchOptions, bench_bundle
from fmha_gen.bench.cases import Case, cases_of, total_bytes
from fmha_gen.bench.report import columns, limits, markdown, result, row
from fmha_gen.bench.timing import Contender, Timing, measure
from fmha_gen.cli import cli
from fmha_gen.errors import DriverError, ProblemError, SelectionError, VerifyError
from fmha_gen.runtime import Device, Problem
from fmha_gen.runtime.cuda import CudaDriver
from tests.launcher_fixtures import FakeCuda, Handle, Result, make_record, read_arguments, small_manifest, write_bundle

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232448)
RECORDS = [
    make_record(dtype, dims, mask, q_stage=stage, arch="sm_90a")
    for dtype in ("bf16", "fp16")
    for dims in ((128, 128), (192, 128))
    for mask in ("full", "causal")
    for stage in (1, 2)
]
MANIFEST = small_manifest(*(r for r, _, _ in RECORDS))


def case(seqlen: int = 4096, mask: str = "full", dims: tuple[int, int] = (128, 128)) -> Case:
    return Case(Problem("bf16", 16384 // seqlen, seqlen, seqlen, 16, 16, *dims, mask=mask), "kernel")


# ---- what is timed


def test_work_and_bytes_by_hand() -> None:
    # 4 sequences x 16 heads x 4096^2 pairs x 2 FLOP x (128 + 128)
    assert case().flop == 4 * 16 * 4096**2 * 2 * 256 == 549_755_813_888
    assert case(mask="causal").flop == case().flop / 2
    assert case(dims=(192, 128)).flop == 4 * 16 * 4096**2 * 2 * 320
    assert case().bytes_of("q") == 16384 * 16 * 128 * 2 == 67_108_864
    assert case(dims=(192, 128)).bytes_of("out") == 67_108_864
    assert (case().shape, case(dims=(192, 128)).shape) == ("d128", "d192x128")


@pytest.mark.parametrize(("l2", "sets"), [(0, 2), (60 * 2**20, 2), (192 * 2**20, 3), (193 * 2**20, 4)])
def test_input_sets_rotate_past_the_cache(l2: int, sets: int) -> None:
    """A set is 3 x 64 MiB; between two uses of it the others bring in twice the cache."""
    assert case().num_sets(l2) == sets
    assert (sets - 1) * 192 * 2**20 >= 2 * l2


def test_default_cases_are_all_lengths_of_all_shapes_that_run_here() -> None:
    cases = cases_of(MANIFEST, H200, BenchOptions())
    assert [(c.problem.mask, c.shape, c.problem.seqlen_q, c.problem.batch) for c in cases] == [
        (mask, shape, n, 16384 // n)
        for mask in ("full", "causal")
        for shape in ("d128", "d192x128")
        for n in (1024, 4096, 16384)
    ]
    assert {c.problem.dtype for c in cases} == {"bf16"} and {c.problem.num_heads_q for c in cases} == {16}
    assert all("-q2-" in c.kernel and c.problem.mask in c.kernel for c in cases)


def test_options_narrow_the_cases() -> None:
    options = BenchOptions(
        dtype="fp16", head_dims=(192,), masks=("causal",), seqlens=(128,), tokens=64, heads=8, heads_kv=2,
        only="*-q1-*",
    )  # fmt: skip
    (only,) = cases_of(MANIFEST, H200, options)
    p = only.problem
    assert (p.dtype, p.head_dim_qk, p.mask, p.seqlen_k, p.batch) == ("fp16", 192, "causal", 128, 1)
    assert (p.num_heads_q, p.num_heads_kv) == (8, 2) and "-q1-" in only.kernel
    assert only.shapes["k"] == (1, 128, 2, 192) and only.shapes["out"] == (1, 128, 8, 128)


def test_nothing_to_time_says_what_the_bundle_holds() -> None:
    with pytest.raises(SelectionError, match=r"it holds sm_90a, and the options ask for bf16.*head_dim \[64\]"):
        cases_of(MANIFEST, H200, BenchOptions(head_dims=(64,)))
    b200 = Device(0, "NVIDIA B200", (10, 0), 148, 232448)
    with pytest.raises(SelectionError, match="NVIDIA B200, compute capability 10.0"):
        cases_of(MANIFEST, b200, BenchOptions())
    for wrong in (BenchOptions(seqlens=(0,)), BenchOptions(rounds=0), BenchOptions(masks=("window",))):
        with pytest.raises(ProblemError, match="^bench: (seqlen|rounds|mask): "):
            cases_of(MANIFEST, H200, wrong)


def test_memory_is_that_of_the_largest_case() -> None:
    sizes = total_bytes([case(), case(dims=(192, 128))], 60 * 2**20)
    assert sizes == {"q": 2 * 100_663_296, "k": 2 * 100_663_296, "v": 2 * 67_108_864, "out": 67_108_864}


# ---- how samples are taken


class MadeUpClock:
    """Each launch adds the milliseconds that its contender takes."""

    def __init__(self) -> None:
        self.now, self.marks = 0.0, list[float]()

    def record(self) -> int:
        self.marks.append(self.now)
        return len(self.marks) - 1

    def milliseconds(self, start: int, end: int) -> float:
        return self.marks[end] - self.marks[start]


def test_samples_are_interleaved_and_inputs_rotate() -> None:
    clock, log = MadeUpClock(), list[tuple[str, int]]()

    def contender(name: str, ms: float) -> Contender:
        def launch(i: int) -> None:
            clock.now += ms
            log.append((name, i))

        return Contender(name, launch)

    timings = measure([contender("a", 5.0), contender("b", 20.0)], clock, num_sets=3, rounds=4)
    assert (timings["a"].us, timings["b"].us) == (5000.0, 20000.0)
    assert (timings["a"].calls, timings["b"].calls) == (2, 1), "samples of about 10 ms, of at least one launch"
    timed = log[12:]  # two times 3 + 3 launches warm up and calibrate
    assert [n for n, _ in timed] == ["a", "a", "b", "b", "a", "a"] * 2, (
        "turns alternate, so that nobody is always first"
    )
    assert [i for _, i in timed] == [i % 3 for i in range(12)]


def test_every_order_of_three_contenders_comes_up() -> None:
    clock, log = MadeUpClock(), list[str]()

    def contender(name: str) -> Contender:
        def launch(i: int) -> None:
            clock.now += 20
            log.append(name)

        return Contender(name, launch)

    measure([contender(n) for n in "abc"], clock, num_sets=2, rounds=6)
    timed = "".join(log[18:])
    assert sorted(timed[i : i + 3] for i in range(0, 18, 3)) == ["abc", "acb", "bac", "bca", "cab", "cba"]


def test_the_median_counts_and_the_spread_is_of_quartiles() -> None:
    clock = MadeUpClock()
    costs = iter([10.0] * 6 + [10.0, 45.0, 10.0, 10.0, 10.0])

    def launch(i: int) -> None:
        clock.now += next(costs)

    timing = measure([Contender("a", launch)], clock, 2, rounds=5)["a"]
    assert timing.us == 10000.0 and timing.samples == (1e4, 4.5e4, 1e4, 1e4, 1e4) and timing.spread == 0
    assert Timing(100.0, 1, (90.0, 100.0, 110.0)).spread == pytest.approx(0.1)


# ---- the whole, on a stand-in for the driver


class FakeGpu(FakeCuda):
    """A device with memory and events; each launch takes 0.5 ms."""

    def __init__(self) -> None:
        super().__init__(capabilities=((9, 0),), num_sms=132)
        self.now, self.free = 0.0, 0x7000_0000_0000
        self.written: list[tuple[int, int]] = []

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Result, int]:
        more = {"CLOCK_RATE": 1_980_000, "L2_CACHE_SIZE": 60 * 2**20}
        name = attribute.removeprefix("CU_DEVICE_ATTRIBUTE_")
        return (Result.SUCCESS, more[name]) if name in more else super().cuDeviceGetAttribute(attribute, device)

    def cuMemAlloc(self, size: int) -> tuple[Result, int]:
        address, self.free = self.free, self.free + -(-size // 512) * 512
        return self._did("cuMemAlloc", size), address

    def cuMemFree(self, address: int) -> tuple[Result]:
        return (self._did("cuMemFree", address),)

    def cuMemcpyHtoD(self, address: int, data: bytes, size: int) -> tuple[Result]:
        assert len(data) == size
        self.written.append((address, size))
        return (Result.SUCCESS,)

    def cuMemcpyDtoD(self, to: int, source: int, size: int) -> tuple[Result]:
        assert to - source >= size, "a source must be whole before it is copied on"
        self.written.append((to, size))
        return (Result.SUCCESS,)

    def cuMemsetD16(self, address: int, value: int, count: int) -> tuple[Result]:
        return (self._did("cuMemsetD16", address, value, count),)

    def cuEventCreate(self, flags: int) -> tuple[Result, SimpleNamespace]:
        return Result.SUCCESS, SimpleNamespace(at=None)

    def cuEventRecord(self, event: SimpleNamespace, stream: int) -> tuple[Result]:
        assert stream == 0
        event.at = self.now
        return (Result.SUCCESS,)

    def cuEventSynchronize(self, event: SimpleNamespace) -> tuple[Result]:
        return (Result.SUCCESS,)

    def cuEventElapsedTime(self, start: SimpleNamespace, end: SimpleNamespace) -> tuple[Result, float]:
        return Result.SUCCESS, end.at - start.at

    def cuEventDestroy(self, event: SimpleNamespace) -> tuple[Result]:
        return (self._did("cuEventDestroy"),)

    def cuLaunchKernelEx(self, config: Any, kernel: Handle, params: int, extra: int) -> tuple[Result]:
        self.now += 0.5
        returned = super().cuLaunchKernelEx(config, kernel, params, extra)
        address = ctypes.string_at(read_arguments(params, ("tensor_map",))[0], 8)
        self.launches[-1].q = int.from_bytes(address, "little")
        return returned


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    api = FakeGpu()
    monkeypatch.setattr(bench, "CudaDriver", lambda: CudaDriver(api))
    monkeypatch.setattr(bench, "available", lambda: ())
    monkeypatch.setattr("fmha_gen.bench.gpu.RANDOM_ELEMS", 4096)
    return api


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", RECORDS)[0]


OPTIONS = BenchOptions(head_dims=(128,), masks=("causal",), seqlens=(128, 256), tokens=256, rounds=4)


def test_bench_times_the_launchers_kernel_on_rotated_inputs(gpu: FakeGpu, path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = bench_bundle(path, OPTIONS, lambda *args: seen.append(args))
    assert seen == [("d128 causal 128", 0, 2), ("d128 causal 256", 1, 2)]
    short, long = report["results"]
    assert short["us"] == long["us"] == {"fmha_gen": 500.0} and short["calls"] == {"fmha_gen": 20}
    assert short["kernel"].startswith("fmha_fwd-sm90a-bf16-d128-causal-q1-")
    assert long["kernel"].startswith("fmha_fwd-sm90a-bf16-d128-causal-q2-")
    assert long["tflops"]["fmha_gen"] == round(long["flop"] / 500e-6 / 1e12, 1)
    # a set is 3 MiB (256 tokens x 16 heads x 128 x 2 B, three times), the cache 60: 1 + 120 / 3 sets
    assert report["method"]["sets"]["d128 causal 256"] == 41
    for_long = [launch.q for launch in gpu.launches[len(gpu.launches) // 2 :]][1 + 6 :]
    assert [q - for_long[0] for q in for_long] == [i % 41 * 2**20 for i in range(80)]
    assert report["device"]["limit_tflops"] == round(132 * 4096 * 1.98e9 / 1e12, 1) == 1070.5
    assert report["device"]["l2_bytes"] == 60 * 2**20 and report["bundle"]["name"] == "core"
    assert gpu.named("cuMemsetD16")[-1][2:] == (0x7FFF, 256 * 16 * 128)
    assert len(gpu.named("cuMemFree")) == len(gpu.named("cuMemAlloc")) == 4
    json.dumps(report, allow_nan=False)


def test_every_byte_of_the_inputs_is_random(gpu: FakeGpu, path: Path) -> None:
    bench_bundle(path, OPTIONS)
    sizes = [size for _, size in gpu.named("cuMemAlloc")]
    covered = dict.fromkeys(range(3), 0)
    base = gpu.written[0][0]
    for address, size in gpu.written:
        covered[(address - base) // (41 * 2**20)] += size
    assert list(covered.values()) == sizes[:3] == [41 * 2**20] * 3


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    class NoLibrary(FakeCuda):
        def cuInit(self, flags: int) -> Any:
            raise OSError("libcuda.so.1")

    monkeypatch.setattr(bench, "CudaDriver", lambda: CudaDriver(NoLibrary()))
    with pytest.raises(DriverError, match="^bench: needs a GPU to measure, .*no NVIDIA driver"):
        bench_bundle(path, OPTIONS)


def test_peers_that_are_not_there_are_an_error_only_when_named(gpu: FakeGpu, path: Path) -> None:
    for name, words in (
        ("cudnn", "needs torch with a GPU"),
        ("fa3", "and fa3-fwd"),
        ("fa9", "unknown; it is one of cudnn, fa3"),
    ):
        with pytest.raises(ProblemError, match=f"bench: peer .*{name}.*{words}"):
            bench_bundle(path, BenchOptions(peers=(name,)))
    assert bench_bundle(path, BenchOptions(peers=(), seqlens=(64,), tokens=64, rounds=1))["peers"] == []


@pytest.mark.parametrize("difference", [0.3, float("nan")])
def test_wrong_numbers_are_not_timed(difference: float) -> None:
    with pytest.raises(VerifyError, match="kernel: .*differs from cudnn's by .*verify --driver cuda"):
        bench._check(case(), "cudnn", difference)
    assert bench._check(case(), "cudnn", 0.0031234567) == 0.003123


# ---- what is written


def report_of(results: list[dict[str, Any]], peers: list[str]) -> dict[str, Any]:
    return {
        "date": "2026-12-01T10:00:00+00:00", "bundle": {"name": "core", "version": "0.1.0"}, "dtype": "bf16",
        "device": {"name": "NVIDIA H200", "driver": "580.159.04", "cuda": "13.0", "max_clock_mhz": 1980.0,
                   "limit_tflops": 1070.5},
        "versions": {"torch": "2.11.0", "cudnn": "9.19.0"}, "peers": peers, "matrix_product_tflops": 790.0,
        "method": {"rounds": 20}, "results": results,
    }  # fmt: skip


@pytest.fixture
def report() -> dict[str, Any]:
    results = []
    for mask in ("full", "causal"):
        for dims in ((128, 128), (192, 128)):
            for n in (1024, 4096, 16384):
                c = case(n, mask, dims)
                us = c.flop / 600e6
                timings = {"fmha_gen": Timing(us, 3, (us,)), "cudnn": Timing(us * 1.1, 3, (us,))}
                results.append(result(c, timings, {"fa3": "head_dim 192 is not supported"}, 0.003))
    return report_of(results, ["cudnn", "fa3"])


def test_throughput_and_ratio(report: dict[str, Any]) -> None:
    first = report["results"][0]
    assert first["tflops"] == {"fmha_gen": 600.0, "cudnn": 545.5}
    assert first["ratio"] == 1.1 and first["best_peer"] == "cudnn"
    assert row(report, first) == ["d128", "full", "1024", "16 x 16", "229.1", "600", "546", "refused", "1.100"]
    assert len(columns(report)) == 9
    alone = report_of([result(case(), {"fmha_gen": Timing(1000.0, 1, (1000.0,))}, {}, None)], [])
    assert row(alone, alone["results"][0]) == ["d128", "full", "4096", "4 x 16", "1000.0", "550"]
    assert columns(alone) == ["shape", "mask", "seqlen", "batch x heads", "us", "TFLOP/s"]


def test_the_page_names_what_it_was_measured_on(report: dict[str, Any]) -> None:
    page = markdown(report)
    for words in ("NVIDIA H200, driver 580.159.04 (CUDA 13.0), 2026-12-01; bundle core 0.1.0; torch 2.11.0", "1070",
                  "| d192x128 | causal | 16384 | 1 x 16 |"):  # fmt: skip
        assert words in page
    assert page.count("\n|") == 14
    assert limits(report) == [("tensor cores at 1980 MHz", 1070.5), ("8192^3 matrix product", 790.0)]


def test_the_plot_is_an_svg_with_every_series_and_limit(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    from fmha_gen.bench.plot import draw

    for name in ("a.svg", "b.svg"):
        draw(report, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text(), "the same report gives the same bytes"
    assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    for words in (
        "d128, full",
        "d192x128, causal",
        "fmha_gen",
        "cuDNN",
        "tensor cores at 1980 MHz",
        "16k",
        "NVIDIA H200",
    ):
        assert f">{words}" in text or words in text, words


def test_without_matplotlib_the_plot_is_refused_before_anything_is_measured(
    gpu: FakeGpu, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    got = CliRunner().invoke(cli, ["bench", str(path), "-o", str(tmp_path)])
    assert got.exit_code == 1 and "fmha-gen[bench]" in got.stderr and "--no-plot" in got.stderr
    assert not gpu.calls


def test_command_line_writes_what_it_prints(gpu: FakeGpu, path: Path, tmp_path: Path) -> None:
    args = ["bench", str(path), "--head-dim", "128", "--mask", "full", "--seqlen", "256", "--tokens", "256", "--rounds"]
    args += ["2", "--no-plot", "-o", str(tmp_path / "new" / "folder")]
    got = CliRunner().invoke(cli, args)
    assert got.exit_code == 0, got.output
    assert "Fake GPU" in got.stdout and "limit: tensor cores at 1980 MHz: 1070 TFLOP/s" in got.stdout
    stem = tmp_path / "new" / "folder" / "bench-core-0.1.0-Fake-GPU-bf16"
    assert got.stdout.splitlines()[-2:] == [f"{stem}.json", f"{stem}.md"]
    written = json.loads(Path(f"{stem}.json").read_text())
    assert [c["seqlen"] for c in written["results"]] == [256]
    printed = json.loads(CliRunner().invoke(cli, [*args, "--json"]).stdout)
    assert printed["files"] == [f"{stem}.json", f"{stem}.md"] and printed["results"] == written["results"]
