"""Reads a spec file: checks edition, header and every kernel entry, and expands matrices into `KernelSpec`s."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from .built import BUILT, EDITIONS, accepted_archs, built_archs, not_built, parse_arch
from .clashes import clashes
from .fields import (
    BUNDLE_KEYS,
    ENTRY_KEYS,
    FAMILIES,
    FIELDS,
    FILE_KEYS,
    LAUNCH_FLAGS,
    LAUNCH_VALUES,
    RENAMED,
)
from .model import KernelSpec
from .nodes import Map, Node, Scalar, Seq, parse
from .problems import Problems, closest, listing, nearest, show
from .values import Choice, alternatives

MAX_VARIANTS = 4096
PATTERN_KEYS = ("arch", *FIELDS)  # of an item of include or exclude
NAME_PATTERN = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
VERSION_PATTERN = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.dev|\.post)[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?")


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """Name and version of the bundle that a spec makes: ``out/<name>-<version>/``."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class SpecFile:
    """What one spec file asks for, in the order of the file and of the field table."""

    bundle: BundleHeader
    archs: tuple[str, ...]
    specs: tuple[KernelSpec, ...]


def read_text(text: str, where: str) -> SpecFile:
    """Parse and check the text of one spec file; `where` is how messages call it.

    Raises SpecError with every problem of the file, in file order.
    """
    problems = Problems(where)
    root = parse(text, problems)
    if root is None:
        problems.raise_if_any()
    if not isinstance(root, Map):
        problems.add(1, "", "the file is not a mapping", f"its keys are {', '.join(FILE_KEYS)}")
        problems.raise_if_any()
    assert isinstance(root, Map)
    _check_edition(root, problems)
    _check_keys(root, FILE_KEYS, "", problems)
    header = _read_bundle(root, problems)
    archs = _read_archs(root, problems)
    specs = _read_kernels(root, archs or built_archs(), where, problems)
    problems.raise_if_any()
    assert header is not None
    return SpecFile(header, archs, tuple(specs))


def _check_edition(root: Map, problems: Problems) -> None:
    """An unknown edition is one problem among others: the rest of the file is held to the newest edition known here."""
    node = root.get("edition")
    known = listing(EDITIONS)
    if node is None:
        problems.add(1, "edition", "missing", f"this fmha-gen reads {known}", f"write 'edition: {EDITIONS[-1]}'")
        return
    if isinstance(node, Scalar) and (node.bad or node.value in EDITIONS) and not isinstance(node.value, str):
        return
    what = f"{node.text!r}" if isinstance(node, Scalar) else "not a number"
    fix = f"write 'edition: {EDITIONS[-1]}' and check the spec against docs/spec.md, or install a newer fmha-gen"
    problems.add(node.line, "edition", f"{what} is unknown", f"this fmha-gen reads {known}", fix)


def _check_keys(node: Map, known: tuple[str, ...], path: str, problems: Problems) -> None:
    for key, line, _ in node:
        if key not in known:
            here = f"{path}.{key}" if path else key
            what, fix = _explain_key(key, known)
            problems.add(line, here, what, fix=fix)


def _explain_key(key: str, known: tuple[str, ...]) -> tuple[str, str]:
    """What is wrong with a key that does not belong here, and what to write."""
    in_entry = known in (ENTRY_KEYS, PATTERN_KEYS)
    if key in LAUNCH_VALUES:
        return f"{LAUNCH_VALUES[key]} chosen at launch, never part of a spec", _launch_fix(LAUNCH_VALUES[key])
    if key == "archs" and known is PATTERN_KEYS:
        return "unknown key", "write arch"
    if key in RENAMED and (in_entry or known is FILE_KEYS):
        return "unknown key", f"write {RENAMED[key]}"
    for keys, place in ((ENTRY_KEYS, "an entry of kernels"), (FILE_KEYS, "the top of the file")):
        if key in keys and keys is not known:
            return "misplaced key", f"move it to {place}"
    if key in BUNDLE_KEYS:
        return "misplaced key", "move it to bundle: {name: ..., version: ...}"
    meant = closest(key, (*known, *LAUNCH_VALUES)) if in_entry or known is FILE_KEYS else None
    if meant in LAUNCH_VALUES and meant not in known:
        subject = LAUNCH_VALUES[meant]
        return f"unknown key; {subject} chosen at launch, never part of a spec", _launch_fix(subject)
    return "unknown key", nearest(key, known) or f"keys here are {', '.join(known)}"


