"""Faults in the rendered source: what a wrong template or plan would ship is refused by the build or by `verify`.

A few run here; with ``--full`` all of them, for every kernel.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from fmha_gen.errors import FmhaGenError
from fmha_gen.plan import KernelPlan, make_plan
from fmha_gen.render import render
from fmha_gen.spec import read_specs

from .mutators import Mutant
from .source_mutants import SourceMutant, compile_source, harmless, source_mutants
from .test_mutants import HERE, KERNELS, kernel

pytestmark = [pytest.mark.sim, pytest.mark.compile]


def plan_of(name: str) -> KernelPlan:
    plans = (make_plan(s) for s in read_specs([HERE / "kernels.yaml"]).specs)
    return next(p for p in plans if p.spec.id.rpartition("-")[0].endswith(f"-{name}"))


def applying(name: str) -> list[SourceMutant]:
    return [m for m in source_mutants() if m.applies(f"fmha_fwd-sm100a-bf16-{name}")]


def caught(bundle: Path, name: str, m: SourceMutant) -> bool:
    """Whether the build or verify refuses the kernel with this fault."""
    k, plan = kernel(bundle, name), plan_of(name)
    try:
        ptx = compile_source(plan, m.apply(render(plan).text))
    except FmhaGenError:
        return True
    return k.verify(Mutant.whole(m.name, m.family, ptx)).caught


@pytest.mark.parametrize("name", KERNELS)
def test_edits_fit_the_source(name: str) -> None:
    """Each edit names text that the source has exactly once; the list has an entry for each kind of fault."""
    source = render(plan_of(name)).text
    assert {m.family for m in applying(name)} == {"mask", "placement", "arithmetic", "ring", "coordinates", "order"}
    for m in applying(name):
        assert m.apply(source) != source


@pytest.mark.parametrize("name", KERNELS)
def test_a_fault_in_the_source_is_caught(mutants_bundle: Path, name: str) -> None:
    candidates = [m for m in applying(name) if not harmless(m)]
    assert caught(mutants_bundle, name, candidates[zlib.crc32(name.encode()) % len(candidates)])


@pytest.mark.full
@pytest.mark.parametrize("name", KERNELS)
def test_every_fault_in_the_source(mutants_bundle: Path, name: str, record_property) -> None:
    rows, survivors, stale = [], [], []
    for m in applying(name):
        found = caught(mutants_bundle, name, m)
        rows.append((name, m.family, "caught" if found else "equivalent" if harmless(m) else "survived"))
        if found and harmless(m):
            stale.append(m.name)
        if not found and not harmless(m):
            survivors.append(m.name)
    record_property("mutants", rows)
    assert not survivors, f"{name} with these faults passes: {survivors}"
    assert not stale, f"said to be harmless, but caught: remove the reasons of {stale}"
