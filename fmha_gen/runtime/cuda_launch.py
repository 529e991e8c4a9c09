"""A CUDA launch with its arguments laid out in memory: what remains per call is a context check and one driver call."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import TYPE_CHECKING, Any

from ..errors import DriverError
from . import arguments, cuda_errors
from .driver import ADDRESS_ORDER, Addresses, Device, PackedLaunch, TensorMapArgs
from .streams import MAX_HANDLE, stream_handle

if TYPE_CHECKING:
    from .cuda import CudaDriver, CudaKernel

MAP_BYTES = 128
MapBytes: Any = ctypes.c_char * MAP_BYTES
"""Of a tensor map at an address: `MapBytes.from_address(address).raw`, a third of what memmove and string_at take."""
MAP_ALIGN = 64
SMALL_MAP_BYTES = 128 * 1024
_QWORD1_BIT = 1 << 21  # "bit 85" of a tensor map


def needs_bit_85_cleared(args: TensorMapArgs, device: Device) -> bool:
    """Whether the driver may have set bit 85 of this map wrongly.

    Some drivers set it for tensors under 128 KiB that are not dense, which gives sporadic illegal accesses on Blackwell
    (NVIDIA release notes of 595.71.05). The bit means that the tensor spans 128 KiB or more, so clearing it for smaller
    ones is right with any driver; it is reserved before Blackwell.
    """
    return device.compute_capability[0] >= 10 and args.span_bytes < SMALL_MAP_BYTES


def clear_bit_85(map_address: int) -> None:
    """Clear bit 85 (bit 21 of the second 64-bit word) of the tensor map in memory at `map_address`."""
    word = ctypes.c_uint64.from_address(map_address + 8)
    word.value &= ~_QWORD1_BIT


_FORMATS = {"tensor_map": f"{MAP_BYTES}s", "pointer": "Q", "i64": "q", "i32": "i4x", "f32": "f4x"}


# Enough for the arguments of a dense kernel. Made at import: a new type takes 40 us, a kernel's first launch 1000.
BLOCK_BYTES = 1024
_Block: Any = ctypes.c_char * BLOCK_BYTES


class Layout:
    """Where the arguments of one list of kinds lie in a block, and the pointers to them behind.

    An array of pointers (`kernelParams`) is right whatever offsets the cubin has; a packed buffer is not, since offsets
    depend on the architecture. Maps lie on 64-byte boundaries, everything else takes 8 bytes.

    maps: indices of the tensor maps. all: packs a whole block.
    """

    __slots__ = (
        "all", "block_type", "kinds", "maps", "num_pointer_bytes", "offsets", "pointers_at", "_ones", "_steps"
    )  # fmt: skip

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        offsets, size, fields = [], 0, "="
        for kind in kinds:
            align, kind_bytes = (MAP_ALIGN, MAP_BYTES) if kind == "tensor_map" else (8, 8)
            padding = -size % align
            offsets.append(size + padding)
            size += padding + kind_bytes
            fields += f"{padding}x{_FORMATS[kind]}"
        self.offsets, self.pointers_at = tuple(offsets), size
        self.maps = tuple(i for i, kind in enumerate(kinds) if kind == "tensor_map")
        self.num_pointer_bytes = 8 * len(kinds)
        self.all = struct.Struct(f"{fields}{self.num_pointer_bytes}s")
        block_bytes = size + self.num_pointer_bytes + MAP_ALIGN
        self.block_type: Any = _Block if block_bytes <= BLOCK_BYTES else ctypes.c_char * block_bytes
        self._ones = int.from_bytes(struct.pack(f"<{len(kinds)}Q", *[1] * len(kinds)), "little")
        self._steps = int.from_bytes(struct.pack(f"<{len(kinds)}Q", *offsets), "little")

    def pointers(self, base: int) -> bytes:
        """The array of pointers to the arguments of a block at `base`: 64-bit sums without carries, all at once."""
        return (base * self._ones + self._steps).to_bytes(self.num_pointer_bytes, "little")


MAX_GRIDS = 256  # per kernel, of launch configurations that are kept

layout_of = functools.lru_cache(maxsize=64)(Layout)


class ArgumentBlock:
    """Kernel arguments in memory, and the array of pointers to them. Nothing is written once the block is in use.

    base: address of the first argument, 64-byte aligned. params: what the driver takes as `kernelParams`.
    """

    __slots__ = ("base", "layout", "memory", "params", "shift")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.memory = layout.block_type()
        start = ctypes.addressof(self.memory)
        self.base = base = -(-start // MAP_ALIGN) * MAP_ALIGN
        self.shift = base - start
        self.params = base + layout.pointers_at

    def fill(self, args: tuple[Any, ...], maps: list[bytes]) -> None:
        """Write all arguments, and the pointers to them. maps: of the tensor maps, in the layout's order."""
        layout, values = self.layout, list(args)
        for index, data in zip(layout.maps, maps, strict=True):
            values[index] = data
        layout.all.pack_into(self.memory, self.shift, *values, layout.pointers(self.base))

    def copy(self) -> ArgumentBlock:
        """A block of its own with the same arguments."""
        layout = self.layout
        block = ArgumentBlock(layout)
        ctypes.memmove(block.base, self.base, layout.pointers_at)
        ctypes.memmove(block.params, layout.pointers(block.base), layout.num_pointer_bytes)
        return block


