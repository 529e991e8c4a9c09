"""The CUDA driver against a stand-in for cuda.bindings, and bundles on disk. Case ids refer to public reports."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fmha_gen.errors import BundleError, DriverError, ProblemError, SelectionError
from fmha_gen.manifest_io import read_plan
from fmha_gen.runtime import Bundle, TensorArg
from fmha_gen.runtime.cuda import CudaDriver
from fmha_gen.runtime.driver import TensorMapArgs
from fmha_gen.runtime.streams import stream_handle
from tests.fake_cubin import make_cubin
from tests.launcher_fixtures import B200, FakeCuda, Result, make_record, read_arguments, write_bundle


def tensors(device: int | None = 0, sq: int = 300, batch: int = 2, **changes: TensorArg) -> dict[str, TensorArg]:
    shapes = {
        "q": (batch, sq, 8, 128),
        "k": (batch, 500, 2, 128),
        "v": (batch, 500, 2, 128),
        "out": (batch, sq, 8, 128),
    }
    named = {n: TensorArg.contiguous(0x100000 * (i + 1), s, "bf16", device) for i, (n, s) in enumerate(shapes.items())}
    return named | changes


def open_bundle(root: Path, api: FakeCuda, *kernels: Any, **options: Any) -> Bundle:
    write_bundle(root, list(kernels) or [make_record(), make_record(q_stage=1)], **options)
    return Bundle.open(root, CudaDriver(api))


def test_launch_hands_the_driver_the_recorded_geometry_and_arguments(tmp_path: Path) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    lse = TensorArg.contiguous(0x900000, (2, 8, 300), "float32", 0)
    prepared = bundle.prepare(**tensors(), lse=lse, softmax_scale=0.25)
    prepared(77)
    (launch,) = api.launches
    assert (launch.gridDimX, launch.gridDimY, launch.gridDimZ) == (32, 1, 1)
    assert (launch.blockDimX, launch.blockDimY, launch.blockDimZ) == (512, 1, 1)
    assert (launch.sharedMemBytes, launch.hStream, launch.numAttrs) == (200704, 77, 0)
    assert prepared.packed is not None
    args = dict(zip(prepared.packed.names, read_arguments(launch.params, prepared.packed.kinds), strict=True))
    assert int.from_bytes(args["tma_k"][:8], "little") == 0x200000
    assert args["lse"] == 0x900000 and args["lse_stride_b"] == 2400 and args["seqlen_k"] == 500
    assert args["softmax_scale_log2"] == pytest.approx(0.25 * math.log2(math.e), rel=1e-7)
    assert [c[1:] for c in api.named("cuKernelSetAttribute")] == [
        ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 200704, 0)
    ]
    encoded = api.named("cuTensorMapEncodeTiled")[0]
    assert encoded[1:9] == (
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 4, 0x100000, [128, 300, 8, 2], [2048, 256, 614400], [64, 128, 1, 1],
        [1, 1, 1, 1], "CU_TENSOR_MAP_INTERLEAVE_NONE",
    )  # fmt: skip
    assert encoded[9:] == (
        "CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_L2_PROMOTION_L2_256B", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"
    )  # fmt: skip


def test_prepared_launch_is_one_launch_call_and_loads_nothing_again(tmp_path: Path) -> None:
    api = FakeCuda()
    prepared = open_bundle(tmp_path, api).prepare(**tensors())
    api.create_context(0)
    prepared(1)
    before = len(api.calls)
    for stream in (1, 2, 1):
        prepared(stream)
    assert [c[0] for c in api.calls[before:]] == ["cuLaunchKernelEx"] * 3
    assert [launch.hStream for launch in api.launches] == [1, 1, 2, 1]


def test_what_no_launch_needs_is_not_read(tmp_path: Path) -> None:
    """Of a kernel's files a GPU's launch reads record and cubin; another kernel's are not even there."""
    used, other = make_record(), make_record(q_stage=1)
    bundle = open_bundle(tmp_path, api := FakeCuda(), used, other)
    kept = {used[0].cubin.path, "manifest.json"} | {e.record.path for e in bundle.kernels if e.id == used[0].id}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.relative_to(tmp_path).as_posix() not in kept:
            path.unlink()
    bundle.prepare(**tensors())(0)
    assert len(api.launches) == 1
    with pytest.raises(BundleError, match=f"{used[0].plan.path}: no such file"):
        read_plan(tmp_path, bundle.record(next(e for e in bundle.kernels if e.id == used[0].id)))


