"""Hand-built bundles and a stand-in for cuda.bindings.driver: the launcher's tests need neither compiler nor GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import hashlib
import json
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fmha_gen import manifest as m
from fmha_gen.manifest_io import manifest_text
from fmha_gen.runtime import Device
from tests.fake_cubin import make_cubin

B200 = Device(0, "NVIDIA B200", (10, 0), 148, 232448)
DENSE_SCALARS = ("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k")


def canonical_params(
    dtype: str = "bf16", head_dim_qk: int = 128, head_dim_v: int = 128, tile_n: int = 128, longest_first: bool = False,
    base: int = 0x380,
) -> tuple[m.Param, ...]:  # fmt: skip
    """The dense kernel's parameter table, offsets as ptxas lays them out: absolute addresses are aligned.

    base: where parameters start in the constant bank, 0x380 on sm_100a, 0x210 on sm_90a.
    """
    params: list[m.Param] = []
    offset = base

    def add(name: str, kind: str, **more: Any) -> None:
        nonlocal offset
        size = m.PARAM_SIZES[kind]
        align = 64 if kind == "tensor_map" else size
        offset = -(-offset // align) * align
        params.append(m.Param(name, kind, offset - base, size, **more))
        offset += size

    for tensor, dim, seq, heads, rows in (
        ("q", head_dim_qk, "seqlen_q", "num_heads_q", 128),
        ("k", head_dim_qk, "seqlen_k", "num_heads_kv", tile_n),
        ("v", head_dim_v, "seqlen_k", "num_heads_kv", tile_n),
        ("o", head_dim_v, "seqlen_q", "num_heads_q", 128),
    ):
        dim_name = "head_dim_qk" if tensor in "qk" else "head_dim_v"
        box = 32 if dim == 96 else 64
        axes = (m.MapAxis("d", dim_name, box), m.MapAxis("s", seq, rows), m.MapAxis("h", heads, 1))
        axes += (m.MapAxis("b", "batch", 1),)
        record = m.TensorMapRecord(tensor, dtype, axes, "64B" if dim == 96 else "128B")
        add(f"tma_{tensor}", "tensor_map", tensor_map=record)
    add("lse", "pointer", nullable=True)
    for axis in "bhs":
        add(f"lse_stride_{axis}", "i64")
    for name in DENSE_SCALARS:
        add(name, "i32")
    add("softmax_scale_log2", "f32")
    if longest_first:
        add("heads_per_section", "i32")
    return tuple(params)


def make_record(
    dtype: str = "bf16", dims: tuple[int, int] = (128, 128), mask: str = "full", q_stage: int = 2,
    arch: str = "sm_100a", smem: int = 200704, cluster: tuple[int, int, int] = (1, 1, 1),
    features: tuple[str, ...] = (), cubin: bytes | None = None, rank: int = 0, ptx: bytes = b"// no PTX\n",
) -> tuple[m.KernelRecord, bytes, bytes]:  # fmt: skip
    """(record, cubin, ptx) of one dense kernel."""
    dim = f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}x{dims[1]}"
    name = f"fmha_fwd-{arch.replace('_', '')}-{dtype}-{dim}-{mask}-q{q_stage}"
    kernel_id = f"{name}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    symbol = kernel_id.replace("-", "_") + "_0"
    params = canonical_params(dtype, *dims, longest_first=mask == "causal")
    if cubin is None:
        table = tuple((p.offset, p.size) for p in params)
        cubin = make_cubin((symbol,), sm=int(arch[3:-1]), params=table)
    rule = m.Rule("one_per_tile" if mask == "causal" else "persistent", {"rows": 128 * q_stage})
    serves = m.Serves(
        dtype, dims[0], dims[1], (mask,), features,
        min_rows=0 if q_stage == 1 else 129, max_rows=128 if q_stage == 1 else None,
    )  # fmt: skip
    record = m.KernelRecord(
        id=kernel_id, family="fmha_fwd", arch=arch, build_digest="0" * 64, symbol=symbol, spec={},
        serves=serves, rank=rank, params=params,
        launch=m.LaunchRecord(512, cluster, smem, rule),
        resources=m.Resources(128, 0, 0, 0, 512, 128),
        cubin=_file("cubin", cubin, ".cubin"), ptx=_file("ptx", ptx, ".ptx"), plan=_file("plans", b"", ".json"),
    )  # fmt: skip
    return with_plan(record), cubin, ptx


def with_plan(record: m.KernelRecord) -> m.KernelRecord:
    """The record with `plan_of` it as its plan."""
    return dataclasses.replace(record, plan=_file("plans", plan_of(record), ".json"))


def plan_of(record: m.KernelRecord) -> bytes:
    """The least that counts as a plan: one role, whose warps keep the registers of the launch."""
    warps = list(range(record.launch.threads // 32))
    role = {"name": "all", "warp_ids": warps, "num_regs": record.resources.registers}
    return json.dumps({"roles": [role], "spec": record.spec}).encode()


def _file(folder: str, data: bytes, suffix: str) -> m.FileRecord:
    digest = hashlib.sha256(data).hexdigest()
    return m.FileRecord(f"{folder}/{digest[:16]}{suffix}", digest, len(data))


def write_bundle(
    root: Path, kernels: list[tuple[m.KernelRecord, bytes, bytes]], min_driver: int = 580
) -> tuple[Path, m.Manifest]:
    """A bundle folder that `Bundle.open` accepts."""
    entries = []
    for record, cubin, ptx in kernels:
        text = m.to_json(record).encode()
        digest = hashlib.sha256(text).hexdigest()
        entry = m.KernelEntry(
            record.id, record.family, record.arch, record.serves, record.rank, digest, len(text)
        )  # fmt: skip
        for f, data in ((entry.record, text), (record.cubin, cubin), (record.ptx, ptx), (record.plan, plan_of(record))):
            path = root / f.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o644)
        entries.append(entry)
    manifest = m.Manifest(
        name="core", version="0.1.0", generator=m.Generator("0.1.0", None, False),
        toolchain=m.Toolchain("4.8.1", "13", "13.4.59", "3.11"), min_driver=min_driver, kernels=tuple(entries),
    )  # fmt: skip
    (root / "manifest.json").write_text(manifest_text(manifest))
    (root / "manifest.json").chmod(0o644)
    return root, manifest


def small_manifest(*records: m.KernelRecord) -> m.Manifest:
    """An index without files, for the pure functions."""
    entries = tuple(m.KernelEntry(r.id, r.family, r.arch, r.serves, r.rank, "0" * 64, 1) for r in records)
    generator, toolchain = m.Generator("0.1.0", None, False), m.Toolchain("4.8.1", "13", "13.4.59", "3.11")
    return m.Manifest("core", "0.1.0", generator, toolchain, 580, entries)


class Result(enum.IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    NOT_INITIALIZED = 3
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    NO_BINARY_FOR_GPU = 209
    INVALID_PTX = 218
    UNSUPPORTED_PTX_VERSION = 222
    NOT_FOUND = 500
    ILLEGAL_ADDRESS = 700
    STREAM_CAPTURE_UNSUPPORTED = 900


def gives(result: Result, value: Any) -> tuple[Result, Any]:
    """What the bindings return: None in place of the value where the call failed."""
    return result, None if result else value


class Handle(int):
    """CUcontext, CUkernel, ...: bindings handles convert to int; so does this."""


class _Names:
    """An enum of the driver: any member name is its own value."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeCuda:
    """Looks like cuda.bindings.driver with two devices. Records calls as (name, arguments...).

    fail: call name -> Result that it returns. capturing: a stream is being captured into a graph. Contexts are per
    thread, as the driver's are; primary contexts of device n have handle 0x1000 + n, others are made with
    `create_context`.
    """

    CUdevice_attribute = CUfunction_attribute = CUpointer_attribute = _Names()
    CUtensorMapDataType = CUtensorMapInterleave = CUtensorMapSwizzle = _Names()
    CUtensorMapL2promotion = CUtensorMapFloatOOBfill = CUlaunchAttributeID = CUstreamCaptureMode = _Names()
    cuuint64_t = cuuint32_t = CUstream = int

    def __init__(
        self, capabilities: tuple[tuple[int, int], ...] = ((10, 0), (10, 0)), version: int = 13000, num_sms: int = 148
    ) -> None:
        self.capabilities, self.version, self.num_sms = capabilities, version, num_sms
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[SimpleNamespace] = []
        self.fail: dict[str, Result] = {}
        self.pointer_device = 0
        self.max_smem = 232448
        self.capturing = False
        self.context_device: dict[int, int] = {}
        self._stacks = threading.local()

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [c for c in self.calls if c[0] == name]

    @property
    def stack(self) -> list[int]:
        if not hasattr(self._stacks, "value"):
            self._stacks.value = []
        return self._stacks.value

    def create_context(self, device: int) -> int:
        """A context that is not primary, made current on this thread."""
        handle = 0x2000 + len(self.context_device)
        self.context_device[handle] = device
        self.stack.append(handle)
        return handle

    def _did(self, name: str, *args: Any) -> Result:
        self.calls.append((name, *args))
        return self.fail.get(name, Result.SUCCESS)

    def _did_in_context(self, name: str, *args: Any) -> Result:
        """For calls that the driver refuses without a context: seen of tensor maps, H200, 580.159.04, 2026-11-30."""
        return self._did(name, *args) if self.stack else Result.INVALID_CONTEXT

    def CUlaunchConfig(self) -> SimpleNamespace:
        return SimpleNamespace(attrs=[], numAttrs=0)

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(id=None, value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuInit(self, flags: int) -> tuple[Result]:
        return (self._did("cuInit", flags),)

    def cuDriverGetVersion(self) -> tuple[Result, int]:
        return gives(self._did("cuDriverGetVersion"), self.version)

    def cuGetErrorName(self, result: Result) -> tuple[Result, bytes]:
        return Result.SUCCESS, f"CUDA_ERROR_{result.name}".encode()

    def cuGetErrorString(self, result: Result) -> tuple[Result, bytes]:
        return Result.SUCCESS, result.name.lower().replace("_", " ").encode()

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, int]:
        if ordinal >= len(self.capabilities):
            return Result.INVALID_DEVICE, 0
        return gives(self._did("cuDeviceGet", ordinal), ordinal)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Result, bytes]:
        return Result.SUCCESS, b"Fake GPU\0\0\0"

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Result, int]:
        major, minor = self.capabilities[device]
        values = {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor}
        values |= {"MULTIPROCESSOR_COUNT": self.num_sms, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self.max_smem}
        return Result.SUCCESS, values[attribute.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuPointerGetAttribute(self, attribute: str, address: int) -> tuple[Result, int]:
        return gives(self._did("cuPointerGetAttribute", address), self.pointer_device)

    def cuCtxGetCurrent(self) -> tuple[Result, Any]:
        return gives(self.fail.get("cuCtxGetCurrent", Result.SUCCESS), Handle(self.stack[-1] if self.stack else 0))

    def cuCtxGetDevice(self) -> tuple[Result, int]:
        return (Result.SUCCESS, self.context_device[self.stack[-1]]) if self.stack else (Result.INVALID_CONTEXT, 0)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Result, Handle]:
        self.context_device[0x1000 + device] = device
        return gives(self._did("cuDevicePrimaryCtxRetain", device), Handle(0x1000 + device))

    def cuCtxPushCurrent(self, context: Handle) -> tuple[Result]:
        self.stack.append(int(context))
        return (self._did("cuCtxPushCurrent", int(context)),)

    def cuCtxPopCurrent(self) -> tuple[Result, Handle]:
        return gives(self._did("cuCtxPopCurrent"), Handle(self.stack.pop()))

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Result, str]:
        """Threads start in mode GLOBAL, in which FakeCuda refuses to load when `capturing`."""
        before = getattr(self._stacks, "mode", "CU_STREAM_CAPTURE_MODE_GLOBAL")
        self._stacks.mode = mode
        return Result.SUCCESS, before

    def _unsafe(self, name: str, *args: Any) -> Result:
        relaxed = getattr(self._stacks, "mode", None) == "CU_STREAM_CAPTURE_MODE_RELAXED"
        return self._did(name, *args) if relaxed or not self.capturing else Result.STREAM_CAPTURE_UNSUPPORTED

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> tuple[Result, Handle]:
        return gives(
            self._unsafe("cuLibraryLoadData", bytes(code)), Handle(0x3000 + len(self.named("cuLibraryLoadData")))
        )

    def cuLibraryGetKernel(self, library: Handle, name: bytes) -> tuple[Result, Handle]:
        return gives(self._did("cuLibraryGetKernel", name), Handle(0x4000 + len(self.named("cuLibraryGetKernel"))))

    def cuKernelSetAttribute(self, attribute: str, value: int, kernel: Handle, device: int) -> tuple[Result]:
        return (self._did("cuKernelSetAttribute", attribute, value, device),)

    def cuKernelGetFunction(self, kernel: Handle) -> tuple[Result, Handle]:
        return gives(self._unsafe("cuKernelGetFunction", int(kernel), self.stack[-1]), Handle(0x5000))

    def cuTensorMapEncodeTiled(self, *args: Any) -> tuple[Result, SimpleNamespace]:
        encoded = self.CUtensorMap()
        encoded.words[0], encoded.words[1] = args[2], 0xFFFFFFFF  # the address; bit 85 is set, with its neighbours
        rest = zlib.crc32(repr((args[:2], args[5:])).encode())
        for i, word in enumerate((*args[3], *args[4], rest)):
            encoded.words[2 + i] = word
        return gives(self._did_in_context("cuTensorMapEncodeTiled", *args), encoded)

    def cuTensorMapReplaceAddress(self, tensor_map: Any, address: int) -> tuple[Result]:
        tensor_map.words[0], tensor_map.words[1] = address, 0xFFFFFFFF
        return (self._did("cuTensorMapReplaceAddress", address),)

    class CUtensorMap:
        """128 bytes of its own, or at an address."""

        def __init__(self, address: int = 0) -> None:
            kind = ctypes.c_uint64 * 16
            self.words = kind.from_address(address) if address else kind()

        def getPtr(self) -> int:
            return ctypes.addressof(self.words)

    def cuLaunchKernelEx(self, config: SimpleNamespace, kernel: Handle, params: int, extra: int) -> tuple[Result]:
        context = self.stack[-1] if self.stack else 0
        self.launches.append(SimpleNamespace(**vars(config), kernel=int(kernel), params=params, context=context))
        return (self._did("cuLaunchKernelEx", config.gridDimX, config.hStream, context),)


def read_arguments(params_address: int, kinds: tuple[str, ...]) -> list[Any]:
    """What a kernel would find through `kernelParams`."""
    formats = {"pointer": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
    pointers = (ctypes.c_uint64 * len(kinds)).from_address(params_address)
    return [
        ctypes.string_at(p, 128) if kind == "tensor_map" else formats[kind].from_address(p).value
        for p, kind in zip(pointers, kinds, strict=True)
    ]