class Shared:
    """What launches of one geometry share: everything but addresses.

    configs: stream -> launch configuration, the same for all launches of a grid. scratch: each thread's `Moves`.
    """

    __slots__ = (
        "configs", "context", "current", "device", "driver", "handle", "kernel", "launch", "packed", "scratch"
    )  # fmt: skip

    def __init__(
        self, driver: CudaDriver, kernel: CudaKernel, packed: PackedLaunch, device: Device, context: int
    ) -> None:
        self.driver, self.kernel, self.packed, self.device, self.context = driver, kernel, packed, device, context
        self.launch, self.current, self.handle = driver.api.cuLaunchKernelEx, driver.api.cuCtxGetCurrent, kernel.handle
        configs = kernel.configs.get(packed.grid)
        if configs is None:
            if len(kernel.configs) >= MAX_GRIDS:
                kernel.configs = {}
            configs = kernel.configs.setdefault(packed.grid, {})
        self.configs = configs
        self.scratch: dict[int, Moves] = {}


class CudaLaunch:
    """A prepared launch on one device: calling it is a context check and one driver call. Any thread may call it."""

    __slots__ = ("_block", "_params", "_shared")

    def __init__(self, shared: Shared, block: ArgumentBlock) -> None:
        self._shared, self._block, self._params = shared, block, block.params

    def __call__(self, stream: int, params: int = 0) -> None:
        """Launch on the stream with this handle (0: the legacy default stream). Raises DriverError.

        params: `kernelParams` of another block to use, 0 for the launch's own.
        """
        shared = self._shared
        try:
            config = shared.configs.get(stream)
        except TypeError:
            raise arguments.wrong("stream", stream, "the raw handle of a CUDA stream as an int") from None
        if config is None:
            config = self._config(stream)
        result, current = shared.current()
        if not result and int(current) == shared.context:
            (result,) = shared.launch(config, shared.handle, params or self._params, 0)
        else:
            with shared.driver.context(shared.device.ordinal) as context:
                shared.driver.enter(shared.kernel, context)
                (result,) = shared.launch(config, shared.handle, params or self._params, 0)
        if result:
            raise self._error(result)

    def rebind(self, addresses: Addresses) -> CudaLaunch:
        """The same launch on tensors of the same geometry at other addresses. Raises DriverError."""
        return CudaLaunch(self._shared, self._moved(addresses).copy())

    def launch_at(self, addresses: Addresses, stream: int) -> None:
        """Launch once on tensors of the same geometry at other addresses, keeping nothing. Raises DriverError.

        The driver copies the arguments during the call, so that a thread's scratch block can be used again.
        """
        self(stream, self._moved(addresses).params)

    def _moved(self, addresses: Addresses) -> ArgumentBlock:
        """This thread's scratch block, with these addresses."""
        scratch, thread = self._shared.scratch, threading.get_ident()
        moves = scratch.get(thread)
        if moves is None:
            moves = scratch[thread] = Moves(self._shared, self._block.copy())
        return moves.write(addresses)

    def _config(self, stream: int) -> Any:
        """A launch configuration per stream, so that calls from several threads share nothing that changes."""
        shared = self._shared
        api, packed = shared.driver.api, shared.packed
        handle = arguments.integer("stream", stream_handle(stream, None), "a raw handle", 0, MAX_HANDLE)
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = packed.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = packed.block
        config.sharedMemBytes = packed.dynamic_smem_bytes
        config.hStream = api.CUstream(handle)
        if packed.cluster != (1, 1, 1):
            attribute = api.CUlaunchAttribute()
            attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster = attribute.value.clusterDim
            cluster.x, cluster.y, cluster.z = packed.cluster
            config.attrs, config.numAttrs = [attribute], 1
        else:
            config.numAttrs = 0
        if len(shared.configs) > 64:  # streams come and go; handles are reused
            shared.configs.clear()
        shared.configs[stream] = config
        return config

    def _error(self, result: Any) -> DriverError:
        shared = self._shared
        packed = shared.packed
        return cuda_errors.error(
            shared.driver.api, result,
            f"{packed.kernel}: launch of grid {packed.grid}, block {packed.block}, cluster {packed.cluster}, "
            f"{packed.dynamic_smem_bytes} B shared memory on {shared.device.describe()} from {shared.kernel.where}",
        )  # fmt: skip