def _launch_fix(subject: str) -> str:
    """What to do about a launch value in a spec; a flag is named only where a spec may set it."""
    flag = LAUNCH_FLAGS.get(subject)
    if flag is None:
        return "remove it and pass it to the launch"
    name, value = flag.split(": ")
    if any(value in b.masks if name == "mask" else name in b.features for b in BUILT.values()):
        return f"remove it; '{flag}' makes a kernel that takes it"
    return f"remove it; kernels that take it ({flag}) are not built yet"


def _read_bundle(root: Map, problems: Problems) -> BundleHeader | None:
    node = root.get("bundle")
    example = "write bundle: {name: my_kernels, version: 1.0.0}"
    if node is None:
        problems.add(root.line, "bundle", "missing", "a bundle has a name and a version", example)
        return None
    if not isinstance(node, Map):
        problems.add(node.line, "bundle", "a mapping is needed", "a bundle has a name and a version", example)
        return None
    _check_keys(node, BUNDLE_KEYS, "bundle", problems)
    name = _header_text(node, "name", NAME_PATTERN, "lower-case letters and digits, words joined by _ or -", problems)
    version = _header_text(node, "version", VERSION_PATTERN, "numbers joined by dots, as 1.0.0 or 1.0.0rc1", problems)
    return BundleHeader(name, version) if name and version else None


def _header_text(node: Map, key: str, pattern: re.Pattern[str], rule: str, problems: Problems) -> str | None:
    value, path = node.get(key), f"bundle.{key}"
    if value is None:
        problems.add(node.line, path, "missing", rule)
    elif not isinstance(value, Scalar):
        problems.add(value.line, path, "text is needed", rule)
    elif value.bad:
        pass
    elif not isinstance(value.value, str):
        shown = value.text or "nothing"
        problems.add(
            value.line, path, f"{shown} is not text to YAML", rule, f'write "{value.text or "1.0.0"}" in quotes'
        )
    elif not pattern.fullmatch(value.value):
        problems.add(value.line, path, f"{value.value!r} is not allowed", rule)
    else:
        return value.value
    return None


def _read_archs(root: Map, problems: Problems) -> tuple[str, ...]:
    node = root.get("archs")
    if node is None:
        return ("sm_100a",)
    out: list[str] = []
    items = node.items if isinstance(node, Seq) else (node,)
    if not items:
        problems.add(node.line, "archs", "an empty list makes no kernel", f"built are {accepted_archs()}")
    for i, item in enumerate(items):
        path = f"archs[{i}]" if isinstance(node, Seq) else "archs"
        arch = _read_arch(item, path, problems)
        if arch in out:
            problems.add(item.line, path, f"{arch} is listed twice", fix="keep one")
        elif arch:
            out.append(arch)
    return tuple(out)


def _read_arch(node: Node, path: str, problems: Problems) -> str | None:
    if not isinstance(node, Scalar):
        problems.add(node.line, path, "an architecture's name is needed", f"accepted are {accepted_archs()}")
        return None
    if node.bad:
        return None
    arch = parse_arch(node.text)
    if arch is None:
        problems.add(node.line, path, f"{node.text!r} is no known architecture", f"accepted are {accepted_archs()}")
    elif arch not in built_archs():
        problems.add(node.line, path, f"{arch}: not built yet", f"accepted are {accepted_archs()}", "remove it")
        return None
    return arch


