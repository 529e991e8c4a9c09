"""The CUDA driver behind the launcher, through cuda.bindings, imported when it is first needed.

Contexts. Kernels are loaded as context-independent libraries, so one handle serves every device and context. A call
uses the thread's current context when that belongs to the tensors' device; otherwise it pushes the device's primary
context (the one that torch and the CUDA runtime use) and pops it again. A caller's current context is never changed.

Lifetime. Libraries stay loaded until the process ends: unloading at garbage collection would break a graph capture
that happens to run at that moment, or a captured graph that still refers to the kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import DriverError, ProblemError
from ..manifest import KernelRecord
from ..manifest_io import check_cubin
from . import cuda_errors
from .cuda_launch import ArgumentBlock, CudaLaunch, MapBytes, Shared, clear_bit_85, layout_of, needs_bit_85_cleared
from .driver import ARCH_CAPABILITY, Device, PackedLaunch, TensorMapArgs
from .tensors import HOST, TensorArg

DEFAULT_SMEM_BYTES = 48 * 1024  # of dynamic shared memory, without opting in


LastMap = tuple[TensorMapArgs, tuple[Any, ...], bytes]
"""A tensor map of the last launch: what was asked for, all of it but names and address, and its 128 bytes."""


INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class CudaKernel:
    """A kernel that is loaded: its handle, and the contexts of its device in which the driver holds its code."""

    __slots__ = ("configs", "contexts", "frozen", "handle", "maps", "name", "where")

    def __init__(self, handle: Any, name: str, where: str) -> None:
        self.handle, self.name, self.where = handle, name, where
        self.contexts: set[int] = set()
        self.configs: dict[Any, dict[int, Any]] = {}  # grid -> stream -> launch configuration
        self.maps: dict[int, LastMap] = {}  # by parameter
        self.frozen = False


class CudaDriver:
    """`Driver` for CUDA devices. Thread-safe. `api` stands in for ``cuda.bindings.driver`` in tests."""

    image = "cubin"

    def __init__(self, api: Any = None) -> None:
        self._given_api = api
        self._api: Any = None
        self._lock = threading.RLock()
        self._devices: dict[int, Device] = {}
        self._primary: dict[int, Any] = {}
        self._libraries: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str, int], CudaKernel] = {}
        self._constants: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    # ---- start-up

    @property
    def api(self) -> Any:
        """``cuda.bindings.driver``, initialised. Raises DriverError: not installed, no driver, no device."""
        return self._api if self._api is not None else self._start()

    def _start(self) -> Any:
        with self._lock:
            if self._api is None:
                api = self._given_api if self._given_api is not None else _import_bindings()
                try:
                    (result,) = api.cuInit(0)
                except (RuntimeError, OSError) as e:
                    raise DriverError(
                        f"cuda: no NVIDIA driver: libcuda.so.1 cannot be loaded ({e}); install the NVIDIA driver, "
                        f"or use the simulator"
                    ) from e
                if int(result):
                    raise cuda_errors.error(api, result, "cuda: cuInit")
                self._api = api
            return self._api

    def check(self, returned: tuple[Any, ...], where: str) -> Any:
        """The value of a driver call's ``(result, value...)``; raises DriverError naming `where` if it failed."""
        if int(returned[0]):
            raise cuda_errors.error(self.api, returned[0], where)
        return returned[1] if len(returned) == 2 else returned[1:]

    def check_version(self, min_driver: int, where: str) -> None:
        """Refuse a driver older than branch `min_driver`. Raises DriverError with both versions."""
        have = int(self.check(self.api.cuDriverGetVersion(), "cuda: cuDriverGetVersion"))
        need = cuda_errors.required_cuda(min_driver)
        if have < need:
            branch = cuda_errors.branch_of(have)
            older = f"branch {branch}" if branch else "older than branch 525"
            raise DriverError(
                f"{where}: this machine's NVIDIA driver supports CUDA {cuda_errors.version_text(have)} ({older}); the "
                f"bundle's kernels need driver {min_driver} or newer (CUDA {cuda_errors.version_text(need)}); update it"
            )

    # ---- devices and contexts

    def device(self, ordinal: int) -> Device:
        """Properties of CUDA device `ordinal`, read once. Raises DriverError."""
        known = self._devices.get(ordinal)
        return known if known is not None else self._read_device(ordinal)

    def _read_device(self, ordinal: int) -> Device:
        api, where = self.api, f"device {ordinal}"
        handle = self.check(api.cuDeviceGet(ordinal), where)
        attribute = api.CUdevice_attribute

        def read(name: str) -> int:
            key = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(self.check(api.cuDeviceGetAttribute(key, handle), f"{where}: {name.lower()}"))

        name = self.check(api.cuDeviceGetName(128, handle), where)
        device = Device(
            ordinal=ordinal,
            name=name.split(b"\0", 1)[0].decode(),
            compute_capability=(read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
            num_sms=read("MULTIPROCESSOR_COUNT"),
            max_dynamic_smem_bytes=read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        )
        with self._lock:
            return self._devices.setdefault(ordinal, device)

    def device_of(self, tensors: Mapping[str, TensorArg]) -> Device:
        """The device that holds the tensors: as they say, else as the driver says of the first pointer."""
        for name, tensor in tensors.items():
            if tensor.device == HOST:
                raise ProblemError(f"{name}: host memory; a CUDA launch needs device memory; copy it to the device")
            if tensor.device is not None:
                return self.device(tensor.device)
        for name, tensor in tensors.items():
            if tensor.numel:
                return self.device(self._owner(name, tensor.address))
        return self.device(0)

    def _owner(self, name: str, address: int) -> int:
        key = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        result, ordinal = self.api.cuPointerGetAttribute(key, address)
        if int(result) or int(ordinal) < 0:
            raise ProblemError(f"{name}: {address:#x} is no device memory of this process; pass a device pointer")
        return int(ordinal)

    @contextmanager
    def context(self, ordinal: int) -> Iterator[int]:
        """A context of device `ordinal` is current inside; yields its handle. The caller's context is restored."""
        api, where = self.api, f"device {ordinal}"
        current = self.check(api.cuCtxGetCurrent(), where)
        if int(current) and int(self.check(api.cuCtxGetDevice(), where)) == ordinal:
            yield int(current)
            return
        primary = self._primary_context(ordinal)
        self.check(api.cuCtxPushCurrent(primary), where)
        try:
            yield int(primary)
        finally:
            self.check(api.cuCtxPopCurrent(), where)

    def _primary_context(self, ordinal: int) -> Any:
        with self._lock:
            if ordinal not in self._primary:
                where = f"device {ordinal}"
                handle = self.check(self.api.cuDeviceGet(ordinal), where)
                self._primary[ordinal] = self.check(self.api.cuDevicePrimaryCtxRetain(handle), where)
            return self._primary[ordinal]

    # ---- kernels

    def load(
        self,
        record: KernelRecord,
        image: bytes,
        device: Device,
        where: str,
        line_map: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> CudaKernel:
        """Load a kernel into the context that `device` has now, and opt in to its shared memory there.

        `image`: bytes whose digest was checked; `where`: their file. Its ELF must agree with the record before the
        driver sees it: a driver given a damaged image can crash. Raises BundleError or DriverError.
        """
        key = (record.id, record.cubin.sha256, device.ordinal)
        with self._lock:
            before = self._set_capture_mode(self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                kernel = self._kernels.get(key)
                if kernel is None:
                    self._check_image(record, image, device, where)
                    kernel = CudaKernel(self._get_kernel(record, image, where), record.id, where)
                    self._opt_in(kernel, record, device)
                    self._kernels[key] = kernel
                with self.context(device.ordinal) as context:
                    self.enter(kernel, context)
            finally:
                self._set_capture_mode(before)
            return kernel

    def _set_capture_mode(self, mode: Any) -> Any:
        """Set what this thread may call while a stream of the process is being captured into a graph; returns what was.

        By default the driver forbids what might synchronise. Calls that load a kernel have no part in the capture: they
        are made in the relaxed mode, which permits them.
        """
        return self.check(self.api.cuThreadExchangeStreamCaptureMode(mode), "cuda: capture mode")

    def _check_image(self, record: KernelRecord, image: bytes, device: Device, where: str) -> None:
        if ARCH_CAPABILITY.get(record.arch) != device.compute_capability:
            raise DriverError(f"{where}: built for {record.arch}, which {device.describe()} cannot run; build for it")
        check_cubin(image, record, where)
        if record.launch.dynamic_smem_bytes > device.max_dynamic_smem_bytes:
            raise DriverError(
                f"{record.id}: needs {record.launch.dynamic_smem_bytes} B of dynamic shared memory, "
                f"{device.describe()} allows {device.max_dynamic_smem_bytes}; build with smaller tiles or fewer stages"
            )

    def _get_kernel(self, record: KernelRecord, image: bytes, where: str) -> Any:
        library = self._libraries.get(record.cubin.sha256)
        if library is None:
            library = self.check(self.api.cuLibraryLoadData(image, [], [], 0, [], [], 0), f"{where}: cuLibraryLoadData")
            self._libraries[record.cubin.sha256] = library
        return self.check(
            self.api.cuLibraryGetKernel(library, record.symbol.encode()), f"{where}: kernel {record.symbol}"
        )

    def _opt_in(self, kernel: CudaKernel, record: KernelRecord, device: Device) -> None:
        size = record.launch.dynamic_smem_bytes
        if size <= DEFAULT_SMEM_BYTES:
            return
        api = self.api
        handle = self.check(api.cuDeviceGet(device.ordinal), f"device {device.ordinal}")
        key = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.check(
            api.cuKernelSetAttribute(key, size, kernel.handle, handle), f"{kernel.where}: {size} B of shared memory"
        )

    def enter(self, kernel: CudaKernel, context: int) -> None:
        """Make the driver load the kernel's code into the current context, unless it has. Raises DriverError."""
        if context in kernel.contexts:
            return
        if kernel.frozen:
            raise DriverError(
                f"{kernel.name}: not loaded in the current context, and the bundle is frozen; preload() it there first"
            )
        before = self._set_capture_mode(self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            self.check(self.api.cuKernelGetFunction(kernel.handle), f"{kernel.where}: load into the context")
        finally:
            self._set_capture_mode(before)
        kernel.contexts.add(context)

    # ---- launches

    def bind(self, kernel: CudaKernel, packed: PackedLaunch, device: Device) -> CudaLaunch:
        """Encode the tensor maps and lay the arguments out. Raises DriverError."""
        result, current = self.api.cuCtxGetCurrent()
        context = 0 if result else int(current)
        if context not in kernel.contexts:
            with self.context(device.ordinal) as context:
                self.enter(kernel, context)
        block = ArgumentBlock(layout_of(packed.kinds))
        block.fill(packed.args, self.maps(kernel, packed.args, block.layout.maps, device))
        return CudaLaunch(Shared(self, kernel, packed, device, context), block)

    def maps(self, kernel: CudaKernel, args: tuple[Any, ...], indices: tuple[int, ...], device: Device) -> list[bytes]:
        """128 bytes of each tensor map, those at `indices` among a launch's arguments. Raises DriverError.

        Maps of the last launch serve again: as they are where nothing changed, moved where only the address did.
        """
        found: list[LastMap] = []
        for index in indices:
            wanted, last = args[index], kernel.maps.get(index)
            if last is not None and last[0] is wanted:
                found.append(last)
                continue
            geometry = (wanted[2], *wanted[4:])
            for _, known, data in found if last is None else [last, *found]:
                if known == geometry:
                    data = self._moved(wanted, data, device)
                    break
            else:
                data = self.encode(wanted, device)
            kernel.maps[index] = last = (wanted, geometry, data)
            found.append(last)
        return [last[2] for last in found]

    def encode(self, args: TensorMapArgs, device: Device) -> bytes:
        """The 128 bytes of a tensor map, by the driver. Raises DriverError."""
        api = self.api
        constants = self._constants.get(args[6:])
        if constants is None:
            constants = self._map_constants(args)
        element, rank, *rest = constants
        u64 = api.cuuint64_t
        result, encoded = self._in_context(
            device, api.cuTensorMapEncodeTiled, element[args[2]], rank, args[3], list(map(u64, args[4])),
            list(map(u64, args[5])), *rest,
        )  # fmt: skip
        if result:
            raise cuda_errors.error(
                api, result,
                f"{args.tensor}: tensor map of extents {args[4]}, strides {args[5]} bytes, box {args.box} at "
                f"{args.address:#x}",
            )  # fmt: skip
        return _bytes(encoded, args, device)

    def _in_context(self, device: Device, call: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
        """The results of a driver call that needs a context. Most threads have one: it is looked up only on refusal."""
        results = call(*args)
        if int(results[0]) != INVALID_CONTEXT:
            return results
        with self.context(device.ordinal):
            return call(*args)

    def _moved(self, args: TensorMapArgs, data: bytes, device: Device) -> bytes:
        """`encode` from the bytes of a map that differs in its address only, at half the cost. Raises DriverError."""
        api = self.api
        copied = api.CUtensorMap()
        MapBytes.from_address(int(copied.getPtr())).raw = data
        (result,) = self._in_context(device, api.cuTensorMapReplaceAddress, copied, args.address)
        if result:
            raise cuda_errors.error(api, result, f"{args.tensor}: tensor map at {args.address:#x}")
        return _bytes(copied, args, device)

    def _map_constants(self, args: TensorMapArgs) -> tuple[Any, ...]:
        """What maps of one parameter share, as the driver takes it: elements, rank, then all after the strides."""
        api = self.api
        types = api.CUtensorMapDataType
        found = self._constants[args[6:]] = (
            {element: getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{name}") for element, name in _ELEMENTS.items()},
            len(args.box),
            [api.cuuint32_t(n) for n in args.box],
            [api.cuuint32_t(1) for _ in args.box],
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{args.swizzle.upper()}"),
            getattr(api.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_PROMOTIONS[args.l2_promotion]}"),
            getattr(api.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{_FILLS[args.fill]}"),
        )
        return found


def _bytes(encoded: Any, args: TensorMapArgs, device: Device) -> bytes:
    """The bytes of a CUtensorMap that the driver wrote for `args`."""
    address = int(encoded.getPtr())
    if device.compute_capability[0] >= 10 and needs_bit_85_cleared(args, device):
        clear_bit_85(address)
    found: bytes = MapBytes.from_address(address).raw
    return found


_ELEMENTS = {"bf16": "BFLOAT16", "fp16": "FLOAT16"}
_PROMOTIONS = {"none": "NONE", "64B": "L2_64B", "128B": "L2_128B", "256B": "L2_256B"}
_FILLS = {"zero": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}


def _import_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise DriverError(
            f"cuda: cuda.bindings cannot be imported ({e}); the launcher needs it: pip install 'cuda-bindings>=13,<14'"
        ) from e
    return driver
