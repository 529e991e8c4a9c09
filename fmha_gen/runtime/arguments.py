"""Types of public arguments. What is of a wrong one is refused in plain words: its name, what came, what is wanted."""

from __future__ import annotations

import operator
import os
from typing import Any

from ..errors import ProblemError

_MAX_SHOWN = 60  # characters
_INT = frozenset((int,))
GLOB = "a glob over kernel ids as a string, e.g. '*-d128-causal-*', or None"


def wrong(name: str, value: Any, wanted: str) -> ProblemError:
    """The error for an argument `name` that is no `wanted`."""
    kind = type(value).__name__
    text = repr(value) if isinstance(value, (bool, int, float, str, bytes, tuple, list, dict)) else f"an object {kind}"
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    came = "None" if value is None else f"{text} ({kind})" if text[:3] != "an " else text
    return ProblemError(f"{name}: {came}; wanted is {wanted}")


def path(name: str, value: Any) -> str:
    """A file system path as a string. Raises ProblemError."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise wrong(name, value, "a path: a string or a pathlib.Path")
    return text.rstrip("/") or text


def glob(name: str, value: Any) -> str | None:
    """A glob over kernel ids, or None. Raises ProblemError."""
    if value is not None and not isinstance(value, str):
        raise wrong(name, value, GLOB)
    return value


def integer(name: str, value: Any, wanted: str, low: int, high: int) -> int:
    """An integer from `low` to `high`; no bool, and no tensor, as reading one waits for its device. ProblemError."""
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool) or hasattr(value, "data_ptr"):
        raise wrong(name, value, wanted)
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong(name, value, wanted) from None
    if not low <= number <= high:
        raise ProblemError(f"{name}: {number}; wanted is {wanted}, from {low} to {high}")
    return number


def number(name: str, value: Any, wanted: str) -> float:
    """A number as float; no bool, no text, and no tensor, as reading one waits for its device. ProblemError."""
    if isinstance(value, (bool, str, bytes, bytearray)) or hasattr(value, "data_ptr"):
        raise ProblemError(f"{name}: {type(value).__name__} {value!r:.60} is no number; wanted is {wanted}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ProblemError(f"{name}: {type(value).__name__} {value!r:.60} is no number; wanted is {wanted}") from None
    except OverflowError:
        raise ProblemError(f"{name}: an integer of {value.bit_length()} bits is no float; wanted is {wanted}") from None


def extents(name: str, value: Any) -> tuple[int, ...]:
    """A shape or strides as a tuple of integers. Raises ProblemError."""
    if type(value) is tuple and _INT.issuperset(map(type, value)):
        return value
    wanted = "a tuple of integers, one an axis"
    if isinstance(value, (str, bytes)) or hasattr(value, "data_ptr"):
        raise wrong(name, value, wanted)
    try:
        return tuple([operator.index(n) for n in value])
    except TypeError:
        raise wrong(name, value, wanted) from None