def _read_kernels(root: Map, archs: tuple[str, ...], where: str, problems: Problems) -> list[KernelSpec]:
    node = root.get("kernels")
    if node is None or not isinstance(node, Seq) or not node.items:
        line = root.line if node is None else node.line
        what = "missing" if node is None else "a list with at least one entry is needed"
        problems.add(line, "kernels", what, fix="write '- family: fmha_fwd' and its fields under kernels:")
        return []
    specs: list[KernelSpec] = []
    first: dict[KernelSpec, tuple[str, str]] = {}
    for i, entry in enumerate(node.items):
        path = f"kernels[{i}]"
        if not isinstance(entry, Map):
            problems.add(entry.line, path, "an entry is a mapping", f"its keys are {', '.join(ENTRY_KEYS)}")
            continue
        for spec in _Entry(entry, path, where, problems).expand(archs):
            if spec in first:
                other_path, source = first[spec]
                what = f"makes {spec.name} again, first made by {other_path} at {source}"
                problems.add(entry.line, path, what, fix="exclude it from one of the two")
                continue
            first[spec] = (path, spec.source)
            specs.append(spec)
    return specs


class _Entry:
    """One entry of ``kernels``: its matrix, its filters, and the checks of its variants."""

    def __init__(self, node: Map, path: str, where: str, problems: Problems) -> None:
        self.node, self.path, self.where, self.problems = node, path, where, problems
        self.lines: dict[str, int] = {key: line for key, line, _ in node}
        self.broken: set[str] = set()  # fields that could not be read; checks that need them keep silent

    def expand(self, archs: tuple[str, ...]) -> list[KernelSpec]:
        """Every variant that survives the filters, in table order.

        A field that cannot be read is replaced by a placeholder, so that the checks of the others still run; the file
        is refused anyway. Placeholder variants are not returned.
        """
        _check_keys(self.node, ENTRY_KEYS, self.path, self.problems)
        family = self._family()
        if family is None:
            self.broken.add("family")
            family = FAMILIES[0]
        axes = self._axes()
        filters = {kind: self._filters(kind) for kind in ("include", "exclude")}
        count = math.prod(len(a) for a in axes) * len(archs)
        if count > MAX_VARIANTS:
            what = f"{' x '.join(str(len(a)) for a in axes if len(a) > 1)} x {len(archs)} archs = {count} variants"
            self.problems.add(self.node.line, self.path, what, f"an entry may make {MAX_VARIANTS}", "split the entry")
            return []
        source = f"{self.where}:{self.node.line}"
        specs = [
            KernelSpec(family=family, arch=arch, source=source, **dict(p for c in combo for p in c.values))
            for arch in archs
            for combo in itertools.product(*axes)
        ]
        specs = self._filter(specs, filters["include"], filters["exclude"])
        for spec in specs:
            self._check(spec)
        return specs if not self.broken else []

    def _family(self) -> str | None:
        node, path = self.node.get("family"), f"{self.path}.family"
        families = sorted({family for family, _ in BUILT})
        if node is None:
            self.problems.add(self.node.line, path, "missing", f"built are {listing(families)}")
        elif not isinstance(node, Scalar):
            self.problems.add(node.line, path, "one family an entry", fix="write an entry for each family")
        elif node.bad:
            return None
        elif node.value in families:
            return str(node.value)
        elif node.value in FAMILIES:
            self.problems.add(node.line, path, f"{node.value}: not built yet", f"built are {listing(families)}")
        else:
            fix = nearest(node.text, families)
            self.problems.add(
                node.line, path, f"{node.text!r} is no known family", f"built are {listing(families)}", fix
            )
        return None

    def _axes(self) -> list[list[Choice]]:
        """The alternatives of every field that the entry gives or must give, in table order."""
        axes = []
        for name, field in FIELDS.items():
            node, path = self.node.get(name), f"{self.path}.{name}"
            before = len(self.problems)
            if node is not None:
                choices = alternatives(field, node, path, self.problems)
            elif field.required:
                choices = []
                if name not in self.lines:
                    self.problems.add(self.node.line, path, "missing", field.doc)
            else:
                continue
            if len(self.problems) > before or (node is not None and _has_bad(node)):
                self.broken.add(name)
            if not choices and field.required:
                self.broken.add(name)
                choices = [Choice(tuple(field.assign(field.placeholder).items()), self.node.line)]
            if choices:
                axes.append(choices)
        return axes

    def _filters(self, kind: str) -> list[tuple[str, int, list[dict[str, Any]]]]:
        """``(path, line, patterns)`` of each item of ``include`` or ``exclude``; a list in an item multiplies."""
        node, path = self.node.get(kind), f"{self.path}.{kind}"
        if node is None:
            return []
        if not isinstance(node, Seq):
            self.problems.add(node.line, path, "a list of mappings is needed", fix=f"write {kind}: [{{mask: full}}]")
            return []
        out = []
        for i, item in enumerate(node.items):
            here = f"{path}[{i}]"
            if not isinstance(item, Map) or not item.pairs:
                self.problems.add(
                    item.line, here, "a mapping of fields is needed", f"its keys are {listing(PATTERN_KEYS)}"
                )
                continue
            out.append((here, item.line, self._patterns(item, here)))
        return out

    def _patterns(self, item: Map, path: str) -> list[dict[str, Any]]:
        axes: list[list[Choice]] = []
        for key, line, value in item:
            here = f"{path}.{key}"
            if key == "arch":
                nodes = value.items if isinstance(value, Seq) else (value,)
                archs = [_read_arch(n, here, self.problems) for n in nodes]
                axes.append([Choice((("arch", a),), line) for a in archs if a])
            elif key in FIELDS:
                axes.append(alternatives(FIELDS[key], value, here, self.problems))
            else:
                what, fix = _explain_key(key, PATTERN_KEYS)
                self.problems.add(line, here, what, fix=fix)
                axes.append([])
        return [dict(p for c in combo for p in c.values) for combo in itertools.product(*axes)]

    def _filter(self, specs: list[KernelSpec], include: list, exclude: list) -> list[KernelSpec]:
        for path, line, patterns in (*include, *exclude):
            if patterns and not self.broken and not any(_matches(s, p) for s in specs for p in patterns):
                wanted = " or ".join(", ".join(f"{k}={show(v)}" for k, v in p.items()) for p in patterns[:2])
                self.problems.add(
                    line, path, f"matches no variant of this entry ({wanted})", fix="correct or remove it"
                )
        if include:
            specs = [s for s in specs if any(_matches(s, p) for _, _, patterns in include for p in patterns)]
        readable = all(patterns for _, _, patterns in (*include, *exclude))
        kept = [s for s in specs if not any(_matches(s, p) for _, _, patterns in exclude for p in patterns)]
        if not kept and readable and not self.broken:
            self.problems.add(self.node.line, self.path, "include and exclude leave no variant", fix="relax them")
        return kept

    def _check(self, spec: KernelSpec) -> None:
        """Values without a template, and contradictions; each is reported once an entry."""
        for name, value, values in not_built(spec, BUILT[spec.family, spec.arch]):
            word = "not supported" if name == "head_dim" else "not built yet"
            what = f"{show(value)}: {word} for {spec.family} on {spec.arch}"
            limit = "" if value is True else f"built are {listing(values)}"
            fix = "write the pair as {qk: 192, v: 128}" if value == (192, 192) else "remove it"
            self.problems.add(self._line(name), f"{self.path}.{name}", what, limit, fix)
        for clash in clashes(spec):
            if self.broken.intersection(clash.fields):
                continue
            line = max(self._line(f) for f in clash.fields)
            self.problems.add(line, f"{self.path}.{clash.fields[0]}", clash.what, fix=clash.fix)

    def _line(self, name: str) -> int:
        return self.lines.get(name.partition(".")[0], self.node.line)


def _has_bad(node: Node) -> bool:
    """Whether a scalar in `node` could not be read, which was reported when the file was parsed."""
    if isinstance(node, Scalar):
        return node.bad
    return any(_has_bad(n) for n in (node.items if isinstance(node, Seq) else (value for _, value in node.pairs)))


def _matches(spec: KernelSpec, pattern: dict[str, Any]) -> bool:
    return all(getattr(spec, name) == value for name, value in pattern.items())