def test_cluster_is_a_launch_attribute_only_when_it_is_one(tmp_path: Path) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api, make_record(cluster=(2, 1, 1)))
    bundle.prepare(**tensors())(0)
    (launch,) = api.launches
    assert launch.numAttrs == 1 and launch.attrs[0].id == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    assert vars(launch.attrs[0].value.clusterDim) == {"x": 2, "y": 1, "z": 1}


@pytest.mark.parametrize(
    ("capability", "extents", "strides", "cleared"),
    [
        ((10, 0), (64, 10, 1, 1), (512, 128, 128), True),  # 128 + 9 x 512 B
        ((10, 0), (64, 256, 1, 1), (512, 128, 128), True),  # 128 + 255 x 512 = 130,688 B, under 131,072
        ((10, 3), (64, 257, 1, 1), (512, 128, 128), False),  # 131,200 B
        ((9, 0), (64, 10, 1, 1), (512, 128, 128), False),  # the bit is reserved on Hopper: as the driver left it
    ],
)
def test_bit_85_of_small_maps_is_cleared_on_blackwell(
    capability: tuple[int, int], extents: tuple[int, ...], strides: tuple[int, ...], cleared: bool
) -> None:
    args = TensorMapArgs("k", "k", "bf16", 0x1000, extents, strides, (64, 128, 1, 1), "128B", "zero", "256B")
    words = CudaDriver(FakeCuda()).encode(args, dataclasses.replace(B200, compute_capability=capability))
    assert len(words) == 128 and words[:8] == (0x1000).to_bytes(8, "little")
    assert (int.from_bytes(words[8:16], "little") >> 21) & 1 == (0 if cleared else 1)


def test_span_of_a_map_by_hand() -> None:
    args = TensorMapArgs("k", "k", "bf16", 0, (64, 256, 1, 1), (512, 128, 128), (64, 128, 1, 1), "128B", "zero", "none")
    assert args.span_bytes == 128 + 255 * 512 == 130688


# ---- A15: drivers that are missing, old, or fail


def test_a15_an_old_driver_is_refused_with_both_versions(tmp_path: Path) -> None:
    bundle = open_bundle(tmp_path, FakeCuda(version=12080), min_driver=580)
    with pytest.raises(DriverError, match=r"supports CUDA 12.8 \(branch 570\); .* driver 580 or newer \(CUDA 13.0\)"):
        bundle.prepare(**tensors())
    assert open_bundle(tmp_path, FakeCuda(version=12080), min_driver=570).prepare(**tensors())
    assert open_bundle(tmp_path, FakeCuda(version=13020), min_driver=580).prepare(**tensors())


def test_a15_an_old_driver_is_refused_before_it_sees_a_kernel(tmp_path: Path) -> None:
    api = FakeCuda(version=12080)
    with pytest.raises(DriverError):
        open_bundle(tmp_path, api).preload()
    assert not api.named("cuLibraryLoadData")


@pytest.mark.parametrize("error", [RuntimeError("no libcuda.so.1"), OSError("cannot open shared object file")])
def test_a15_missing_libcuda_is_no_nvidia_driver(tmp_path: Path, error: Exception) -> None:
    class NoLibrary(FakeCuda):
        def cuInit(self, flags: int) -> Any:
            raise error

    bundle = open_bundle(tmp_path, NoLibrary())  # opening and reading the index need no driver
    assert len(bundle.kernels) == 2
    with pytest.raises(DriverError, match="no NVIDIA driver: libcuda.so.1"):
        bundle.prepare(**tensors())


