"""Mutants that change nothing that a kernel may rely on: data with reasons, and for each a stronger mutant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from .mutators import Mutant

DATA = Path(__file__).with_name("equivalents.yaml")


@dataclass(frozen=True)
class Equivalent:
    """One reason. mutants: names. together: what must be caught when applied along with each; instead: what must be
    caught by itself. Either says that the simulator does watch this place."""

    mutants: tuple[str, ...]
    kernels: str
    reason: str
    together: tuple[str, ...]
    instead: tuple[str, ...]

    def applies(self, readable: str) -> bool:
        return re.search(self.kernels, readable) is not None

    def stronger(self, mutants: Mapping[str, Mutant]) -> list[Mutant]:
        """The stronger mutants, out of all mutants of a kernel. Raises KeyError for a name that is none."""
        other = [mutants[name] for name in self.together or self.instead]
        if self.instead:
            return [_sum(other)]
        return [_sum([mutants[name], *other]) for name in self.mutants]


def _sum(mutants: Sequence[Mutant]) -> Mutant:
    total = mutants[0]
    for m in mutants[1:]:
        total = total + m
    return total


@cache
def equivalents() -> tuple[Equivalent, ...]:
    """The list. Raises ValueError for an entry without a reason or a stronger mutant."""
    out = []
    for e in yaml.safe_load(DATA.read_text()):
        together, instead = tuple(e.get("together", ())), tuple(e.get("instead", ()))
        if not e["reason"].strip() or bool(together) == bool(instead):
            raise ValueError(f"{DATA.name}: {e['mutants']}: needs a reason, and one of together and instead")
        out.append(Equivalent(tuple(e["mutants"]), e.get("kernels", ""), e["reason"], together, instead))
    return tuple(out)


def listed(readable: str) -> dict[str, Equivalent]:
    """Mutant name -> its entry, for one kernel. Raises ValueError for a mutant with two entries."""
    found: dict[str, Equivalent] = {}
    for entry in equivalents():
        for name in entry.mutants if entry.applies(readable) else ():
            if name in found:
                raise ValueError(f"{DATA.name}: {name!r} is listed twice for {readable}")
            found[name] = entry
    return found
