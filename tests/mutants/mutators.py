"""Faults, one at a time, in the PTX of a kernel.

Every mutator yields mutants of one site; `site_mutants` applies each to every site of its kinds. Edits keep the number
of lines, so that line maps stay right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .sites import Site


@dataclass(frozen=True)
class Mutant:
    """edits: (PTX line, statement there, what replaces it). family: the kind of fault; kind: of the instruction."""

    name: str
    family: str
    edits: tuple[tuple[int, str, str], ...]
    kind: str = ""

    def apply(self, ptx: str) -> str:
        lines = ptx.split("\n")
        for line, old, new in self.edits:
            if line == 0:
                return new
            if lines[line - 1].count(old) != 1:
                raise ValueError(f"{self.name}: PTX line {line} does not hold {old!r} once: {lines[line - 1]!r}")
            lines[line - 1] = lines[line - 1].replace(old, new)
        return "\n".join(lines)

    @classmethod
    def whole(cls, name: str, family: str, ptx: str) -> Mutant:
        """Another PTX text altogether, in place of the kernel's."""
        return cls(name, family, ((0, "", ptx),))

    def __add__(self, other: Mutant) -> Mutant:
        return Mutant(f"{self.name} and {other.name}", "several", self.edits + other.edits)


def _edit(site: Site, family: str, new: str) -> Mutant:
    return Mutant(f"{family}: {site.name}", family, ((site.line, site.text, new),), site.kind)


_WITHOUT = {"wait": "setp.eq.u32 p, 0, 0;", "elect": "setp.eq.u32 p, 0, 0;", "vote": "and.pred q, p, p;"}


def drop(site: Site) -> Iterator[Mutant]:
    """The statement is not there: a wait passes at once, every lane is elected, every lane votes for itself."""
    yield _edit(site, "drop", _WITHOUT.get(site.kind, ""))


def _address(text: str, n: int) -> tuple[int, int]:
    """Span of the inside of the n-th ``[...]`` of a statement."""
    return list(re.finditer(r"\[([^\[\]]*)\]", text))[n].span(1)


def shifted(text: str, n: int, by: int) -> str:
    """The statement with its n-th address moved."""
    start, end = _address(text, n)
    inside = text[start:end]
    base, brace, rest = inside.partition(",")
    m = re.fullmatch(r"\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*", base)
    if m is None:
        raise ValueError(f"cannot shift the address {inside!r} of {text!r}")
    return f"{text[:start]}{m[1]} + {int(m[2] or 0) + by}{brace}{rest}{text[end:]}"


def wrong_barrier(site: Site) -> Iterator[Mutant]:
    """The mbarrier beside the right one: the next stage or the next barrier."""
    which = 1 if site.kind == "tma_load" else 0
    if site.kind == "tma_load":
        which = len(re.findall(r"\[[^\[\]]*\]", site.text)) - 1
    yield _edit(site, "other barrier", shifted(site.text, which, 8))


def wrong_parity(site: Site) -> Iterator[Mutant]:
    """The other parity."""
    m = re.match(r"(.*\], )([^,;]+)(.*)", site.text)
    assert m is not None
    yield _edit(site, "parity", f"{{ .reg .b32 other; xor.b32 other, {m[2]}, 1; {m[1]}other{m[3]} }}")


def twice(site: Site) -> Iterator[Mutant]:
    """Done two times."""
    yield _edit(site, "twice", f"{site.text} {site.text}")


def _number(site: Site, family: str, by: int) -> Mutant:
    """The last number of the statement, changed."""
    m = list(re.finditer(r"(?<=[ ,\t])\d+(?=[;\s])", site.text))[-1]
    return _edit(site, f"{family} {by:+d}", f"{site.text[: m.start()]}{int(m.group()) + by}{site.text[m.end() :]}")


