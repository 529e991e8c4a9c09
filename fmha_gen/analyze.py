"""``analyze``: what the machine code of a bundle or of any cubin says, and the bound that its counts give.

    report = analyze("out/core-1.0.0")              # a bundle: every kernel, head dims from its records
    report = analyze("other.cubin", 128, 128)       # any cubin; head dims are needed for the bound alone
    report.to_dict()                                # JSON; docs/analyze.md has the keys
    for t in tables(report): ...                    # rows of text for printing

Counts are read, nothing is timed. The bound is a model figure (`plan.model`): least clocks of one SM per pair of
128-row tiles and `tile_n` keys, from the counts of the loops without masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arch import ARCHS
from .errors import BundleError, SelectionError
from .manifest import KernelRecord, id_matches
from .manifest_io import MAX_FILE_BYTES, read_cubin, read_manifest, read_record
from .plan import model
from .plan.types import ModelBound
from .sass import KernelReport, LoopReport, read_kernels

DEFAULT_TILE_N = 128
MMA_K = 16  # depth of one tcgen05.mma on 16-bit operands
ROWS_PER_TILE = 128
_MMA_OPCODE = "UTCHMMA"


@dataclass(frozen=True, slots=True)
class Bound:
    """The model figure of one kernel.

    terms: clocks of the MMA, MUFU and issue terms and the counts in them, each per pair of 128-row tiles and tile_n
    keys. note: how loops were scaled to that, or what is missing from a term.
    """

    head_dim_qk: int
    head_dim_v: int
    tile_n: int
    terms: ModelBound
    note: str


@dataclass(frozen=True, slots=True)
class Analysis:
    """One kernel: what its code says, and where it comes from.

    id: of a bundle's kernel; None for a bare cubin. dynamic_smem_bytes: from the launch record; None likewise.
    bound: None where head dims are unknown or the kernel has no such loops; no_bound then says why.
    """

    id: str | None
    file: str
    kernel: KernelReport
    dynamic_smem_bytes: int | None
    bound: Bound | None
    no_bound: str | None

    @property
    def title(self) -> str:
        """The id, or the symbol cut to a readable length."""
        name = self.id or self.kernel.name
        return name if len(name) <= 60 else name[:57] + "..."


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `analyze` found at `path`."""

    path: str
    kernels: tuple[Analysis, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Keys are those of the dataclasses; docs/analyze.md explains them."""
        return {"path": self.path, "kernels": [_analysis_dict(a) for a in self.kernels]}


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table to print: cells are text; `right` names the columns that hold numbers. notes: lines under it."""

    title: str
    columns: tuple[str, ...]
    right: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def analyze(
    path: str | Path,
    head_dim_qk: int | None = None,
    head_dim_v: int | None = None,
    tile_n: int = DEFAULT_TILE_N,
    only: str | None = None,
) -> Report:
    """Analyse a bundle (a folder) or a cubin (a file).

    head_dim_qk, head_dim_v, tile_n: of a bare cubin, for its bound (head_dim_v defaults to head_dim_qk); a bundle's
    records have their own. only: a glob on a bundle's kernel ids. Raises BundleError for what is damaged or missing,
    SelectionError when `only` matches nothing, ToolchainError without nvdisasm.
    """
    where = Path(path)
    if where.is_dir():
        return Report(str(path), tuple(_analyze_bundle(where, only)))
    try:
        with open(where, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise BundleError(f"{where}: cannot be read ({e.strerror}); name a bundle's folder or a cubin") from None
    if len(data) > MAX_FILE_BYTES:
        raise BundleError(f"{where}: more than {MAX_FILE_BYTES} bytes; no cubin is that long; check the path")
    dims = None if head_dim_qk is None else (head_dim_qk, head_dim_v or head_dim_qk, tile_n)
    return Report(str(path), tuple(_analysis(None, where.name, k, None, dims) for k in read_kernels(data, str(where))))


def _analyze_bundle(root: Path, only: str | None) -> list[Analysis]:
    manifest = read_manifest(root)
    entries = [e for e in manifest.kernels if only is None or id_matches(e.id, only)]
    if not entries:
        held = ", ".join(e.id for e in manifest.kernels) or "nothing"
        if only is None:
            raise SelectionError(f"{root}: the bundle holds no kernel; there is nothing to analyze")
        raise SelectionError(f"{root}: --only {only} matches no kernel; it holds {held}")
    found = []
    for entry in entries:
        record = read_record(root, entry)
        dims = (record.serves.head_dim_qk, record.serves.head_dim_v, _tile_n(record))
        kernels = read_kernels(read_cubin(root, record), str(root / record.cubin.path))
        for k in kernels:
            found.append(_analysis(record.id, record.cubin.path, k, record.launch.dynamic_smem_bytes, dims))
    return found


def _tile_n(record: KernelRecord) -> int:
    value = record.spec.get("tile_n")
    return value if isinstance(value, int) else DEFAULT_TILE_N


def _analysis(
    kernel_id: str | None, file: str, kernel: KernelReport, dynamic_smem: int | None, dims: tuple[int, int, int] | None
) -> Analysis:
    result = "head dims unknown: give head_dim_qk" if dims is None else kernel_bound(kernel, *dims)
    bound, why = (None, result) if isinstance(result, str) else (result, None)
    return Analysis(kernel_id, file, kernel, dynamic_smem, bound, why)


def kernel_bound(kernel: KernelReport, head_dim_qk: int, head_dim_v: int, tile_n: int) -> Bound | str:
    """The bound from a kernel's unmasked loops, or why it has none."""
    if kernel.arch not in ARCHS or not ARCHS[kernel.arch].tmem_cols:
        return f"{kernel.arch}: the model is of sm_100's roles"
    softmax = min(kernel.innermost("softmax", False), key=_slots, default=None)
    if softmax is None:
        return "no softmax loop without a mask"
    mma = max(kernel.innermost("mma"), key=_slots, default=None)
    correction = max(kernel.innermost("correction"), key=_slots, default=None)
    notes: list[str] = []
    per_block = _times("softmax", softmax, "F2FP", tile_n // 2, notes)
    steps = 2 * (head_dim_qk // MMA_K + tile_n // MMA_K)
    mma_slots = _scaled("mma", mma, _MMA_OPCODE, steps, notes)
    correction_slots = _scaled("correction", correction, "FMUL2", head_dim_v, notes)
    terms = model.bound(
        head_dim_qk,
        head_dim_v,
        tile_n,
        round(softmax.counts.get("MUFU", 0) * per_block),
        round(softmax.slots * per_block, 1),
        correction_slots,
        mma_slots,
        ARCHS[kernel.arch],
    )
    return Bound(head_dim_qk, head_dim_v, tile_n, terms, "; ".join(notes))


def _slots(loop: LoopReport) -> int:
    return loop.slots


def _scaled(name: str, loop: LoopReport | None, opcode: str, expected: int, notes: list[str]) -> int:
    if loop is None:
        notes.append(f"no {name} loop: its slots are missing from the issue term")
        return 0
    return round(loop.slots * _times(name, loop, opcode, expected, notes))


def _times(name: str, loop: LoopReport, opcode: str, expected: int, notes: list[str]) -> float:
    """What an iteration must be multiplied by to be one block of both row tiles, from how often it has `opcode`."""
    found = loop.counts.get(opcode, 0)
    if found == expected or not found:
        if not found:
            notes.append(f"{name} loop has no {opcode}: taken as one block an iteration")
        return 1.0
    notes.append(f"{name} loop scaled by {expected}/{found} ({opcode} per block and iteration)")
    return expected / found


def _analysis_dict(a: Analysis) -> dict[str, Any]:
    data: dict[str, Any] = {"id": a.id, "file": a.file, "dynamic_smem_bytes": a.dynamic_smem_bytes}
    data.update(dataclasses.asdict(a.kernel))
    if a.bound is None:
        return data | {"bound": None, "no_bound": a.no_bound}
    b = a.bound
    terms = {**dataclasses.asdict(b.terms), "bound_clk": b.terms.bound_clk, "limiter": b.terms.limiter}
    dims = {"head_dim_qk": b.head_dim_qk, "head_dim_v": b.head_dim_v, "tile_n": b.tile_n}
    return data | {"bound": {"kind": "model", **dims, **terms, "note": b.note}, "no_bound": None}


_COUNTED = """MUFU FFMA2 FADD2 FMUL2 FFMA FADD FMUL FMNMX FMNMX3 F2FP LDTM STTM FSEL R2P UTCHMMA HGMMA UTMALDG UTMASTG
LDS STS STL LDL SYNCS BAR"""


def tables(report: Report, every_loop: bool = False) -> list[TextTable]:
    """The report as tables: one of kernels, then one of loops for each kernel; innermost loops only by default."""
    return [_kernel_table(report.kernels), *(_loop_table(a, every_loop) for a in report.kernels)]


def _kernel_table(kernels: Sequence[Analysis]) -> TextTable:
    columns = (
        "kernel",
        "arch",
        "registers",
        "setmaxnreg",
        "spills",
        "stack B",
        "SMEM B",
        "TMEM cols",
        "code B",
        "bound clk",
    )
    rows = []
    for a in kernels:
        k = a.kernel
        smem = k.static_smem_bytes + (a.dynamic_smem_bytes or 0)
        changes = "/".join(dict.fromkeys(f"{'+' if c.kind == 'inc' else '-'}{c.registers}" for c in k.setmaxnreg))
        cells = (a.title, k.arch, k.registers, changes or "none", k.spill_stores + k.spill_loads, k.stack_bytes)
        bound = f"{a.bound.terms.bound_clk:.0f} ({a.bound.terms.limiter})" if a.bound else "-"
        known = str(smem) if a.dynamic_smem_bytes is not None else f"{smem} + dynamic"
        rows.append((*map(str, cells), known, str(k.tmem_cols or "-"), str(k.code_bytes), bound))
    notes = ("bound: model figure, clocks of one SM per pair of 128-row tiles and KV block; not measured",)
    return TextTable("kernels", columns, columns[2:], tuple(rows), notes)


def _loop_table(a: Analysis, every_loop: bool) -> TextTable:
    columns = ("loop", "at", "slots", "path", "moves", "counts")
    rows = []
    for p in a.kernel.loops:
        if not (every_loop or p.innermost):
            continue
        name = p.role + (" masked" if p.masked else "") + ("" if p.innermost else " (outer, own code)")
        path = "" if p.path_max_slots in (None, p.path_min_slots) else f"{p.path_min_slots}-{p.path_max_slots}"
        counted = " ".join(f"{op} {p.counts[op]}" for op in _COUNTED.split() if op in p.counts)
        rows.append(("  " * p.depth + name, f"{p.address:#x}", str(p.slots), path, str(p.moves), counted))
    notes = list(a.kernel.notes)
    if a.kernel.spill_stores or a.kernel.spill_loads:
        spilling = dict.fromkeys(p.role for p in a.kernel.loops if p.innermost and (p.counts.keys() & {"STL", "LDL"}))
        where = f"in the loops of {', '.join(spilling)}" if spilling else "outside of innermost loops"
        notes.append(f"spills: {a.kernel.spill_stores} STL, {a.kernel.spill_loads} LDL, {where}")
    if a.bound:
        t = a.bound.terms
        notes.append(f"bound (model): MMA {t.mma_clk:.0f}, MUFU {t.mufu_clk:.0f}, issue {t.issue_clk:.0f} clk")
        notes += [a.bound.note] if a.bound.note else []
    elif a.no_bound:
        notes.append(f"no bound: {a.no_bound}")
    return TextTable(f"{a.title}: loops", columns, ("at", "slots", "path", "moves"), tuple(rows), tuple(notes))
