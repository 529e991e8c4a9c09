"""What of an index or a record can be known to be wrong without another copy of it.

Digests tell damage from what was written; these checks tell what no build writes: values that nothing can launch with,
and two places of one bundle that contradict each other. `manifest_io` applies them to whatever it reads. Standard
library only.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from . import launch_rules
from .arch import ARCHS
from .built import RESCALE_THRESHOLD_RANGE
from .elf import CubinKernel
from .errors import BundleError
from .manifest import PARAM_SIZES, KernelEntry, KernelRecord, Manifest, Param, Serves, TensorMapRecord

LSE_BASES = ("e",)
MAX_THREADS, MAX_CLUSTER = 1024, 16  # of a block and of a cluster: CUDA's limits
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_SERVES = tuple(f.name for f in dataclasses.fields(Serves))
_TARGET = re.compile(rb"^\s*\.target\s+([A-Za-z0-9_]+)", re.MULTILINE)
_ENTRY = re.compile(rb"\.entry\s+([\w$]+)")
_DAMAGED = "the bundle was edited or is damaged: rebuild it, or copy it again from its source"


def check_text(data: Any, raw: bytes, where: str) -> None:
    """Raises BundleError, naming the field, for text that cannot be shown: control characters, lone surrogates.

    data: what the JSON `raw` says. ASCII without escapes has no such text: no walk then, since opening waits.
    """
    if raw.isascii() and b"\\" not in raw and b"\x7f" not in raw:
        return
    todo = [(where, data)]
    while todo:
        at, value = todo.pop()
        if isinstance(value, str) and not value.isprintable():
            raise BundleError(f"{at}: {_short(value)} is not printable text; {_DAMAGED}")
        if isinstance(value, list):
            todo += ((f"{at}[{i}]", item) for i, item in enumerate(value))
        if isinstance(value, dict):
            for key, item in value.items():
                todo += ((f"{at}.{key}", item), (f"{at}: key", key))  # the key, which is last, is looked at first


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raises BundleError for an LSE base that the launcher does not speak, a name that no file may carry, a kernel that
    is listed twice, and for entries that no build writes.
    """
    if manifest.lse_base not in LSE_BASES:
        raise BundleError(
            f"{where}: lse_base is {manifest.lse_base!r}, this fmha-gen knows {', '.join(LSE_BASES)}; {_DAMAGED}"
        )
    for key, value in (("name", manifest.name), ("version", manifest.version)):
        if not _NAME.fullmatch(value):
            raise BundleError(f"{where}: {key} is {value!r}; letters, digits and . _ + - make one; {_DAMAGED}")
    ids = [entry.id for entry in manifest.kernels]
    if len(set(ids)) < len(ids):
        twice = next(kid for kid in ids if ids.count(kid) > 1)
        raise BundleError(f"{where}: kernel {twice} is listed twice; {_DAMAGED}")
    well_formed = _are_words("-".join(ids))  # at once, since opening waits
    for entry in manifest.kernels:
        if problem := _entry_problem(entry, well_formed):
            raise BundleError(f"{where}: {problem}; {_DAMAGED}")


def _entry_problem(entry: KernelEntry, well_formed: bool) -> str | None:
    """What is wrong with an entry in itself. well_formed: every id may stand in messages and paths."""
    serves = entry.serves
    if not (well_formed or _are_words(entry.id)):
        return f"kernel id is {entry.id!r}; words of letters, digits and _ joined by - make one"
    if entry.rank < 0:
        return f"{entry.id}: rank is {entry.rank}; the lowest is 0"
    if serves.min_rows < 0 or (serves.max_rows is not None and serves.max_rows < serves.min_rows):
        return f"{entry.id}: serves.min_rows is {serves.min_rows} and max_rows {serves.max_rows}; no problem lies there"
    return None


def _are_words(text: str) -> bool:
    """Whether a text is words of ASCII letters, digits and _ joined by single -."""
    letters = text.replace("-", "").replace("_", "x")
    return "--" not in f"-{text}-" and letters.isascii() and letters.isalnum()


def check_record(record: KernelRecord, where: str) -> None:
    """Raises BundleError for launch values out of range, an unknown launch rule, parameters of no known kind, and for a
    spec, launch and `serves` that contradict each other.
    """
    for problem in (*_launch_problems(record), *_param_problems(record), *_spec_problems(record)):
        raise BundleError(f"{where}: {problem}; {_DAMAGED}")
    try:
        launch_rules.compile_grid(record.launch.grid)
        for rule in record.launch.scalars.values():
            launch_rules.compile_scalar(rule)
    except BundleError as e:
        raise BundleError(f"{where}: {e}") from None


def check_plan(plan: Any, record: KernelRecord, where: str) -> None:
    """Raises BundleError for a plan without the record's spec, or without the roles that the simulator needs; and for
    one that contradicts the record. A plan that lacks another key says nothing about it.
    """
    for problem in _plan_problems(plan, record):
        raise BundleError(f"{where}: {problem}; {_DAMAGED}")


