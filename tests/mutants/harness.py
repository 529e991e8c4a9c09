"""Runs mutants of one kernel of a bundle through `fmha_gen.verify`: its launcher, its problems, its checks."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fmha_gen.bundle import KernelFiles, write_bundle
from fmha_gen.manifest import KernelEntry, KernelRecord
from fmha_gen.manifest_io import read_cubin, read_manifest, read_plan, read_record, read_verified_file
from fmha_gen.reference import Reference
from fmha_gen.runtime import Bundle
from fmha_gen.runtime.driver import Device
from fmha_gen.sim import program as sim_program
from fmha_gen.sim.driver import SimDriver, SimKernel
from fmha_gen.verify import FULL_SEEDS
from fmha_gen.verify.bench import SimBench
from fmha_gen.verify.cases import Case, quick_cases
from fmha_gen.verify.kernel import KernelCheck

from .mutators import Mutant, mma_mutants, order_mutants, site_mutants
from .sites import Site, find_sites, name_sites, observe

# Problems that show most faults soonest come first; `verify` runs the same ones in another order.
FIRST = (
    "row maximum grows, by less and by more than the rescale threshold",
    "row maximum leaps, then hardly grows",
    "many tiles per CTA, amid NaN",
    "whole blocks only, many tiles per CTA",
)


@dataclass(frozen=True)
class Verdict:
    """How a mutant ended. caught_by: finding kinds, or "numbers", "bits", "outside"; empty: nothing was wrong.
    where: the first problem in full; case: the problem it was seen on."""

    mutant: Mutant
    caught_by: tuple[str, ...]
    case: str
    where: str
    seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.where)


class _MutantDriver(SimDriver):
    """A simulator that loads a mutated PTX text in place of the bundle's."""

    def __init__(self, mutant: Mutant | None) -> None:
        super().__init__()
        self.mutant = mutant

    def load(
        self,
        record: KernelRecord,
        image: bytes,
        device: Device,
        where: str,
        line_map: Mapping[str, Any] | None,
        plan: Mapping[str, Any] | None,
    ) -> SimKernel:
        if self.mutant is not None:
            image = self.mutant.apply(image.decode()).encode()
        return super().load(record, image, device, where, line_map, plan)


class _MutantBench(SimBench):
    def __init__(self, bundle: Path, mutant: Mutant | None) -> None:
        self.driver = _MutantDriver(mutant)
        self.bundle = Bundle.open(bundle, self.driver)


@dataclass
class Kernel:
    """One kernel of a bundle, its sites and mutants."""

    bundle: Path
    entry: KernelEntry
    _references: dict[tuple[str, float | None], Reference] = field(default_factory=dict)

    @classmethod
    def find(cls, bundle: Path, readable: str) -> Kernel:
        """The kernel whose id starts with `readable`, without its digest."""
        (entry,) = (e for e in read_manifest(bundle).kernels if e.id.rpartition("-")[0] == readable)
        return cls(bundle, entry)

    @property
    def readable(self) -> str:
        """The id without its digest."""
        return self.entry.id.rpartition("-")[0]

    @property
    def short(self) -> str:
        """As the columns of tables say it: ``d128-full-q2``."""
        return "-".join(self.readable.split("-")[3:])

    @cached_property
    def record(self) -> KernelRecord:
        return read_record(self.bundle, self.entry)

    @cached_property
    def plan(self) -> dict[str, Any]:
        return read_plan(self.bundle, self.record)

    @cached_property
    def ptx(self) -> str:
        return (self.bundle / self.record.ptx.path).read_text()

    @cached_property
    def cases(self) -> list[Case]:
        cases = quick_cases()
        by_name = {c.name: c for c in cases}
        return [by_name[n] for n in FIRST] + [c for c in cases if c.name not in FIRST]

    @cached_property
    def sites(self) -> list[Site]:
        """Named by a run of the unchanged kernel. Raises AssertionError if that is not clean."""
        with observe(self.ptx, self.record, self.plan) as seen:
            verdict = self.verify(None)
        assert not verdict.caught, f"the unchanged kernel fails: {verdict.where}"
        return name_sites(find_sites(self.ptx), seen, self.plan)

    @cached_property
    def mutants(self) -> dict[str, Mutant]:
        more = (*mma_mutants(self.ptx, self.sites), *order_mutants(self.ptx, self.sites))
        return {m.name: m for m in (*site_mutants(self.sites), *more)}

    def write_bundle(self, mutant: Mutant, root: Path) -> Path:
        """A bundle of this kernel with the mutant as its PTX, every digest right: only running it can tell."""
        manifest, record = read_manifest(self.bundle), self.record
        assert record.line_map is not None
        files = KernelFiles(
            record,
            read_cubin(self.bundle, record),
            mutant.apply(self.ptx).encode(),
            self.plan,
            read_verified_file(self.bundle, record.line_map),
        )
        generator, toolchain = manifest.generator, manifest.toolchain
        write_bundle(root, manifest.name, manifest.version, generator, toolchain, manifest.min_driver, [files])
        return root

    def verify(self, mutant: Mutant | None) -> Verdict:
        """Run the problems until one shows a fault."""
        start = time.perf_counter()
        before = set(sim_program._programs)
        with _no_object_cache() if mutant is not None else contextlib.nullcontext():
            problem, case_name = self._run(mutant)
        for key in set(sim_program._programs) - before if mutant is not None else ():
            del sim_program._programs[key]
        gc.collect(0)
        kinds = _kinds(problem)
        return Verdict(mutant or Mutant("nothing", "none", ()), kinds, case_name, problem, time.perf_counter() - start)

    def _run(self, mutant: Mutant | None) -> tuple[str, str]:
        """(first problem, its case): the quick problems, then for a mutant more seeds of those that change tiles."""
        bench = _MutantBench(self.bundle, mutant)
        few = KernelCheck(bench, self.entry, range(2), self._references)
        many = KernelCheck(bench, self.entry, range(2, FULL_SEEDS), self._references)
        more = [c for c in self.cases if c.all_seeds and mutant is not None]
        for check, cases in ((few, self.cases), (many, more)):
            for case in cases:
                verdict = check.case(case)
                if verdict.problems:
                    return verdict.problems[0], case.name
        return "", ""


@contextlib.contextmanager
def _no_object_cache() -> Iterator[None]:
    """Machine code of mutants would only push other code out of the simulator's cache."""
    name = "FMHA_GEN_SIM_CACHE"
    before = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _kinds(problem: str) -> tuple[str, ...]:
    """What a problem of `verify` is called in tables."""
    found = []
    for line in problem.splitlines():
        word = line.split()
        if len(word) > 1 and word[0] in ("error", "fault"):
            found.append(word[1].rstrip(":"))
    if found or not problem:
        return tuple(dict.fromkeys(found))
    for text, kind in (("tolerance", "numbers"), ("other bits", "bits"), ("outside the tensor", "outside")):
        if text in problem:
            return (kind,)
    return ("refused",)
