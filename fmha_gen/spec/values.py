"""Reads one field of a kernel entry: a node of the tree -> the alternatives that multiply into variants."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from .fields import Field, Leaf
from .nodes import Map, Node, Scalar, Seq
from .problems import Problems, listing, nearest, show

AUTO = "auto"
_KINDS: dict[type, str] = {str: "text", bool: "a truth value", int: "a whole number", float: "a number"}
_WANTED = {"name": "a name", "int": "a whole number", "float": "a number", "bool": "true or false"}
_BAD = object()


@dataclass(frozen=True, slots=True)
class Choice:
    """One alternative of a field: the `KernelSpec` attributes that it sets, and where it stands."""

    values: tuple[tuple[str, Any], ...]
    line: int


def alternatives(field: Field, node: Node, path: str, problems: Problems) -> list[Choice]:
    """Every alternative of `field` in file order; problems are recorded and their alternatives left out."""
    items = node.items if isinstance(node, Seq) else (node,)
    if not items:
        problems.add(node.line, path, "an empty list makes no kernel", fix="list at least one value or remove the key")
    if field.leaf is None and len(items) == len(field.members) and all(_is_number(item) for item in items):
        wanted = ", ".join(f"{m}: {item.text}" for m, item in zip(field.members, items, strict=True))  # type: ignore[union-attr]
        problems.add(node.line, path, "a list of alternatives, not a set of values", field.doc, f"write {{{wanted}}}")
        return []
    out: list[Choice] = []
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for i, item in enumerate(items):
        here = f"{path}[{i}]" if isinstance(node, Seq) else path
        for value in _values(field, item, here, problems):
            choice = Choice(tuple(field.assign(value).items()), item.line)
            if choice.values in seen:
                problems.add(item.line, here, f"{_display(value)} is listed twice", fix="keep one")
                continue
            seen.add(choice.values)
            out.append(choice)
    return out


def _is_number(node: Node) -> bool:
    return isinstance(node, Scalar) and type(node.value) is int


def _values(field: Field, node: Node, path: str, problems: Problems) -> list[Any]:
    if isinstance(node, Seq):
        problems.add(node.line, path, "a list inside a list", fix=_pair_hint(field) or "lists do not nest: flatten it")
        return []
    if isinstance(node, Map):
        return _mapping(field, node, path, problems)
    if node.bad:
        return []
    if field.auto and node.value == AUTO:
        return [None]
    if field.leaf is None:
        members = ", ".join(f"{m}: ..." for m in field.members)
        problems.add(node.line, path, f"{_shown(node)}: a mapping is needed", field.doc, f"write {{{members}}}")
        return []
    value = read_leaf(field.leaf, node, path, problems, auto=field.auto, doc=field.doc)
    return [] if value is _BAD else [value]


def _mapping(field: Field, node: Map, path: str, problems: Problems) -> list[dict[str, Any]]:
    """The mapping form of a field; lists inside it multiply too."""
    if not field.members:
        assert field.leaf is not None
        what = f"a mapping where {_WANTED[field.leaf.kind]} is needed"
        problems.add(node.line, path, what, _limit(field.leaf, field.auto) or field.doc)
        return []
    parts: dict[str, list[Any]] = {}
    for key, line, value in node:
        here = f"{path}.{key}"
        leaf = field.members.get(key)
        if leaf is None:
            hint = nearest(key, field.members) or f"keys are {', '.join(field.members)}"
            problems.add(line, here, "unknown key", fix=hint)
            continue
        parts[key] = _member(field, leaf, value, here, problems)
    missing = [m for m in field.members if m not in parts]
    if missing and (field.all_members or not node.pairs):
        problems.add(node.line, path, f"{', '.join(missing)} missing", field.doc)
        return []
    if not parts:
        return []
    keys = [m for m in field.members if m in parts]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(parts[k] for k in keys))]


def _member(field: Field, leaf: Leaf, node: Node, path: str, problems: Problems) -> list[Any]:
    items = node.items if isinstance(node, Seq) else (node,)
    if not items:
        problems.add(node.line, path, "an empty list makes no kernel", fix="list at least one value")
    auto = field.auto and not field.all_members
    out = []
    for item in items:
        if not isinstance(item, Scalar):
            problems.add(item.line, path, "a plain value is needed here", field.doc)
        elif not item.bad:
            is_auto = auto and item.value == AUTO
            value = None if is_auto else read_leaf(leaf, item, path, problems, auto=auto, doc=field.doc)
            if value is not _BAD:
                out.append(value)
    return out


def read_leaf(leaf: Leaf, node: Scalar, path: str, problems: Problems, *, auto: bool = False, doc: str = "") -> Any:
    """The value of a scalar, or `_BAD` with a problem recorded."""
    value = node.value
    if value is None:
        problems.add(node.line, path, "no value", doc, "write auto or remove the key" if auto else "give it a value")
        return _BAD
    if not _type_matches(leaf, value):
        what = f"{_shown(node)} is {_KINDS[type(value)]}; {_WANTED[leaf.kind]} is needed"
        problems.add(node.line, path, what, _limit(leaf, auto) or doc, _type_fix(leaf, node))
        return _BAD
    if leaf.kind == "float":
        value = float(value) + 0.0  # -0.0 is 0.0: one kernel has one id
    if not _in_range(leaf, value):
        fix = nearest(node.text, leaf.choices) if leaf.kind == "name" else ""
        problems.add(node.line, path, f"{_shown(node)} is not allowed", _limit(leaf, auto), fix)
        return _BAD
    return value


def _type_matches(leaf: Leaf, value: Any) -> bool:
    wanted: dict[str, tuple[type, ...]] = {"name": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
    return type(value) in wanted[leaf.kind]


def _in_range(leaf: Leaf, value: Any) -> bool:
    if leaf.choices:
        return value in leaf.choices
    if leaf.kind in ("name", "bool"):
        return True
    if not math.isfinite(value):
        return False
    low = leaf.minimum is None or value >= leaf.minimum
    high = leaf.maximum is None or value <= leaf.maximum
    return low and high and (leaf.multiple is None or value % leaf.multiple == 0)


def _limit(leaf: Leaf, auto: bool) -> str:
    if leaf.choices:
        built = [c for c in leaf.choices if c not in leaf.later]
        later = f" (not built yet: {listing(leaf.later)})" if leaf.later else ""
        return "values are " + listing([*built, *([AUTO] if auto else [])]) + later
    if leaf.minimum is None:
        return ""
    steps = f" in steps of {leaf.multiple}" if leaf.multiple else ""
    return f"allowed is {leaf.minimum:g} to {leaf.maximum:g}{steps}" + (f", or {AUTO}" if auto else "")


def _type_fix(leaf: Leaf, node: Scalar) -> str:
    if isinstance(node.value, str) and leaf.kind in ("int", "float") and node.value.replace(".", "", 1).isdigit():
        return "remove the quotes"
    if leaf.kind == "bool":
        return "write true or false"
    if leaf.kind == "name" and not isinstance(node.value, str):
        return "quote it if it is meant as text"
    return ""


def _pair_hint(field: Field) -> str:
    return "write a pair as {qk: ..., v: ...}" if field.name == "head_dim" else ""


def _shown(node: Scalar) -> str:
    return repr(node.text) if isinstance(node.value, str) else node.text


def _display(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    return show(value)
