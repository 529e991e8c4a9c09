"""Faults in the rendered source, compiled like a kernel: `source_mutants.yaml` lists them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from fmha_gen.build.cache import BuildCache, default_cache_dir
from fmha_gen.build.orchestrate import make_item
from fmha_gen.compiler import compile_kernel
from fmha_gen.compiler.code import code_digest
from fmha_gen.plan import KernelPlan
from fmha_gen.render import Rendered, render

DATA = Path(__file__).with_name("source_mutants.yaml")


@dataclass(frozen=True)
class SourceMutant:
    """One entry of the list. where: pattern of readable kernel ids (without their digest) that it applies to.

    harmless: why it is no fault after all, or empty; instead: name of a stronger entry, which is one.
    """

    name: str
    family: str
    old: str
    new: str
    where: str
    harmless: str
    instead: str

    def applies(self, readable: str) -> bool:
        return re.search(self.where, readable) is not None

    def apply(self, source: str) -> str:
        """The faulty source. Raises ValueError when the source does not hold `old` exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: the source holds {self.old!r} {source.count(self.old)} times, not once")
        return source.replace(self.old, self.new)


@cache
def source_mutants() -> tuple[SourceMutant, ...]:
    """The list. Raises ValueError for two entries of one name that apply to the same kernels."""
    data: dict[str, list[dict[str, str]]] = yaml.safe_load(DATA.read_text())
    out = tuple(
        SourceMutant(
            f"{family}: {e['name']}",
            family,
            e["old"],
            e["new"],
            e.get("where", ""),
            e.get("harmless", ""),
            e.get("instead", ""),
        )
        for family, entries in data.items()
        for e in entries
    )
    twice = [key for key, n in Counter((m.name, m.where) for m in out).items() if n > 1]
    if twice:
        raise ValueError(f"{DATA.name}: listed twice: {twice}")
    faults = {m.name for m in out if not m.harmless}
    for m in out:
        if bool(m.harmless) != bool(m.instead) or (m.harmless and m.instead not in faults):
            raise ValueError(f"{DATA.name}: {m.name}: harmless needs a reason, and instead a stronger entry")
    return out


def harmless(m: SourceMutant) -> bool:
    return bool(m.harmless)


def compile_source(plan: KernelPlan, source: str) -> str:
    """PTX of a source, by way of a build cache. Raises CompileError for what does not compile or fails a gate."""
    faulty = Rendered(source, "", render(plan).kernel_name)
    cache = BuildCache(default_cache_dir() / "mutants")
    item = make_item(plan, faulty, code_digest(), str(cache.log_dir), 600.0)
    kernel = cache.load(item.key)
    if kernel is None:
        kernel = compile_kernel(item.job)
        cache.store(item.key, kernel)
    return kernel.ptx.decode()