def wrong_count(site: Site) -> Iterator[Mutant]:
    """One arrival more or fewer than the barrier gets, or half of them."""
    count = int(re.findall(r"\d+", site.text)[-1])
    yield _number(site, "count", 1)
    if count > 1:
        yield _number(site, "count", -1)
        yield _number(site, "count", -count // 2)


def wrong_bytes(site: Site) -> Iterator[Mutant]:
    """Transaction bytes that are not those of the copies."""
    for by in (-16, 16):
        yield _number(site, "bytes", by)


def wrong_named_barrier(site: Site) -> Iterator[Mutant]:
    """Another named barrier; another number of threads."""
    m = re.match(r"(\S+\s+)([%\w]+)(.*)", site.text)
    assert m is not None
    if not m[2].startswith("%"):
        return
    for family, by in (("other named barrier", 1), ("barrier of the other group", 4)):
        yield _edit(site, family, f"{{ .reg .b32 other; add.s32 other, {m[2]}, {by}; {m[1]}other{m[3]} }}")
    for by in (-32, 32):
        yield _number(site, "threads", by)


def weaker_bulk_wait(site: Site) -> Iterator[Mutant]:
    """One group more may be outstanding; only reads are waited for."""
    yield _number(site, "pending", 1)
    if ".read" not in site.text:
        yield _edit(site, "wait for reads only", site.text.replace("wait_group", "wait_group.read"))


def wrong_registers(site: Site) -> Iterator[Mutant]:
    """Another register count."""
    for by in (-8, 8, 40):
        yield _number(site, "registers", by)


def wrong_columns(site: Site) -> Iterator[Mutant]:
    """Half of the tensor memory."""
    yield _edit(site, "columns", site.text.replace("512", "256"))


def wrong_tmem(site: Site) -> Iterator[Mutant]:
    """A neighbouring column, the next slot, the next warp's lanes."""
    which = 0
    for family, by in (("tmem +1 column", 1), ("tmem +128 columns", 128), ("tmem +32 lanes", 32 << 16)):
        yield _edit(site, family, shifted(site.text, which, by))


def wrong_smem(site: Site) -> Iterator[Mutant]:
    """The next element or chunk."""
    yield _edit(site, "smem +1 element", shifted(site.text, 0, 16 if ".v4" in site.text else 4))


def wrong_load(site: Site) -> Iterator[Mutant]:
    """A box beside its place, or other coordinates."""
    yield _edit(site, "smem +1 KiB", shifted(site.text, 0, 1024))
    yield from _coordinates(site)


def wrong_store(site: Site) -> Iterator[Mutant]:
    last = len(re.findall(r"\[[^\[\]]*\]", site.text)) - 1
    yield _edit(site, "smem +1 KiB", shifted(site.text, last, 1024))
    yield from _coordinates(site)


def _coordinates(site: Site) -> Iterator[Mutant]:
    m = re.search(r"\{([^}]*)\}", site.text)
    assert m is not None
    items = [i.strip() for i in m[1].split(",")]
    for axis, name in enumerate("dshb"):
        changed = [*items[:axis], "other", *items[axis + 1 :]]
        new = f"{site.text[: m.start()]}{{{', '.join(changed)}}}{site.text[m.end() :]}"
        by = 8 if name == "d" else 1
        added = f".reg .b32 other; add.s32 other, {items[axis]}, {by};"
        yield _edit(site, f"coordinate {name} +{by}", f"{{ {added} {new} }}")


BY_KIND: dict[str, tuple[Callable[[Site], Iterator[Mutant]], ...]] = {
    "wait": (drop, wrong_parity, wrong_barrier),
    "expect_tx": (drop, twice, wrong_barrier, wrong_bytes),
    "arrive": (drop, twice, wrong_barrier),
    "init": (drop, wrong_count),
    "commit": (drop, twice, wrong_barrier),
    "bar_arrive": (drop, twice, wrong_named_barrier),
    "bar_sync": (drop, wrong_named_barrier),
    "bulk_wait": (drop, weaker_bulk_wait),
    "setmaxnreg": (drop, wrong_registers),
    "tmem_alloc": (drop, wrong_columns),
    "tmem_dealloc": (drop, wrong_columns),
    "tmem_ld": (drop, wrong_tmem),
    "tmem_st": (drop, wrong_tmem),
    "tma_load": (drop, wrong_barrier, wrong_load),
    "tma_store": (drop, wrong_store),
    "smem_st": (drop, wrong_smem),
    "smem_ld": (drop, wrong_smem),
    "global_st": (drop, wrong_smem),
    "mma": (drop,),
}  # fmt: skip


def site_mutants(sites: Sequence[Site]) -> Iterator[Mutant]:
    """Every mutator on every site."""
    for site in sites:
        for mutate in BY_KIND.get(site.kind, (drop,)):
            yield from mutate(site)


def mma_mutants(ptx: str, sites: Sequence[Site]) -> Iterator[Mutant]:
    """Operands of one product step: accumulation the other way round, the next 16 bytes of the second operand."""
    lines = ptx.split("\n")
    for site in sites:
        if site.kind != "mma":
            continue
        for number in range(site.line, site.line - 7, -1):
            text = lines[number - 1]
            if m := re.search(r"setp\.ne\.b32 (p, [^,]+, 0;)", text):
                name = f"accumulate: {site.name}"
                yield Mutant(name, "accumulate", ((number, m[0], f"setp.eq.b32 {m[1]}"),), "mma")
            if m := re.search(r"mov\.b64 b, \{([^,]+), (\w+)\};", text):
                new = f"{{ .reg .b32 other; add.s32 other, {m[1]}, 1; mov.b64 b, {{other, {m[2]}}}; }}"
                yield Mutant(f"operand +16 bytes: {site.name}", "operand +16 bytes", ((number, m[0], new),), "mma")


# What a release publishes or gives back, if it comes right before it.
RELEASES = frozenset({"arrive", "commit", "bar_arrive", "bulk_commit", "relinquish"})
PUBLISHED = frozenset(
    """wait_st wait_ld fence_before proxy_fence smem_st smem_ld tmem_st tmem_ld tma_store tmem_alloc""".split()
)
# What an acquire protects: the next of these in its basic block must not come before it.
PROTECTED = {
    "wait": frozenset(),
    "bar_sync": frozenset({"fence_after", "smem_ld"}),
    "fence_after": frozenset({"tmem_ld", "tmem_st"}),
    "wait_ld": frozenset({"tmem_st", "smem_st", "arrive"}),
    "bulk_wait": frozenset({"arrive"}),
}
PROTECTED_BY_BARRIER = {
    "kv_empty": frozenset({"tma_load"}),
    "q_empty": frozenset({"tma_load"}),
    "stats_empty": frozenset({"smem_st"}),
    "epi_empty": frozenset({"smem_st", "arrive"}),
    "epi_full": frozenset({"tma_store"}),
}


def order_mutants(ptx: str, sites: Sequence[Site]) -> Iterator[Mutant]:
    """Sites of a basic block in the wrong order: work moved past the release that publishes it, an acquire moved past
    what it protects."""
    lines = ptx.split("\n")
    for n, first in enumerate(sites):
        block = list(_rest_of_block(lines, sites, n))
        if block and first.kind in PUBLISHED and block[0].kind in RELEASES:
            yield _moved(lines, first, block[0])
        protected = PROTECTED_BY_BARRIER.get(first.what, PROTECTED.get(first.kind, frozenset()))
        second = next((s for s in block if s.kind in protected), None)
        if first.kind == "wait" and block and block[0].kind == "fence_after":
            second = block[0]
        if first.kind in PROTECTED and second is not None:
            yield _moved(lines, first, second)


def _rest_of_block(lines: Sequence[str], sites: Sequence[Site], n: int) -> Iterator[Site]:
    """The sites behind sites[n] in its basic block; waits, which are loops of their own, count as one step."""
    start = _wait_block(lines, sites[n])[1] if sites[n].kind == "wait" else sites[n].line
    for site in sites[n + 1 :]:
        begin = _wait_block(lines, site)[0] if site.kind == "wait" else site.line
        if any(re.search(r"^\s*\$L|\bbra\b|^\s*ret;", lines[k - 1]) for k in range(start + 1, begin)):
            return
        yield site
        start = _wait_block(lines, site)[1] if site.kind == "wait" else site.line


def _wait_block(lines: Sequence[str], site: Site) -> tuple[int, int]:
    """First and last line of the asm block of a wait."""
    start = site.line
    while "{" not in lines[start - 1]:
        start -= 1
    end = site.line
    while lines[end - 1].strip() != "}":
        end += 1
    return start, end


def _moved(lines: Sequence[str], first: Site, second: Site) -> Mutant:
    if first.kind == "wait":
        begin, end = _wait_block(lines, first)
        text = " ".join(line.strip() for line in lines[begin - 1 : end])
        edits = [(n, lines[n - 1], "") for n in range(begin, end + 1)]
    else:
        text, edits = first.text, [(first.line, first.text, "")]
    edits.append((second.line, second.text, f"{second.text} {text}"))
    name = f"late: {first.name} after {' '.join(p for p in (second.kind, second.what) if p)}"
    return Mutant(name, "late", tuple(edits), f"{first.kind} after {second.kind}")


__all__ = ["Mutant", "drop", "mma_mutants", "order_mutants", "site_mutants"]
