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
    match = closest(word, known)
    return f"did you mean {match!r}?" if match else ""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` means: the only one that it abbreviates, else the likeliest, ``_`` and case apart."""
    plain = {_plain(k): k for k in reversed(list(known))}
    short = _plain(word)
    starts = [k for p, k in plain.items() if p.startswith(short)] if len(short) >= _ABBREVIATION else []
    if len(starts) == 1:
        return starts[0]
    match = difflib.get_close_matches(short, list(plain), n=1, cutoff=0.6)
    return plain[match[0]] if match else None


_ABBREVIATION = 3  # letters that may stand for a longer word


def _plain(word: str) -> str:
    return word.replace("_", "").lower()


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