def check_line_map(line_map: Any, where: str) -> None:
    """Raises BundleError for a line map in which no line can be looked up."""
    if problem := _line_map_problem(line_map):
        raise BundleError(f"{where}: {problem}; {_DAMAGED}")


def check_resources(kernel: CubinKernel, record: KernelRecord, where: str) -> None:
    """Raises BundleError where the record says other resources than the cubin."""
    for name in ("registers", "stack_bytes", "static_smem_bytes", "code_bytes"):
        found, said = getattr(kernel, name), getattr(record.resources, name)
        if found != said:
            raise BundleError(f"{where}: {name} is {found}, the record says {said}; {_DAMAGED}")


def check_ptx(ptx: bytes, record: KernelRecord, where: str) -> None:
    """Raises BundleError for PTX of another architecture, or without the record's kernel."""
    target = _TARGET.search(ptx)
    if target is None or target[1].decode() != record.arch:
        found = "no target" if target is None else f"target {target[1].decode()}"
        raise BundleError(f"{where}: is PTX with {found}, the record says {record.arch}; {_DAMAGED}")
    if record.symbol.encode() not in _ENTRY.findall(ptx):
        raise BundleError(f"{where}: has no entry {record.symbol}; {_DAMAGED}")


def _launch_problems(record: KernelRecord) -> Iterator[str]:
    launch = record.launch
    if launch.threads % 32 or not 32 <= launch.threads <= MAX_THREADS:
        yield f"launch.threads is {launch.threads}; a block has whole warps and {MAX_THREADS} threads at most"
    if min(launch.cluster) < 1 or math.prod(launch.cluster) > MAX_CLUSTER:
        yield f"launch.cluster is {launch.cluster}; a cluster has 1 to {MAX_CLUSTER} CTAs"
    limit = ARCHS[record.arch].smem_bytes if record.arch in ARCHS else None
    smem = launch.dynamic_smem_bytes
    if smem < 0 or (limit is not None and smem > limit):
        yield f"launch.dynamic_smem_bytes is {smem}; {record.arch} allows 0 to {limit}"


def _param_problems(record: KernelRecord) -> Iterator[str]:
    for p in record.params:
        if p.kind not in PARAM_SIZES:
            yield f"parameter {p.name} is of kind {p.kind!r}; known are {', '.join(PARAM_SIZES)}"
        elif p.size != PARAM_SIZES[p.kind]:
            yield f"parameter {p.name} of kind {p.kind} has {p.size} bytes; it takes {PARAM_SIZES[p.kind]}"


def _plan_problems(plan: Any, record: KernelRecord) -> Iterator[str]:
    if not isinstance(plan, dict):
        yield f"is {_short(plan)}; a plan is a mapping"
        return
    launch = record.launch
    grid: dict[str, Any] = {"name": launch.grid.name, "constants": dict(launch.grid.constants)}
    tiles, copy = plan.get("tiles", {}), plan.get("serves", {})
    if not (isinstance(tiles, dict) and isinstance(copy, dict)):
        yield f"tiles is {_short(tiles)} and serves {_short(copy)}; both are mappings"
        return
    yield from _said_twice(
        "plan", plan, ("launch.dynamic_smem_bytes", launch.dynamic_smem_bytes, "smem_bytes"),
        ("launch.threads", launch.threads, "num_threads"), ("launch.grid", grid, "grid"),
        ("resources.tmem_cols", record.resources.tmem_cols, "tmem_alloc_cols"), ("rank", record.rank, "rank"),
    )  # fmt: skip
    yield from _said_twice(
        "plan.tiles", tiles, ("launch.grid.constants.rows", grid["constants"].get("rows"), "rows_per_tile")
    )
    if "params" in plan and not _same_params(record.params, plan["params"]):
        yield "params of the record are not those of plan.params"
    for name in _SERVES:
        value = getattr(record.serves, name)
        if name in copy and copy[name] != (list(value) if type(value) is tuple else value):
            yield f"serves.{name} of the record is {_short(value)}, plan.serves says {_short(copy[name])}"
    for problem in (_planned_spec_problem(plan, record.spec), _roles_problem(plan, launch.threads)):
        if problem:
            yield problem


def _planned_spec_problem(plan: dict[str, Any], spec: dict[str, Any]) -> str | None:
    """How plan.spec differs from the record's, at the first key that does."""
    held = plan.get("spec")
    if not isinstance(held, dict):
        return f"spec is {_found(plan, 'spec')}; a plan has the spec of its record"
    for key in sorted({*spec, *held}):
        if key not in spec or key not in held or spec[key] != held[key]:
            return f"spec.{key} of the record is {_found(spec, key)}, plan.spec says {_found(held, key)}"
    return None