def test_a15_no_device_is_named(tmp_path: Path) -> None:
    api = FakeCuda()
    api.fail["cuInit"] = Result.NO_DEVICE
    with pytest.raises(DriverError, match=r"CUDA_ERROR_NO_DEVICE \(100\).*CUDA_VISIBLE_DEVICES"):
        open_bundle(tmp_path, api).preload()


@pytest.mark.parametrize(
    ("call", "result", "words"),
    [
        ("cuLibraryGetKernel", Result.NO_BINARY_FOR_GPU, "built for another GPU architecture"),
        ("cuLibraryLoadData", Result.UNSUPPORTED_PTX_VERSION, "needs a newer driver"),
        ("cuLibraryLoadData", Result.INVALID_PTX, "would have to compile PTX"),
        ("cuLibraryGetKernel", Result.INVALID_IMAGE, "no image that this driver can read"),
        ("cuLibraryGetKernel", Result.NOT_FOUND, "the kernel is not in its file"),
        ("cuKernelGetFunction", Result.INVALID_CONTEXT, "context was destroyed"),
    ],
)
def test_a15_driver_errors_carry_name_number_file_and_meaning(
    tmp_path: Path, call: str, result: Result, words: str
) -> None:
    api = FakeCuda()
    api.fail[call] = result
    bundle = open_bundle(tmp_path, api)
    with pytest.raises(DriverError) as e:
        bundle.prepare(**tensors())
    for part in (f"CUDA_ERROR_{result.name} ({int(result)})", words, str(tmp_path / "cubin")):
        assert part in str(e.value)
    assert not api.launches and api.stack == [], "the context is restored after a failure too"


def test_a_failed_load_is_tried_again(tmp_path: Path) -> None:
    api = FakeCuda()
    api.fail["cuKernelGetFunction"] = Result.INVALID_VALUE
    bundle = open_bundle(tmp_path, api)
    with pytest.raises(DriverError):
        bundle.prepare(**tensors())
    api.fail.clear()
    bundle.prepare(**tensors())(0)
    assert len(api.launches) == 1


@pytest.mark.parametrize("lengths", [300, 301], ids=["same", "new"])
def test_a_forked_child_is_told_to_spawn(tmp_path: Path, lengths: int) -> None:
    """The kernel was loaded before the fork; in the child every call of the driver fails."""
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    prepared = bundle.prepare(**tensors())
    for call in [name for name in dir(api) if name.startswith("cu") and "GetError" not in name]:
        api.fail[call] = Result.NOT_INITIALIZED
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_INITIALIZED .3.*must not use its parent's CUDA: spawn it"):
        prepared(0) if lengths == 300 else bundle.prepare(**tensors(sq=lengths))
    assert not api.launches


