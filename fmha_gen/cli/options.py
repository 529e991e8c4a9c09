"""Option types of the commands. A value that no spec, bundle or input could make right is wrong usage: exit code 2."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import click

from ..errors import FmhaGenError

INT32_MAX = 2**31 - 1
SIZE = click.IntRange(1, INT32_MAX)
LENGTH = click.IntRange(0, INT32_MAX)
HEAD_DIM = click.IntRange(1, 2**16)


class NonEmpty(click.ParamType):
    """A text that is not empty, which is what an unset shell variable gives."""

    name = "text"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value):
            self.fail("it is empty", param, ctx)
        if "\0" in str(value):
            self.fail("it holds a NUL byte", param, ctx)
        return str(value)


class WindowBound(click.ParamType):
    """One bound of a window: a number of keys, or ``none`` for unbounded."""

    name = "bound"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "none":
            return None
        try:
            bound = int(str(value))
        except ValueError:
            self.fail(f"{value!r} is neither a number nor `none`", param, ctx)
        if not 0 <= bound <= INT32_MAX:
            self.fail(f"{bound} is out of range; allowed is 0 to {INT32_MAX}; `none` is unbounded", param, ctx)
        return bound


class Number(click.FloatRange):
    """A finite number in a range: click lets nan pass any."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)  # type: ignore[arg-type]
        if not math.isfinite(number):
            self.fail(f"{number} is not finite.", param, ctx)
        return number


class Scheduler(click.ParamType):
    """The address of a dask scheduler."""

    name = "address"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        match = re.fullmatch(r"dask://(?:[^/:\s]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", str(value))
        if match is None or not 1 <= int(match[1]) <= 65535:
            self.fail(f"{str(value)!r} is not of the form dask://HOST:PORT; leave it out to compile here", param, ctx)
        return str(value)


class Architecture(click.ParamType):
    """A known architecture by any accepted spelling, as its name."""

    name = "arch"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ..arch import ALIASES, ARCHS

        name = ALIASES.get(str(value))
        if name is None:
            self.fail(f"{str(value)!r} is no known architecture; known are {', '.join(ARCHS)}", param, ctx)
        return name


@contextlib.contextmanager
def options_alone() -> Iterator[None]:
    """What goes wrong within is decided by the options alone, and so is wrong usage."""
    try:
        yield
    except FmhaGenError as e:
        raise click.UsageError(str(e)) from e