def _roles_problem(plan: dict[str, Any], threads: int) -> str | None:
    """What is wrong with plan.roles: their fields, or how they share out the warps of a block."""
    roles = plan.get("roles")
    if not isinstance(roles, list):
        return f"roles is {_found(plan, 'roles')}; a plan has a list of them"
    for i, role in enumerate(roles):
        if not isinstance(role, dict):
            return f"roles[{i}] is {_short(role)}; a role is an object"
        for key, (fits, wanted) in _ROLE.items():
            if key not in role or not fits(role[key]):
                return f"roles[{i}].{key} is {_found(role, key)}; a role has {wanted}"
    given, warps = Counter(w for role in roles for w in role["warp_ids"]), Counter(range(threads // 32))
    if given != warps:
        lack, more = sorted(warps - given), sorted(given - warps)
        return (
            f"roles: their warp_ids lack {_short(lack)} and have {_short(more)} too many; launch.threads is {threads}, "
            f"so each of warps 0 to {len(warps) - 1} is in one role, once"
        )
    return None


def _is_whole(value: Any) -> bool:
    return type(value) is int


_ROLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda v: type(v) is str, "a text"),
    "warp_ids": (lambda v: type(v) is list and all(map(_is_whole, v)), "a list of whole numbers"),
    "num_regs": (_is_whole, "a whole number"),
}


def _line_map_problem(line_map: Any) -> str | None:
    if not isinstance(line_map, dict):
        return f"is {_short(line_map)}; a line map is an object"
    files, spans = line_map.get("files"), line_map.get("spans")
    if not (isinstance(files, list) and all(type(f) is str for f in files)):
        return f"files is {_found(line_map, 'files')}; a line map has a list of names"
    if not isinstance(spans, list):
        return f"spans is {_found(line_map, 'spans')}; a line map has a list of them"
    before = 0
    for i, span in enumerate(spans):
        if not (isinstance(span, list) and len(span) == 3 and all(type(n) is int and n >= 0 for n in span)):
            return f"spans[{i}] is {_short(span)}; it holds a PTX line, the index of a file and a source line"
        if span[0] <= before:
            return f"spans[{i}] starts at PTX line {span[0]}; it must come after line {before}"
        if span[2] and span[1] >= len(files):
            return f"spans[{i}] is of file {span[1]}; files has {len(files)}, counted from 0"
        before = span[0]
    return None


def _spec_problems(record: KernelRecord) -> Iterator[str]:
    """Contradictions between the spec and the rest; and values that decide what a kernel writes: features, and the
    range that P may reach. A spec that lacks a key says nothing about it.
    """
    serves, spec = record.serves, record.spec
    yield from _said_twice(
        "spec", spec, ("launch.cluster", record.launch.cluster[0], "num_ctas"), ("serves.dtype", serves.dtype, "dtype"),
        ("serves.head_dim_qk", serves.head_dim_qk, "head_dim_qk"), ("serves.lse", serves.lse, "lse"),
        ("serves.head_dim_v", serves.head_dim_v, "head_dim_v"), ("arch", record.arch, "arch"),
        ("family", record.family, "family"),
    )  # fmt: skip
    if "mask" in spec and serves.masks != (spec["mask"],):
        yield f"serves.masks is {serves.masks}, spec.mask says {spec['mask']!r}"
    for feature in serves.features:
        if "mask" in spec and not spec.get(feature):
            yield f"serves.features is {serves.features}, the spec has no {feature}"
    low, high = RESCALE_THRESHOLD_RANGE
    threshold = spec.get("rescale_threshold", low)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not low <= threshold <= high:
        yield f"spec.rescale_threshold is {_short(threshold)}; a spec allows {low} to {high}"


def _said_twice(holder: str, held: dict[str, Any], *facts: tuple[str, Any, str]) -> Iterator[str]:
    """Where `held` says something else than the record. facts: (what the record calls it, its value, the key)."""
    for name, value, key in facts:
        if key in held and held[key] != value:
            yield f"{name} is {_short(value)}, {holder}.{key} says {_short(held[key])}"


def _same_params(params: tuple[Param, ...], held: Any) -> bool:
    """Whether a plan's parameter list, as JSON gave it back, says what `params` do."""
    try:
        return len(params) == len(held) and all(
            (p.name, p.kind, p.offset, p.size, p.nullable)
            == (h["name"], h["kind"], h["offset"], h["size"], h["nullable"])
            and _same_map(p.tensor_map, h["tensor_map"])
            for p, h in zip(params, held, strict=True)
        )
    except (TypeError, KeyError):
        return False


def _same_map(m: TensorMapRecord | None, held: Any) -> bool:
    if m is None or held is None:
        return m is held
    axes = [(a.axis, a.extent, a.box) for a in m.axes]
    return (m.tensor, m.element, m.swizzle, m.fill, axes) == (
        held["tensor"],
        held["element"],
        held["swizzle"],
        held["fill"],
        [(a["axis"], a["extent"], a["box"]) for a in held["axes"]],
    )


def _found(holder: dict[str, Any], key: str) -> str:
    return _short(holder[key]) if key in holder else "missing"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
