"""Tensors inside larger buffers: poison where a kernel must not read, canaries where it must not write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..reference import to_bits

GUARD_ELEMS = 512  # before and after the tensor; a multiple of 16 bytes in every dtype
CANARY = 777.0


@dataclass
class Buffer:
    """One tensor. base: all elements (bit patterns or float32), with the tensor `view` inside it.

    offset, strides: of the view, in elements. outside: which elements of base are not the tensor's.
    """

    name: str
    dtype: str
    base: NDArray[Any]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def view(self) -> NDArray[Any]:
        """The tensor, writable, sharing memory with base."""
        return _view(self.base, self.offset, self.shape, self.strides)

    def outside(self) -> NDArray[np.bool_]:
        mask = np.ones(self.base.size, np.bool_)
        _view(mask, self.offset, self.shape, self.strides)[...] = False
        return mask


def _view(base: NDArray[Any], offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[Any]:
    if 0 in shape:
        return base[:0].reshape(shape)
    return as_strided(base[offset:], shape, tuple(s * base.itemsize for s in strides))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Every axis but the last is longer in memory than in the tensor; float32 LSE has a gap after each element too."""
    if len(shape) == 3:
        batch, heads, rows = shape
        return (heads * (2 * rows + 6) + 2, 2 * rows + 6, 2)
    _, rows, heads, dim = shape
    head = dim + 8
    row = heads * head + 24
    return (max(1, rows) * row + 40, row, head, 1)


def _bhsd(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Heads before rows, as engines keep a cache."""
    if len(shape) == 3:
        return _dense(shape)
    _, rows, heads, dim = shape
    return (heads * max(1, rows) * dim, dim, max(1, rows) * dim, 1)


LAYOUTS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {"dense": _dense, "padded": _padded, "bhsd": _bhsd}
_POISON_VALUES = {"nan": np.nan, "zero": 0.0, "inf": np.inf, "huge": 1e30}


def make_input(name: str, values: NDArray[Any], dtype: str, layout: str, poison: str) -> Buffer:
    """A tensor that holds `values` rounded to `dtype`, amid poison."""
    fill = to_bits(np.array([min(_POISON_VALUES[poison], 6e4 if dtype == "fp16" else 1e30)]), dtype)[0]
    if poison in ("nan", "inf"):
        fill = to_bits(np.array([_POISON_VALUES[poison]]), dtype)[0]
    buffer = _make(name, dtype, values.shape, layout, np.full, fill)
    buffer.view[...] = to_bits(values, dtype)
    return buffer


def make_output(name: str, shape: tuple[int, ...], dtype: str, layout: str) -> Buffer:
    """A tensor to be written, canaries inside and around it."""
    fill = np.float32(CANARY) if dtype == "float32" else to_bits(np.array([CANARY]), dtype)[0]
    return _make(name, dtype, shape, layout, np.full, fill)


def _make(name: str, dtype: str, shape: tuple[int, ...], layout: str, full: Any, fill: Any) -> Buffer:
    strides = LAYOUTS[layout](shape)
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    base = full(2 * GUARD_ELEMS + span, fill)
    return Buffer(name, dtype, base, GUARD_ELEMS, shape, strides)


def canary_problem(buffer: Buffer) -> str | None:
    """What was written outside the tensor, if anything."""
    canary = np.float32(CANARY) if buffer.dtype == "float32" else to_bits(np.array([CANARY]), buffer.dtype)[0]
    touched = np.flatnonzero(buffer.outside() & (buffer.base != canary))
    if not touched.size:
        return None
    first = int(touched[0]) - buffer.offset
    return f"{buffer.name}: {touched.size} elements outside the tensor were written, the first at element {first}"
