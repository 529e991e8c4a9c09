"""A JSON schema of spec files, for editors; made from the field table, so that it cannot drift from the reader.

The schema knows types, ranges, names and what is built. Contradictions between fields and budgets are the reader's and
the plan's to find.
"""

from __future__ import annotations

from typing import Any

from ..arch import ALIASES
from ..built import built_features
from .built import BUILT, EDITIONS, built_archs
from .fields import BUNDLE_KEYS, FIELDS, FILE_KEYS, Field, Leaf
from .model import FEATURE_FIELDS
from .reader import NAME_PATTERN, VERSION_PATTERN
from .values import AUTO

_TYPES = {"name": "string", "int": "integer", "float": "number", "bool": "boolean"}


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the newest edition."""
    fields = {name: _field(field) for name, field in FIELDS.items()}
    for name in set(FEATURE_FIELDS) - built_features():
        fields[name] = {**_many({"const": False}), "description": f"{FIELDS[name].doc} (not built yet)"}
    arch = {"enum": [s for s, name in ALIASES.items() if name in built_archs()]}
    pattern = {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": {**fields, "arch": _many(arch)},
    }
    entry = {
        "type": "object",
        "additionalProperties": False,
        "required": ["family", *(f.name for f in FIELDS.values() if f.required)],
        "properties": {
            "family": {"enum": sorted({family for family, _ in BUILT}), "description": "the kernel family"},
            **fields,
            "include": {"type": "array", "items": pattern, "description": "keep only variants that match one of these"},
            "exclude": {"type": "array", "items": pattern, "description": "drop variants that match one of these"},
        },
    }
    bundle = {"name": _text(NAME_PATTERN.pattern), "version": _text(VERSION_PATTERN.pattern)}
    assert tuple(bundle) == BUNDLE_KEYS
    properties = {
        "edition": {"enum": list(EDITIONS), "description": "edition of the spec language"},
        "bundle": {
            "type": "object",
            "additionalProperties": False,
            "required": list(BUNDLE_KEYS),
            "properties": bundle,
        },
        "archs": {**_many(arch), "description": "architectures; sm_100a when left out"},
        "kernels": {"type": "array", "minItems": 1, "items": entry},
    }
    assert tuple(properties) == FILE_KEYS
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fmha_gen spec",
        "type": "object",
        "additionalProperties": False,
        "required": ["edition", "bundle", "kernels"],
        "properties": properties,
    }


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def _many(one: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [one, {"type": "array", "minItems": 1, "uniqueItems": True, "items": one}]}


def _field(field: Field) -> dict[str, Any]:
    auto = [{"const": AUTO}] if field.auto else []
    forms: list[dict[str, Any]] = list(auto)
    if field.leaf is not None:
        forms.append(_leaf(field.leaf))
    if field.members:
        inner_auto = auto if not field.all_members else []
        members = {name: _many({"anyOf": [_leaf(leaf), *inner_auto]}) for name, leaf in field.members.items()}
        needed: dict[str, Any] = {"required": list(members)} if field.all_members else {"minProperties": 1}
        forms.append({"type": "object", "additionalProperties": False, "properties": members, **needed})
    return {**_many({"anyOf": forms} if len(forms) > 1 else forms[0]), "description": field.doc}


def _leaf(leaf: Leaf) -> dict[str, Any]:
    if leaf.choices:
        return {"enum": [c for c in leaf.choices if c not in leaf.later]}
    out: dict[str, Any] = {"type": _TYPES[leaf.kind]}
    for key, value in (("minimum", leaf.minimum), ("maximum", leaf.maximum), ("multipleOf", leaf.multiple)):
        if value is not None:
            out[key] = value
    return out
