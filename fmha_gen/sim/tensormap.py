"""Tensor maps: the simulator's form of a CUtensorMap, the driver's rules for one, and the addresses a box copy touches.

Sources: cuTensorMapEncodeTiled (CUDA driver API) for the rules, the tensor-copy sections of the PTX ISA for the shared
image. The image of a box is dense with dimension 0 fastest; the swizzle permutes 16-byte chunks by an exclusive-or of
*absolute* shared address bits: bits 4.. ^= bits 7.., over 1, 2 or 3 bits for spans of 32, 64 and 128 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

PARAM_BYTES = 128  # a tensor map is a 128-byte, 64-byte aligned kernel parameter
SMEM_ALIGN_BYTES = 128  # shared address of any tensor copy
CHUNK_BYTES = 16  # the swizzle's unit

ELEMENT_BYTES = {
    "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "bf16": 2,
    "f32": 4, "f64": 8, "f32_ftz": 4, "tf32": 4, "tf32_ftz": 4,
}  # fmt: skip
SWIZZLE_BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
# Quiet NaN of the floating-point elements, as little-endian bit patterns; fill "nan" is refused for the others.
_NAN_BITS = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF,
             "f32_ftz": 0x7FFFFFFF, "tf32": 0x7FFFFFFF, "tf32_ftz": 0x7FFFFFFF}  # fmt: skip
_MAX_EXTENT = 1 << 32
_STRIDE_LIMIT = 1 << 40


class TensorMapError(ValueError):
    """A tensor map that the driver refuses, or a copy that the hardware does not accept; the text names the rule."""


@dataclass(frozen=True)
class BoxPlan:
    """Where one box copy reads and writes, in units of `unit_bytes` (16, or one element where chunks straddle a bound).

    smem: int64 [n], absolute shared byte address of each unit, after the swizzle.
    gmem: int64 [n], global byte address of each unit (meaningless where not valid).
    valid: bool [n], or None when every unit is inside the tensor.
    box_bytes: bytes that a load counts on its mbarrier (out-of-bounds parts count too).
    """

    unit_bytes: int
    smem: NDArray[np.int64]
    gmem: NDArray[np.int64]
    valid: NDArray[np.bool_] | None
    box_bytes: int

    def gmem_span(self) -> tuple[int, int] | None:
        """(lowest, one past the highest) global byte address that is valid; None when nothing is."""
        gmem = self._valid_gmem()
        if not gmem.size:
            return None
        return int(gmem.min()), int(gmem.max()) + self.unit_bytes

    def gather(self, buffer: NDArray[np.uint8], base: int, fill: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8 [n, unit_bytes]: the global bytes of every unit, `fill` [unit_bytes] where not valid.

        buffer: the uint8 memory whose first byte has global address `base`; it must cover `gmem_span`.
        """
        rows, index = _rows(buffer, base, self._valid_gmem(), self.unit_bytes)
        if self.valid is None:
            return rows[index]
        out = np.empty((self.gmem.size, self.unit_bytes), np.uint8)
        out[:] = fill
        out[self.valid] = rows[index]
        return out

    def scatter(self, buffer: NDArray[np.uint8], base: int, data: NDArray[np.uint8]) -> None:
        """Write `data` (uint8 [n, unit_bytes]) to the valid units' global bytes; the others are dropped."""
        rows, index = _rows(buffer, base, self._valid_gmem(), self.unit_bytes)
        rows[index] = data if self.valid is None else data[self.valid]

    def _valid_gmem(self) -> NDArray[np.int64]:
        return self.gmem if self.valid is None else self.gmem[self.valid]