def test_launch_errors_name_variant_grid_and_file(tmp_path: Path) -> None:
    api = FakeCuda()
    prepared = open_bundle(tmp_path, api).prepare(**tensors())
    api.fail["cuLaunchKernelEx"] = Result.ILLEGAL_ADDRESS
    with pytest.raises(DriverError) as e:
        prepared(0)
    for part in (prepared.kernel, "grid (32, 1, 1)", "200704 B", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", ".cubin"):
        assert part in str(e.value)
    assert api.stack == []


# ---- A01, A08: what never reaches the driver


@pytest.mark.parametrize("capability", [(10, 3), (12, 0), (9, 0), (8, 0)])
def test_a01_a_cubin_of_another_architecture_is_never_loaded(tmp_path: Path, capability: tuple[int, int]) -> None:
    api = FakeCuda(capabilities=(capability,))
    bundle = open_bundle(tmp_path, api)
    with pytest.raises(SelectionError, match=f"compute capability {capability[0]}.{capability[1]}"):
        bundle.prepare(**tensors())
    with pytest.raises(BundleError, match="it holds archs sm_100a"):
        bundle.preload()
    with pytest.raises(DriverError, match="built for sm_100a"):
        bundle.preload("*")  # asked for by name: still refused
    assert not api.named("cuLibraryLoadData")


def test_a01_a_cubin_whose_header_disagrees_with_its_record_is_never_loaded(tmp_path: Path) -> None:
    honest = make_record()[0]
    table = tuple((p.offset, p.size) for p in honest.params)
    for cubin, words in (
        (make_cubin((honest.symbol,), sm=90, params=table), "is a cubin for sm_90a, the record says sm_100a"),
        (make_cubin((honest.symbol,), params=table[:-1]), r"parameter 13 \(softmax_scale_log2\).*rebuild the bundle"),
        (make_cubin(("other_0",), params=table), f"no kernel '{honest.symbol}'"),
        (b"// PTX is not a cubin", "not a whole cubin"),
    ):
        api = FakeCuda()
        bundle = open_bundle(tmp_path, api, make_record(cubin=cubin))
        with pytest.raises(BundleError, match=words):
            bundle.preload()
        assert not api.named("cuLibraryLoadData")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "delete", "swap"])
def test_a08_damaged_cubins_never_reach_the_driver(tmp_path: Path, damage: str) -> None:
    """A08: one flipped byte, half a file, nothing, no file, another kernel's file: named, and not loaded."""
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    record = bundle.record(bundle.select(dataclasses.replace(problem_of(tensors())), B200))
    path = tmp_path / record.cubin.path
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        flipped = data[:100] + bytes((data[100] ^ 1,)) + data[101:]
        other = next(f for f in (tmp_path / "cubin").iterdir() if f != path).read_bytes()
        path.write_bytes({"flip": flipped, "cut": data[: len(data) // 2], "empty": b"", "swap": other}[damage])
    with pytest.raises(BundleError) as e:
        bundle.attention(**tensors(), stream=0)
    assert str(path) in str(e.value)
    assert not api.named("cuLibraryLoadData") and not api.launches


def problem_of(named: dict[str, TensorArg]) -> Any:
    from fmha_gen.runtime.problem import describe_launch

    return describe_launch(**named).problem


def test_a_kernel_that_needs_more_shared_memory_than_the_device_has(tmp_path: Path) -> None:
    """One byte less than the architecture allows, as if a driver kept some of it."""
    api = FakeCuda()
    api.max_smem = 232447
    bundle = open_bundle(tmp_path, api, make_record(smem=232448))
    with pytest.raises(DriverError, match="232448 B of dynamic shared memory, .* allows 232447"):
        bundle.prepare(**tensors())
    assert not api.named("cuLibraryLoadData")


# ---- R01, R03, R04, R07: streams, devices, contexts, lifetime


def test_r01_every_launch_goes_to_the_stream_it_was_given(tmp_path: Path) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    named = tensors()
    assert bundle.attention(**named, stream=1234) is named["out"]
    assert api.launches[-1].hStream == 1234
    with pytest.raises(ProblemError, match="stream: not given"):
        bundle.attention(**named)


def test_tensors_in_host_memory_are_said_to_be(tmp_path: Path) -> None:
    """Without a stream too, which is looked at first: a torch tensor on the CPU is still a torch tensor."""
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    bundle = open_bundle(tmp_path, FakeCuda())
    for tensor in (torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16), numpy.zeros((1, 2, 1, 128), numpy.uint16)):
        with pytest.raises(ProblemError, match=r"^q: in host memory; .* copy them there \(torch: .cuda\(\)\)"):
            bundle.attention(tensor, tensor, tensor, tensor)


def test_a_dtype_that_contradicts_the_tensors_is_refused_whatever_is_cached(tmp_path: Path) -> None:
    """dtype= says what bit patterns are; it converts nothing."""
    bundle = open_bundle(tmp_path, FakeCuda(), make_record())
    for _ in range(2):
        bundle.attention(**moved(tensors(), 0), stream=5, dtype="bf16")
        with pytest.raises(ProblemError, match=r"^dtype: fp16, but q, k, v and out are bf16; .*bit patterns"):
            bundle.attention(**moved(tensors(), 0), stream=5, dtype="fp16")


def test_r01_stream_objects() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 55)

    class Torch:
        cuda_stream = 66

    assert [stream_handle(s, None) for s in (7, Protocol(), Torch(), FakeCuda.CUstream(9))] == [7, 55, 66, 9]
    with pytest.raises(ProblemError, match="stream: str"):
        stream_handle("0", None)
    with pytest.raises(ProblemError, match="stream: bool"):
        stream_handle(True, None)
    assert stream_handle(None, None, needed=False) == 0


def test_r03_one_bundle_launches_on_both_devices_from_two_threads(tmp_path: Path) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)

    def work(order: tuple[int, ...]) -> None:
        for device in order:
            bundle.attention(**tensors(device), stream=device + 1)

    threads = [threading.Thread(target=work, args=(order,)) for order in ((0, 1, 0, 1), (1, 0, 1, 0))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(api.launches) == 8
    assert all(launch.context == 0x1000 + launch.hStream - 1 for launch in api.launches)
    assert len(api.named("cuLibraryLoadData")) == 1, "a library serves all devices"
    assert sorted(c[3] for c in api.named("cuKernelSetAttribute")) == [0, 1], "shared memory is opted in per device"


def test_r04_a_thread_without_a_context_gets_none_left_behind(tmp_path: Path) -> None:
    api = FakeCuda()
    prepared = open_bundle(tmp_path, api).prepare(**tensors())
    seen: list[list[int]] = []

    def work() -> None:
        prepared(0)
        seen.append(list(api.stack))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[]] and api.launches[0].context == 0x1000
    assert api.stack == []


