"""Simulated memory: sparse 64-bit global memory; a CTA's shared and tensor memory with their access history."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SimError
from .codegen.layout import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from .findings import Fault

SMEM_POISON = 0xFF
TMEM_POISON = 0x7FBADBAD
TMEM_LANES = 128
TMEM_COLS = 512
GENERIC_LIMIT = 1 << 49
_UNITS: dict[int, Any] = {4: np.uint32, 8: np.uint64, 16: np.complex128}  # moved as one element


class Allocation:
    """A named range of global memory backed by a uint8 array."""

    def __init__(self, name: str, address: int, data: NDArray[np.uint8], writable: bool) -> None:
        self.name, self.address, self.data, self.writable = name, address, data, writable
        self.end = address + data.size
        self.host = data.ctypes.data

    def units(self, size: int) -> NDArray[Any]:
        """The bytes as whole units of 4, 8 or 16; the host address must be a multiple of `size`."""
        return self.data[: self.data.size // size * size].view(_UNITS[size])


class GlobalMemory:
    """Sparse 64-bit global memory made of named allocations at addresses that the caller chooses.

    Reads and writes outside every allocation, or across the end of one, are faults that name the nearest one.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._allocs: list[Allocation] = []
        self._next = 0x1_0000_0000

    def map(self, name: str, array: NDArray[np.generic], address: int | None = None, writable: bool = True) -> int:
        """Place `array` (C-contiguous; its memory is used, not copied) at `address`, 256-aligned and far from others
        when None. Returns the address. Raises SimError for overlaps and for arrays that cannot be mapped."""
        if not array.flags.c_contiguous:
            raise SimError(f"global memory {name!r}: the array is not C-contiguous; pass a contiguous copy")
        data = array.reshape(-1).view(np.uint8)
        if address is None:
            address = self._next
        if address < 0 or address + data.size > GENERIC_LIMIT:
            raise SimError(f"global memory {name!r}: address {address:#x} is outside [0, {GENERIC_LIMIT:#x})")
        if address < SHARED_WINDOW + WINDOW_BYTES and address + data.size > LOCAL_WINDOW:
            raise SimError(
                f"global memory {name!r}: {address:#x} lies in the windows of other state spaces; choose another"
            )
        at = bisect.bisect_right(self._starts, address)
        for other in self._allocs[max(0, at - 1) : at + 1]:
            if other.address < address + max(1, data.size) and address < other.end:
                raise SimError(f"global memory {name!r}: {data.size} bytes at {address:#x}: overlaps {other.name!r}")
        self._starts.insert(at, address)
        self._allocs.insert(at, Allocation(name, address, data, writable))
        if address + data.size > self._next - 0x10000 and address < 1 << 44:
            self._next = ((address + data.size + 0x1FFFF) // 0x10000) * 0x10000
        return address

    def holds(self, address: int) -> bool:
        """Whether an allocation holds the byte at `address`."""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._allocs[at].end

    def find(self, address: int, size: int, what: str, write: bool = False) -> Allocation:
        """The allocation that holds [address, address + size). Raises Fault."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            alloc = self._allocs[at]
            if address + size <= alloc.end:
                if write and not alloc.writable:
                    raise Fault("global-readonly", f"{what} at {address:#x}: {alloc.name!r} is read-only")
                return alloc
        raise Fault(
            "global-bounds",
            f"{what} of {size} bytes at {address:#x} is outside every allocation; {self._nearest(address, at)}",
        )

    def _nearest(self, address: int, at: int) -> str:
        if not self._allocs:
            return "nothing is mapped"
        best = min(self._allocs[max(0, at) : at + 2], key=lambda a: min(abs(address - a.address), abs(address - a.end)))
        if address >= best.end:
            return (
                f"nearest is {best.name!r} [{best.address:#x}, {best.end:#x}), {address - best.end} bytes past its end"
            )
        if address >= best.address:
            return f"it crosses the end of {best.name!r} [{best.address:#x}, {best.end:#x})"
        before = best.address - address
        return f"nearest is {best.name!r} [{best.address:#x}, {best.end:#x}), {before} bytes before its start"

    def gather(self, addresses: NDArray[np.int64], size: int, what: str) -> NDArray[np.uint8]:
        """uint8 [n, size] at the addresses."""
        if not addresses.size:
            return np.empty((0, size), np.uint8)
        low, high = int(addresses.min()), int(addresses.max())
        at = bisect.bisect_right(self._starts, low) - 1
        if at >= 0 and high + size <= self._allocs[at].end:
            return _rows(self._allocs[at], addresses, size)
        out = np.empty((addresses.size, size), np.uint8)
        for k, address in enumerate(addresses.tolist()):
            alloc = self.find(address, size, what)
            out[k] = alloc.data[address - alloc.address : address - alloc.address + size]
        return out

    def scatter(self, addresses: NDArray[np.int64], values: NDArray[np.uint8], what: str) -> None:
        """Write uint8 [n, size] at the addresses, in order."""
        size = values.shape[1]
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max())
        at = bisect.bisect_right(self._starts, low) - 1
        if at >= 0 and high + size <= self._allocs[at].end:
            alloc = self.find(low, size, what, write=True)
            offset = addresses - alloc.address
            if size in _UNITS and alloc.host % size == 0 and not np.any(offset % size):
                alloc.units(size)[offset // size] = np.ascontiguousarray(values).view(_UNITS[size])[:, 0]
            else:
                alloc.data[offset[:, None] + np.arange(size)] = values
            return
        for k, address in enumerate(addresses.tolist()):
            alloc = self.find(address, size, what, write=True)
            alloc.data[address - alloc.address : address - alloc.address + size] = values[k]


def _rows(alloc: Allocation, addresses: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    offset = addresses - alloc.address
    if size in _UNITS and alloc.host % size == 0 and not np.any(offset % size):
        return alloc.units(size)[offset // size].view(np.uint8).reshape(-1, size)
    return alloc.data[offset[:, None] + np.arange(size)]


class History:
    """Who last wrote, and who has read, each cell of a memory: the state of the happens-before check.

    An access is (component, clock): component is a source of ordered events (a warp, a tensor-core queue, the phases of
    an mbarrier, a warp's bulk-store groups ...). An access happens before an operation iff the operation's vector clock
    has at least that clock for that component. Component 0 means "never written". `pc`s are instruction indices.
    """

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.w_comp = np.zeros(cells, np.int32)
        self.w_clock = np.zeros(cells, np.uint32)
        self.w_pc = np.zeros(cells, np.int32)
        self.r_rows: dict[int, int] = {}  # component -> row
        self.r_comps: list[int] = []
        self.r_clock = np.zeros((0, cells), np.uint32)
        self.r_pc = np.zeros((0, cells), np.int32)

    def row(self, comp: int) -> int:
        """Row of a reading component, made on first use."""
        if comp not in self.r_rows:
            if len(self.r_comps) == len(self.r_clock):
                grown = np.zeros((2 * len(self.r_comps) + 8, self.cells), np.uint32)
                grown[: len(self.r_comps)] = self.r_clock[: len(self.r_comps)]
                self.r_clock = grown
                grown_pc = np.zeros(grown.shape, np.int32)
                grown_pc[: len(self.r_comps)] = self.r_pc[: len(self.r_comps)]
                self.r_pc = grown_pc
            self.r_rows[comp] = len(self.r_comps)
            self.r_comps.append(comp)
        return self.r_rows[comp]


class SharedMemory:
    """Shared memory of one CTA: bytes at CTA-local addresses, 4-byte cells of history."""

    def __init__(self, size: int) -> None:
        self.size = size
        backing = np.full(-(-size // 16) * 16 + 16, SMEM_POISON, np.uint8)
        start = -backing.ctypes.data % 16
        self.bytes = backing[start : start + -(-size // 16) * 16]
        self.words = self.bytes.view(np.uint32)
        self.chunks = self.bytes.view(np.complex128)
        self.history = History(self.bytes.size // 4)
        self.mbar_words = np.zeros(self.bytes.size // 4, bool)

    def check(self, address: int, size: int, align: int, what: str) -> None:
        """Raise Fault unless [address, +size) is inside and `address` is a multiple of `align`."""
        if address % align:
            raise Fault("smem-misaligned", f"{what} at shared address {address:#x}: not a multiple of {align}")
        if address < 0 or address + size > self.size:
            raise Fault(
                "smem-bounds", f"{what} of {size} bytes at shared address {address:#x}: the CTA has [0, {self.size:#x})"
            )


class TensorMemory:
    """TMEM of one CTA: 128 lanes x 512 columns; history cells are 16-lane groups x columns."""

    def __init__(self) -> None:
        self.cells = np.full((TMEM_LANES, TMEM_COLS), TMEM_POISON, np.uint32)
        self.history = History(8 * TMEM_COLS)
        self.allocated = np.zeros(TMEM_COLS, bool)
        self.blocks: dict[int, int] = {}  # first column -> columns
        self.may_allocate = True

    def allocate(self, cols: int) -> int | None:
        """First column of a free block of `cols`, or None."""
        for start in range(0, TMEM_COLS - cols + 1, 32):
            if not self.allocated[start : start + cols].any():
                self.allocated[start : start + cols] = True
                self.blocks[start] = cols
                return start
        return None

    def release(self, start: int, cols: int) -> None:
        if self.blocks.get(start) != cols:
            have = ", ".join(f"{s}+{n}" for s, n in sorted(self.blocks.items())) or "none"
            raise Fault("tmem-dealloc", f"dealloc of columns {start}+{cols}: the allocations are {have}")
        del self.blocks[start]
        self.allocated[start : start + cols] = False
        self.cells[:, start : start + cols] = TMEM_POISON
        self.history.w_comp.reshape(8, TMEM_COLS)[:, start : start + cols] = 0

    def check(self, lane0: int, lanes: int, col0: int, cols: int, what: str) -> None:
        """Raise Fault unless the rectangle lies in allocated columns."""
        if lane0 < 0 or lane0 + lanes > TMEM_LANES or col0 < 0 or col0 + cols > TMEM_COLS:
            raise Fault(
                "tmem-bounds",
                f"{what}: lanes {lane0} + {lanes} x columns {col0} + {cols} of {TMEM_LANES} x {TMEM_COLS}",
            )
        if not self.allocated[col0 : col0 + cols].all():
            raise Fault("tmem-unallocated", f"{what}: columns [{col0}, {col0 + cols}) are not all allocated")
