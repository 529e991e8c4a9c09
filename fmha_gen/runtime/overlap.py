"""Whether a launch's outputs lie in memory of their own.

A kernel reads its inputs while other CTAs write `out` and `lse`, so a shared byte is a race. Bounds of addresses alone
do not tell: slices of one buffer interleave and share nothing. A tensor is taken as rows of bytes at regular steps, and
two tensors share a byte where the distance of two of their rows is less than a row. That is a bounded linear equation;
for layouts whose steps nest, as those of slices, permutations and paddings do, it is decided in a few divisions.

A search that takes more than `MAX_NODES` steps gives up and lets the launch pass: only what surely overlaps is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ..errors import ProblemError
from .driver import ADDRESS_ORDER, Addresses

MAX_NODES = 2000  # about 1 ms
_ITEM_BYTES = (2, 2, 2, 2, 4)  # of the tensors in ADDRESS_ORDER
_OUTPUTS = tuple(ADDRESS_ORDER.index(name) for name in ("out", "lse"))

Shapes = Sequence[tuple[int, ...] | None]
Rows = tuple[int, tuple[tuple[int, int], ...]]
"""(bytes of a row, ((number of steps, bytes of a step), ...) in ascending order). A row is a run of bytes."""
Term = tuple[int, int, int]
"""(step, low, high): i * step, where low <= i <= high."""


def spans_bytes(shapes: Shapes, strides: Shapes) -> tuple[int, ...]:
    """Bytes from the first to one past the last of each tensor in ADDRESS_ORDER; 0 or less without elements.

    Strides in elements, none negative, and 1 for the last axis of all but lse.
    """
    q, k, v, out, lse = shapes
    a, b, c, d, e = strides
    assert q and k and v and out and a and b and c and d
    return (
        2 * ((q[0] - 1) * a[0] + (q[1] - 1) * a[1] + (q[2] - 1) * a[2] + q[3]),
        2 * ((k[0] - 1) * b[0] + (k[1] - 1) * b[1] + (k[2] - 1) * b[2] + k[3]),
        2 * ((v[0] - 1) * c[0] + (v[1] - 1) * c[1] + (v[2] - 1) * c[2] + v[3]),
        2 * ((out[0] - 1) * d[0] + (out[1] - 1) * d[1] + (out[2] - 1) * d[2] + out[3]),
        0 if not lse or not e else 4 * ((lse[0] - 1) * e[0] + (lse[1] - 1) * e[1] + (lse[2] - 1) * e[2] + 1),
    )


def apart(addresses: Addresses, spans: tuple[int, ...]) -> bool:
    """Whether the addresses alone prove that no output overlaps anything."""
    q, k, v, out, lse = addresses
    q_bytes, k_bytes, v_bytes, out_bytes, lse_bytes = spans
    end = out + out_bytes
    if (q < end and out < q + q_bytes) or (k < end and out < k + k_bytes) or (v < end and out < v + v_bytes):
        return False
    if not lse:
        return True
    end = lse + lse_bytes
    return not (
        (q < end and lse < q + q_bytes)
        or (k < end and lse < k + k_bytes)
        or (v < end and lse < v + v_bytes)
        or (out < end and lse < out + out_bytes)
    )


def clash(addresses: Addresses, shapes: Shapes, strides: Shapes, spans: tuple[int, ...]) -> tuple[str, str] | None:
    """(output, tensor) that share a byte, or None. spans: of the tensors, as `spans_bytes` gives them."""
    for output in _OUTPUTS:
        for other in range(output):
            distance = addresses[output] - addresses[other]
            if -spans[output] < distance < spans[other]:
                a, b = (_rows_of(shapes[i], strides[i], _ITEM_BYTES[i]) for i in (output, other))
                if a is not None and b is not None and _meet(distance, a, b):
                    return ADDRESS_ORDER[output], ADDRESS_ORDER[other]
    return None


def check_overlap(addresses: Addresses, shapes: Shapes, strides: Shapes) -> None:
    """Raises ProblemError where an output overlaps another tensor, or itself. Layouts are checked already."""
    for index in _OUTPUTS:
        shape, steps = shapes[index], strides[index]
        if shape is not None and steps is not None and _folded(tuple(shape), tuple(steps), _ITEM_BYTES[index]):
            raise ProblemError(
                f"{ADDRESS_ORDER[index]}: strides {tuple(steps)} of shape {tuple(shape)} meet in one element; an "
                f"output must not write one element twice; allocate it anew"
            )
    spans = spans_bytes(shapes, strides)
    if apart(addresses, spans):
        return
    found = clash(addresses, shapes, strides, spans)
    if found is not None:
        name, other = found
        a, b = (addresses[ADDRESS_ORDER.index(n)] for n in found)
        raise ProblemError(
            f"{name}: shares memory with {other} ({name} at {a:#x}, {other} at {b:#x}); the kernel writes {name} while "
            f"it uses {other}; give {name} memory of its own, or a slice that has no element of {other}"
        )


def _rows_of(shape: tuple[int, ...] | None, strides: tuple[int, ...] | None, item_bytes: int) -> Rows | None:
    return None if shape is None or strides is None else _rows(tuple(shape), tuple(strides), item_bytes)


@lru_cache(512)
def _rows(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> Rows | None:
    """The bytes of a tensor as rows; None without elements."""
    if 0 in shape:
        return None
    row, terms = item_bytes, list[tuple[int, int]]()
    for step, count in sorted((s * item_bytes, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s):
        if not terms and step <= row:
            row += (count - 1) * step
        elif terms and step == terms[-1][0] * terms[-1][1]:
            terms[-1] = (terms[-1][0] * count, terms[-1][1])
        else:
            terms.append((count, step))
    return row, tuple(terms)


@lru_cache(512)
def _meet(distance: int, a: Rows, b: Rows) -> bool:
    """Whether a byte of `a`, which starts `distance` bytes after `b`, is one of `b`."""
    ranges: dict[int, list[int]] = {}
    for count, step in a[1]:
        ranges.setdefault(step, [0, 0])[1] += count - 1
    for count, step in b[1]:
        ranges.setdefault(step, [0, 0])[0] -= count - 1
    return _reaches(1 - a[0] - distance, b[0] - 1 - distance, [(s, low, high) for s, (low, high) in ranges.items()])


@lru_cache(512)
def _folded(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    """Whether two elements of a tensor are one."""
    if 0 in shape:
        return False
    axes = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1)
    end = 1
    for stride, extent in axes:
        if stride < end:
            break
        end += (extent - 1) * stride
    else:
        return False  # each axis steps over all that the smaller ones reach
    for index, (stride, extent) in enumerate(axes):  # the largest axis that two equal elements differ in
        smaller = [(s, 1 - n, n - 1) for s, n in axes[:index]]
        if _reaches(0, 0, [(stride, 1, extent - 1), *smaller]):
            return True
    return False


class _TooLongError(Exception):
    pass


def _reaches(low: int, high: int, terms: Iterable[Term]) -> bool:
    """Whether a sum of one value of each term lies in low..high. False too where that takes too long to say."""
    ordered = sorted(terms, reverse=True)
    rest, divisors = [(0, 0)], [0]  # smallest and largest sum of the terms after each; divisor of all from it on
    for step, least, most in reversed(ordered):
        rest.append((rest[-1][0] + least * step, rest[-1][1] + most * step))
        divisors.append(math.gcd(divisors[-1], step))
    rest.reverse()
    divisors.reverse()
    visited = 0

    def search(depth: int, low: int, high: int) -> bool:
        nonlocal visited
        if depth == len(ordered):
            return low <= 0 <= high
        visited += 1
        if visited > MAX_NODES:
            raise _TooLongError
        if high // divisors[depth] * divisors[depth] < low:
            return False
        step, least, most = ordered[depth]
        smallest, largest = rest[depth + 1]
        first, last = max(least, -(-(low - largest) // step)), min(most, (high - smallest) // step)
        return any(search(depth + 1, low - i * step, high - i * step) for i in range(first, last + 1))

    try:
        return search(0, low, high)
    except _TooLongError:
        return False