def test_r04_the_callers_context_is_kept(tmp_path: Path) -> None:
    """Another GPU's context is current: the launch runs in the tensors' device, the caller's context stays."""
    api = FakeCuda()
    mine = api.create_context(1)
    bundle = open_bundle(tmp_path, api)
    bundle.attention(**tensors(0), stream=0)
    assert api.launches[0].context == 0x1000 and api.stack == [mine]
    bundle.attention(**tensors(1), stream=0)
    assert api.launches[1].context == mine, "a context of the right device is used, primary or not"
    assert api.stack == [mine]


def test_the_device_is_asked_for_when_tensors_do_not_say(tmp_path: Path) -> None:
    api = FakeCuda()
    api.pointer_device = 1
    prepared = open_bundle(tmp_path, api).prepare(**tensors(device=None))
    assert prepared.device.ordinal == 1
    api.fail["cuPointerGetAttribute"] = Result.INVALID_VALUE
    with pytest.raises(ProblemError, match="q: 0x100000 is no device memory"):
        open_bundle(tmp_path, api).prepare(**tensors(device=None))
    with pytest.raises(ProblemError, match="q: host memory"):
        open_bundle(tmp_path, api).prepare(**tensors(device=-1))


def test_r07_nothing_is_unloaded_when_a_bundle_is_dropped(tmp_path: Path) -> None:
    """R07: the stand-in has no cuLibraryUnload: calling it would fail."""
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    bundle.attention(**tensors(), stream=0)
    del bundle
    assert not hasattr(api, "cuLibraryUnload")


# ---- preload, freeze, empty problems


