"""Collects every problem of a spec, so that one run reports all of them in file order."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..built import show_dims
from ..errors import SpecError


class Problems:
    """Problems of one file: ``file:line: path: what; limit; fix``."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._found: dict[str, tuple[int, int]] = {}  # message -> (line, order of discovery)

    def add(self, line: int, path: str, what: str, limit: str = "", fix: str = "") -> None:
        """Record one problem once, however many variants it touches."""
        text = "; ".join(part for part in (f"{path}: {what}" if path else what, limit, fix) if part)
        self._found.setdefault(f"{self.where}:{line}: {text}", (line, len(self._found)))

    def __len__(self) -> int:
        return len(self._found)

    def lines(self) -> list[str]:
        """All messages by line; those of one line in the order they were found."""
        return sorted(self._found, key=self._found.__getitem__)

    def raise_if_any(self) -> None:
        """Raise SpecError with every problem found so far."""
        if self._found:
            raise SpecError(self.lines())


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the known word closest to `word`, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {match[0]!r}?" if match else ""


def listing(values: Iterable[object]) -> str:
    """Values as a person would list them: ``a, b, c``."""
    return ", ".join(show(v) for v in values)


def show(value: object) -> str:
    """A value as the spec file spells it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return show_dims(value)
    return str(value)