class Moves:
    """Writes new addresses into a block of arguments; for one thread.

    cuTensorMapReplaceAddress gives the bytes of a fresh encoding at a third of its cost; bit 85 is cleared again.
    """

    __slots__ = ("_addresses", "_api", "_block", "_maps", "_pointers")

    def __init__(self, shared: Shared, block: ArgumentBlock) -> None:
        self._api, self._block = shared.driver.api, block
        self._addresses: Addresses = ()  # of the last write
        self._maps: list[tuple[int, Any, int]] = []  # index into Addresses, the map, its address if bit 85 counts
        self._pointers: list[tuple[int, int]] = []  # index into Addresses, offset in the block's memory
        packed = shared.packed
        for name, kind, arg, offset in zip(packed.names, packed.kinds, packed.args, block.layout.offsets, strict=True):
            if isinstance(arg, TensorMapArgs):
                at = block.base + offset
                small = needs_bit_85_cleared(arg, shared.device)
                self._maps.append((ADDRESS_ORDER.index(arg.memory), self._api.CUtensorMap(at), at if small else 0))
            elif kind == "pointer" and arg:
                self._pointers.append((ADDRESS_ORDER.index(name), block.shift + offset))

    def write(self, addresses: Addresses) -> ArgumentBlock:
        """The block with these addresses. Raises DriverError."""
        replace, block, before = self._api.cuTensorMapReplaceAddress, self._block, self._addresses
        self._addresses = ()  # what an error leaves behind is no known state
        for index, view, small in self._maps:
            if before and before[index] == addresses[index]:
                continue
            (result,) = replace(view, addresses[index])
            if result:
                name = ADDRESS_ORDER[index]
                raise cuda_errors.error(self._api, result, f"{name}: tensor map at {addresses[index]:#x}")
            if small:
                clear_bit_85(small)
        for index, offset in self._pointers:
            _POINTER.pack_into(block.memory, offset, addresses[index])
        self._addresses = addresses
        return block


_POINTER = struct.Struct("Q")