def test_r07_the_first_call_may_come_during_a_capture(tmp_path: Path) -> None:
    """Loading is no part of the capture; the thread's capture mode is what it was afterwards, also after an error."""
    api = FakeCuda()
    api.capturing = True
    bundle = open_bundle(tmp_path, api)
    bundle.attention(**tensors(), stream=5)
    assert len(api.launches) == 1
    api.create_context(0)
    bundle.attention(**tensors(), stream=5)
    assert len(api.named("cuKernelGetFunction")) == 2
    api.fail["cuLibraryLoadData"] = Result.INVALID_IMAGE
    with pytest.raises(DriverError, match="INVALID_IMAGE"):
        bundle.attention(**tensors(sq=5), stream=5)
    assert api.cuThreadExchangeStreamCaptureMode("x")[1] == "CU_STREAM_CAPTURE_MODE_GLOBAL"


def test_preload_then_freeze(tmp_path: Path) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api, make_record(), make_record(mask="causal"), make_record(arch="sm_90a"))
    (full,) = bundle.preload("fmha_fwd-sm100a-bf16-d128-full-q2", freeze=True)
    assert full.startswith("fmha_fwd-sm100a-bf16-d128-full-q2-")
    bundle.attention(**tensors(), stream=0)
    with pytest.raises(DriverError, match="causal.*frozen; preload"):
        bundle.attention(**tensors(), causal=True, stream=0)
    with pytest.raises(DriverError, match="frozen"):
        bundle.attention(**tensors(1), stream=0)
    api.create_context(0)
    with pytest.raises(DriverError, match="not loaded in the current context"):
        bundle.attention(**tensors(), stream=0)
    assert len(api.launches) == 1


def test_preload_loads_what_runs_here(tmp_path: Path) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api, make_record(), make_record(mask="causal"), make_record(arch="sm_90a"))
    assert [k.split("-")[1] for k in bundle.preload()] == ["sm100a", "sm100a"]
    calls = len(api.calls)
    bundle.preload()
    assert not [c for c in api.calls[calls:] if c[0] == "cuLibraryLoadData"]


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"sq": 0}])
def test_z05_l09_no_queries_launch_nothing_and_load_nothing(tmp_path: Path, sizes: dict[str, int]) -> None:
    api = FakeCuda()
    open_bundle(tmp_path, api).attention(**tensors(**sizes), stream=0)
    assert not api.launches and not api.named("cuLibraryLoadData")


def test_r11_a_device_that_reports_no_multiprocessors_is_an_error(tmp_path: Path) -> None:
    bundle = open_bundle(tmp_path, FakeCuda(num_sms=0))
    with pytest.raises(ProblemError, match="num_sms is 0"):
        bundle.prepare(**tensors())
    assert bundle.prepare(**tensors(), num_sms=7).packed.grid == (7, 1, 1)  # type: ignore[union-attr]


def test_m11_s03_values_for_features_that_are_not_there_are_refused(tmp_path: Path) -> None:
    bundle = open_bundle(tmp_path, FakeCuda())
    with pytest.raises(SelectionError, match="mask window is not built"):
        bundle.attention(**tensors(), window=(128, None), stream=0)
    with pytest.raises(SelectionError, match="softcap is not built"):
        bundle.attention(**tensors(), softcap=5.0, stream=0)
    with pytest.raises(SelectionError, match="sink is not built"):
        bundle.attention(**tensors(), sink=TensorArg.contiguous(16, (8,), "float32", 0), stream=0)
    for bad in (-1.0, math.nan, math.inf, "5"):
        with pytest.raises(ProblemError, match="softcap"):
            bundle.attention(**tensors(), softcap=bad, stream=0)
    bundle.attention(**tensors(), softcap=0.0, window=(None, None), stream=0)