def _rows(
    buffer: NDArray[np.uint8], base: int, gmem: NDArray[np.int64], unit_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A view of `buffer` as overlapping or aligned rows of `unit_bytes`, and the row of each address."""
    offset = gmem - base
    if offset.size and (offset.min() < 0 or offset.max() + unit_bytes > buffer.size):
        raise IndexError(f"global bytes {gmem.min():#x}..{gmem.max() + unit_bytes:#x} leave the buffer at {base:#x}")
    if buffer.size % unit_bytes == 0 and not (offset % unit_bytes).any():
        return buffer.reshape(-1, unit_bytes), offset // unit_bytes
    return np.lib.stride_tricks.sliding_window_view(buffer, unit_bytes, writeable=True), offset


def swizzle_address(address: NDArray[np.int64], swizzle_bytes: int) -> NDArray[np.int64]:
    """Absolute shared byte addresses after the swizzle of span `swizzle_bytes` (0: none)."""
    if not swizzle_bytes:
        return address
    return address ^ ((address >> 3) & (swizzle_bytes - CHUNK_BYTES))


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map (interleave none). Dimension 0 is innermost and dense.

    element: a key of ELEMENT_BYTES.
    address: global byte address of element (0, ..., 0).
    extents: elements per dimension; strides_bytes: rank - 1 entries, of dimensions 1, 2, ...
    box: elements per dimension of one copy; element_strides: traversal steps (default all 1; that of dimension 0 is
    ignored, as by the driver). swizzle: a key of SWIZZLE_BYTES. fill: "zero" or "nan", for loads outside the tensor.

    Raises TensorMapError at construction for whatever cuTensorMapEncodeTiled refuses, naming the rule.
    """

    element: str
    address: int
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    swizzle: str = "none"
    fill: str = "zero"
    interleave: str = "none"

    def __post_init__(self) -> None:
        for name in ("extents", "strides_bytes", "box"):
            object.__setattr__(self, name, tuple(int(x) for x in getattr(self, name)))
        steps = self.element_strides
        steps = (1,) * len(self.extents) if steps is None else tuple(int(x) for x in steps)
        object.__setattr__(self, "element_strides", steps)
        problems = _problems(self)
        if problems:
            raise TensorMapError("; ".join(problems))

    @property
    def rank(self) -> int:
        return len(self.extents)

    @cached_property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.element]

    @cached_property
    def box_bytes(self) -> int:
        """Size of the shared image: also what one load counts on its mbarrier."""
        return self._geometry.box_bytes

    def box_plan(self, coords: Sequence[int], smem_addr: int) -> BoxPlan:
        """Units of the box at `coords` (elements, s32, innermost first) with its image at CTA-local `smem_addr`.

        Raises TensorMapError for a wrong number of coordinates, one beyond s32, or a misaligned `smem_addr`.
        """
        if len(coords) != self.rank:
            raise TensorMapError(f"tensor copy: {len(coords)} coordinates for a map of rank {self.rank}")
        if smem_addr % SMEM_ALIGN_BYTES:
            raise TensorMapError(
                f"tensor copy: shared address {smem_addr:#x} is {smem_addr % SMEM_ALIGN_BYTES} past a multiple of "
                f"{SMEM_ALIGN_BYTES}; tensor copies need {SMEM_ALIGN_BYTES}-byte alignment"
            )
        coords = tuple(int(c) for c in coords)
        if any(not -(1 << 31) <= c < 1 << 31 for c in coords):
            raise TensorMapError(f"tensor copy: coordinates {coords} are not all 32-bit signed values")
        return _plan(self, coords, smem_addr)

    def fill_unit(self, unit_bytes: int) -> NDArray[np.uint8]:
        """uint8 [unit_bytes] that a load writes for a unit outside the tensor."""
        if self.fill == "zero":
            return np.zeros(unit_bytes, np.uint8)
        pattern = _NAN_BITS[self.element].to_bytes(self.element_bytes, "little")
        return np.frombuffer(pattern * (unit_bytes // self.element_bytes), np.uint8).copy()

    @cached_property
    def _geometry(self) -> _Geometry:
        return _Geometry(self)

    @cached_property
    def _hash(self) -> int:
        return hash((self.element, self.address, self.extents, self.strides_bytes, self.box, self.element_strides,
                     self.swizzle, self.fill))  # fmt: skip

    def __hash__(self) -> int:
        return self._hash


class _Geometry:
    """What does not depend on coordinates: offsets of every unit in the tensor and in its shared image."""

    def __init__(self, tmap: TensorMap) -> None:
        assert tmap.element_strides is not None
        size = tmap.element_bytes
        steps = (1, *tmap.element_strides[1:])
        self.counts = tuple(-(-b // s) for b, s in zip(tmap.box, steps, strict=True))
        self.spans = tuple((c - 1) * s + 1 for c, s in zip(self.counts, steps, strict=True))
        self.box_bytes = int(np.prod(self.counts, dtype=np.int64)) * size
        self.swizzle_bytes = SWIZZLE_BYTES[tmap.swizzle]
        self.strides = (size, *tmap.strides_bytes)
        self.steps = steps
        self._units: dict[int, tuple[NDArray[np.int64], tuple[NDArray[np.int64], ...]]] = {}
        self._images: dict[tuple[int, int], NDArray[np.int64]] = {}
        self.element_bytes = size
        # Chunks never straddle the innermost bound when row ends and box starts fall on chunk borders.
        self.row_bytes = tmap.extents[0] * size

    def unit_bytes(self, coord0: int, inside0: bool) -> int:
        if inside0:
            return CHUNK_BYTES
        start = coord0 * self.element_bytes
        return CHUNK_BYTES if start % CHUNK_BYTES == 0 and self.row_bytes % CHUNK_BYTES == 0 else self.element_bytes

    def units(self, unit_bytes: int) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], ...]]:
        """(global byte offset of every unit from the box origin, its element offset per dimension)."""
        if unit_bytes not in self._units:
            per_unit = unit_bytes // self.element_bytes
            counts = (self.counts[0] // per_unit, *self.counts[1:])
            steps = (per_unit, *self.steps[1:])
            axes = np.meshgrid(*(np.arange(c, dtype=np.int64) * s for c, s in zip(counts, steps, strict=True)),
                               indexing="ij")  # fmt: skip
            index = tuple(np.ascontiguousarray(a.transpose()).reshape(-1) for a in axes)
            offset = np.zeros(index[0].size, np.int64)
            for i, stride in zip(index, self.strides, strict=True):
                offset += i * stride
            self._units[unit_bytes] = offset, index
        return self._units[unit_bytes]

    def image(self, unit_bytes: int, smem_addr: int) -> NDArray[np.int64]:
        """Absolute shared addresses of the units; cached, since kernels reuse a handful of buffers."""
        key = unit_bytes, smem_addr
        if key not in self._images:
            dense = smem_addr + np.arange(0, self.box_bytes, unit_bytes, dtype=np.int64)
            self._images[key] = swizzle_address(dense, self.swizzle_bytes)
        return self._images[key]


@lru_cache(maxsize=4096)
def _plan(tmap: TensorMap, coords: tuple[int, ...], smem_addr: int) -> BoxPlan:
    geometry = tmap._geometry
    inside = [0 <= c and c + s <= e for c, s, e in zip(coords, geometry.spans, tmap.extents, strict=True)]
    unit_bytes = geometry.unit_bytes(coords[0], inside[0])
    offset, index = geometry.units(unit_bytes)
    origin = tmap.address + sum(c * s for c, s in zip(coords, geometry.strides, strict=True))
    valid: NDArray[np.bool_] | None = None
    for d, whole in enumerate(inside):
        if not whole:
            here = (index[d] >= -coords[d]) & (index[d] < tmap.extents[d] - coords[d])
            valid = here if valid is None else valid & here
    # Far outside the tensor the sum leaves 64 bits; such units are not valid, so only their low bits are kept.
    gmem = (offset.view(np.uint64) + np.uint64(origin % (1 << 64))).view(np.int64)
    return BoxPlan(unit_bytes, geometry.image(unit_bytes, smem_addr), gmem, valid, geometry.box_bytes)


def _problems(m: TensorMap) -> list[str]:
    """Every rule of cuTensorMapEncodeTiled that `m` breaks."""
    out = _name_problems(m)
    rank = len(m.extents)
    if not 1 <= rank <= 5:
        out.append(f"tensor map: rank {rank}; 1 to 5 dimensions are allowed")
    lengths = {"strides_bytes": (len(m.strides_bytes), rank - 1), "box": (len(m.box), rank),
               "element_strides": (len(m.element_strides or ()), rank)}  # fmt: skip
    for name, (n, want) in lengths.items():
        if n != want:
            out.append(f"tensor map: {name} has {n} entries, rank {rank} needs {want}")
    if out:
        return out
    if m.address % 16 or not 0 <= m.address < 1 << 63:
        out.append(f"tensor map: address {m.address:#x}; it must be a multiple of 16 below 2^63")
    for d, e in enumerate(m.extents):
        if not 1 <= e <= _MAX_EXTENT:
            out.append(f"tensor map: extent {e} of dimension {d}; 1 to 2^32 are allowed")
    for d, s in enumerate(m.strides_bytes, start=1):
        if s % 16 or not 0 <= s < _STRIDE_LIMIT:
            out.append(f"tensor map: stride {s} bytes of dimension {d}; it must be a multiple of 16 below 2^40")
    for d, (b, step) in enumerate(zip(m.box, m.element_strides or (), strict=True)):
        if not 1 <= b <= 256:
            out.append(f"tensor map: box {b} of dimension {d}; 1 to 256 are allowed")
        if not 1 <= step <= 8:
            out.append(f"tensor map: element stride {step} of dimension {d}; 1 to 8 are allowed")
    return out + _inner_box_problems(m)


def _name_problems(m: TensorMap) -> list[str]:
    out = []
    for what, value, known in (
        ("element", m.element, ELEMENT_BYTES), ("swizzle", m.swizzle, SWIZZLE_BYTES), ("fill", m.fill, ("zero", "nan")),
        ("interleave", m.interleave, ("none",)),
    ):  # fmt: skip
        if value not in known:
            out.append(f"tensor map: {what} {value!r} is not one of {', '.join(known)}")
    if not out and m.fill == "nan" and m.element not in _NAN_BITS:
        out.append(f"tensor map: fill 'nan' needs a floating-point element, not {m.element}")
    return out


def _inner_box_problems(m: TensorMap) -> list[str]:
    inner = m.box[0] * ELEMENT_BYTES[m.element]
    text = f"tensor map: inner box {m.box[0]} x {ELEMENT_BYTES[m.element]} = {inner} bytes"
    if inner % 16:
        return [f"{text}; it must be a multiple of 16"]
    span = SWIZZLE_BYTES[m.swizzle]
    if span and inner > span:
        return [f"{text}; swizzle {m.swizzle} allows {span}"]
    if span and inner < span:
        return [
            f"{text} under swizzle {m.swizzle}: rows below the span are not modelled; make the box {span} bytes wide"
        ]
    return []
