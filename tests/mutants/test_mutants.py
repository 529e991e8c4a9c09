"""Every fault in our own kernels is caught by `verify`, or is listed as none, with the reason.

Here a sample runs: one mutant of every kind of fault at every kind of instruction, spread over the kernels. With
``--full`` all of them run, several thousand, and a table is printed (docs/mutants.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .equivalents import listed
from .harness import Kernel, Verdict
from .mutators import Mutant

pytestmark = [pytest.mark.sim, pytest.mark.compile]

KERNELS = ("d128-full-q2", "d128-causal-q2", "d128-full-q1", "d192x128-causal-q2", "d64-full-q2", "d96-full-q2")
SHARDS = 4
HERE = Path(__file__).parent
_kernels: dict[str, Kernel] = {}


def kernel(bundle: Path, name: str) -> Kernel:
    """Kept for the process: its sites take a whole verification of the unchanged kernel, references take time too."""
    if name not in _kernels:
        _kernels[name] = Kernel.find(bundle, f"fmha_fwd-sm100a-bf16-{name}")
    return _kernels[name]


def strata(mutants: Iterable[Mutant]) -> dict[tuple[str, str], list[Mutant]]:
    """Mutants by kind of fault and of instruction."""
    out: dict[tuple[str, str], list[Mutant]] = {}
    for m in mutants:
        out.setdefault((m.family, m.kind), []).append(m)
    return out


def sample(k: Kernel, name: str) -> Iterator[Mutant]:
    """One mutant of every third stratum: two kernels share each, and take different ones."""
    known = listed(k.readable)
    for n, found in enumerate(strata(m for m in k.mutants.values() if m.name not in known).values()):
        if (n + KERNELS.index(name)) % 3 == 0:
            yield found[zlib.crc32(name.encode()) % len(found)]


def run(k: Kernel, mutants: Iterable[Mutant], rows: list[tuple[str, str, str]]) -> list[Verdict]:
    """Verdicts of the mutants that nobody caught; `rows` gets a row for each that ran."""
    survivors = []
    for m in mutants:
        verdict = k.verify(m)
        rows.append((k.short, m.family, "caught" if verdict.caught else "survived"))
        if not verdict.caught:
            survivors.append(verdict)
    return survivors


def complaint(survivors: list[Verdict]) -> str:
    return "nothing was reported, and the numbers were right:\n" + "\n".join(f"  {v.mutant.name}" for v in survivors)


@pytest.mark.parametrize("name", KERNELS)
def test_faults_of_a_kernel_are_caught(mutants_bundle: Path, name: str) -> None:
    """Everything that synchronises is executed by some problem; a sample of faults is caught; entries of
    equivalents.yaml name mutants, and their stronger ones are caught."""
    k = kernel(mutants_bundle, name)
    missed = [f"PTX line {s.line}: {s.text}" for s in k.sites if not s.roles]
    assert not missed, f"no problem of verify reaches {missed}"
    known = listed(k.readable)
    stale = [n for n in known if n not in k.mutants]
    assert not stale, f"listed as equivalent, but no mutants of {name} (any more): {stale}"
    stronger = {m.name: m for e in set(known.values()) for m in e.stronger(k.mutants)}
    survivors = run(k, [*stronger.values(), *sample(k, name)], [])
    assert not survivors, complaint(survivors)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant(mutants_bundle: Path, name: str, shard: int, record_property) -> None:
    """All mutants: caught, unless listed; listed ones are not, or the entry is stale."""
    k = kernel(mutants_bundle, name)
    known = listed(k.readable)
    mine = [m for n, m in enumerate(k.mutants.values()) if n % SHARDS == shard]
    rows: list[tuple[str, str, str]] = []
    survivors = run(k, (m for m in mine if m.name not in known), rows)
    same = [m for m in mine if m.name in known]
    quiet = {v.mutant.name for v in run(k, same, [])}
    rows += [(k.short, m.family, "equivalent") for m in same]
    record_property("mutants", rows)
    assert not survivors, complaint(survivors)
    caught = [m.name for m in same if m.name not in quiet]
    assert not caught, f"listed as equivalent, but caught: remove the entries of {caught}"