def test_a24_import_and_open_need_neither_driver_nor_bindings(tmp_path: Path) -> None:
    """A24, A15: where cuda, numpy and the compiler cannot be imported, a bundle opens; a launch says why not."""
    write_bundle(tmp_path, [make_record()])
    code = f"""
import sys
for name in ("cuda", "numpy", "cutlass", "yaml", "jinja2", "click", "torch"):
    sys.modules[name] = None
from fmha_gen.errors import DriverError
from fmha_gen.runtime import Bundle
bundle = Bundle.open({str(tmp_path)!r})
print(len(bundle.kernels))
try:
    bundle.preload()
except DriverError as e:
    print(e)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("1\ncuda: cuda.bindings cannot be imported") and "pip install" in out.stdout


# ---- repeated calls


class TorchLike:
    """What the cache reads of a torch tensor."""

    def __init__(self, arg: TensorArg) -> None:
        self.arg, self.shape = arg, arg.shape
        self.dtype = {"bf16": "torch.bfloat16", "float32": "torch.float32"}[arg.dtype]

    def data_ptr(self) -> int:
        return self.arg.address

    def stride(self) -> tuple[int, ...]:
        return self.arg.strides

    def get_device(self) -> int:
        return self.arg.device or 0


TorchLike.__module__ = "torch"


def moved(named: dict[str, TensorArg], by: int) -> dict[str, Any]:
    return {n: TorchLike(dataclasses.replace(t, address=t.address + by)) for n, t in named.items()}


def test_repeated_calls_prepare_once_and_rebind_addresses(tmp_path: Path) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    lse = TensorArg.contiguous(0x900000, (2, 8, 300), "float32", 0)
    named = tensors() | {"lse": lse}
    packed = bundle.prepare(**named).packed
    assert packed is not None
    encoded = len(api.named("cuTensorMapEncodeTiled"))
    assert encoded == 2, "k and v, q and out are alike"
    moves = (0, 0x40, 0x80, 0x40, 0x40, 0, 0x80)
    for by in moves:
        bundle.attention(**moved(named, by), stream=5)
        args = dict(zip(packed.names, read_arguments(api.launches[-1].params, packed.kinds), strict=True))
        for i, name in enumerate(("tma_q", "tma_k", "tma_v", "tma_o")):
            assert int.from_bytes(args[name][:8], "little") == 0x100000 * (i + 1) + by
        assert args["lse"] == 0x900000 + by and args["seqlen_k"] == 500
    assert len(api.named("cuTensorMapEncodeTiled")) == encoded, "the geometry is encoded once"
    params = [launch.params for launch in api.launches]
    assert params[1] == params[2], "addresses seen once are launched from a scratch block"
    assert params[3] == params[4] and len({params[0], params[1], params[3], params[6]}) == 4, "then they get their own"


def test_threads_do_not_share_scratch_blocks(tmp_path: Path) -> None:
    """New addresses from several threads at once: every launch sees its own."""
    seen: list[tuple[int, int]] = []

    class Slow(FakeCuda):
        def cuLaunchKernelEx(self, config: Any, kernel: Any, params: int, extra: int) -> Any:
            time.sleep(0.001)
            first = read_arguments(params, ("tensor_map",))[0]
            seen.append((config.hStream, int.from_bytes(first[:8], "little")))
            return super().cuLaunchKernelEx(config, kernel, params, extra)

    bundle = open_bundle(tmp_path, Slow())
    bundle.attention(**moved(tensors(), 0), stream=1)

    def work(n: int) -> None:
        for i in range(20):
            by = (n * 100 + i + 1) * 0x100
            bundle.attention(**moved(tensors(), by), stream=0x100000 + by)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(seen) == 81 and all(stream == address for stream, address in seen[1:])


def test_rebound_small_maps_lose_bit_85_again(tmp_path: Path) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    shape = (1, 200, 1, 128)  # 51,200 B
    named = {n: TensorArg.contiguous(0x10000 * (i + 1), shape, "bf16", 0) for i, n in enumerate(("q", "k", "v", "out"))}
    for by in (0, 0x100):
        bundle.attention(**moved(named, by), stream=5)
    for launch in api.launches:
        first_map = read_arguments(launch.params, ("tensor_map",))[0]
        assert (int.from_bytes(first_map[8:16], "little") >> 21) & 1 == 0


@pytest.mark.parametrize(
    "change", [{"softmax_scale": 0.5}, {"causal": True}, {"num_sms": 3}, {"variant": "*-q1-*"}, {"window": (None, 0)}]
)
def test_a_cached_call_is_never_used_for_other_options(tmp_path: Path, change: dict[str, Any]) -> None:
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api, make_record(), make_record(q_stage=1), make_record(mask="causal"))
    bundle.attention(**moved(tensors(), 0), stream=5)
    bundle.attention(**moved(tensors(), 0), stream=5, **change)
    bundle.attention(**moved(tensors(), 0), stream=5, **change)
    first, second, third = api.launches
    assert second.params == third.params != first.params


def test_a_cached_call_is_never_used_for_other_tensors(tmp_path: Path) -> None:
    """Strides, shapes, dtype and device of every tensor are part of the key; bad addresses are still refused."""
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    named = tensors()
    bundle.attention(**moved(named, 0), stream=5)
    other = dataclasses.replace(named["v"], strides=(500 * 512, 512, 128, 1))
    bundle.attention(**moved(named | {"v": other}, 0), stream=5)
    assert [call[4] for call in api.named("cuTensorMapEncodeTiled")[2:]] == [[128, 500, 2, 2]], "only v is new"
    with pytest.raises(ProblemError, match="k: pointer must be 16-byte aligned, is at offset 8"):
        bundle.attention(
            **moved(named | {"k": dataclasses.replace(named["k"], address=0x200008)}, 0), stream=5
        )  # fmt: skip
    with pytest.raises(ProblemError, match="dtype"):
        bundle.attention(
            **moved(named | {"k": dataclasses.replace(named["k"], dtype="float32")}, 0), stream=5
        )  # fmt: skip
    with pytest.raises(ProblemError, match="window"):
        bundle.attention(**moved(named, 0), stream=5, window=[1])


def test_a_call_seen_often_is_never_used_for_other_tensors_at_its_addresses(tmp_path: Path) -> None:
    """Addresses are looked up first: a cache that grows in place has the same ones at every length."""
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    named = tensors()
    for lengths in ((500, 500, 500), (400, 500, 400, 400), (300, 500)):
        for seqlen in lengths:
            kv = {n: dataclasses.replace(named[n], shape=(2, seqlen, 2, 128)) for n in ("k", "v")}
            packed = bundle.prepare(**moved(named | kv, 0)).packed
            assert packed is not None
            bundle.attention(**moved(named | kv, 0), stream=5)
            found = read_arguments(api.launches[-1].params, packed.kinds)
            assert found[packed.names.index("seqlen_k")] == seqlen
    for wrong in (dataclasses.replace(named["k"], dtype="float32"), dataclasses.replace(named["k"], device=1)):
        with pytest.raises(ProblemError, match="dtype|device"):
            bundle.attention(**moved(named | {"k": wrong}, 0), stream=5)


def test_a_scratch_block_forgets_what_a_failed_move_left(tmp_path: Path) -> None:
    """Maps whose address did not change are kept, but not those of a call that the driver refused."""
    api = FakeCuda()
    bundle = open_bundle(tmp_path, api)
    named = tensors()
    for by in (0, 0x40):
        bundle.attention(**moved(named, by), stream=5)
    moves = len(api.named("cuTensorMapReplaceAddress"))
    one_moved = moved(named, 0x40) | {"q": moved(named, 0x80)["q"]}
    bundle.attention(**one_moved, stream=5)
    assert len(api.named("cuTensorMapReplaceAddress")) == moves + 1, "k, v and out stayed where they were"
    api.fail["cuTensorMapReplaceAddress"] = Result.INVALID_VALUE
    with pytest.raises(DriverError, match="q: tensor map at"):
        bundle.attention(**moved(named, 0x100), stream=5)
    api.fail.clear()
    bundle.attention(**one_moved, stream=5)
    for i, data in enumerate(read_arguments(api.launches[-1].params, ("tensor_map",) * 4)):
        assert int.from_bytes(data[:8], "little") == 0x100000 * (i + 1) + (0x40 if i else 0x80)
