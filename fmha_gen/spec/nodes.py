"""YAML text -> a tree of nodes with line numbers, by the YAML 1.2 core rules, refusing what YAML 1.1 reads otherwise.

PyYAML scans and composes; its resolver (YAML 1.1, in which ``no`` is false, ``010`` is 8, ``1:30`` is 90 and ``1e-3``
is a string) is not used. A plain scalar on whose meaning the two editions disagree is a problem, except for floats such
as ``1e-3``, which are floats here. Duplicate keys, anchors, aliases, tags and further documents are problems too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from .problems import Problems

MAX_DEPTH = 16
MAX_NUMBER_CHARS = 40


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar. `bad` means that its problem is already recorded and nobody needs to complain again."""

    value: str | int | float | bool | None
    text: str
    line: int
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Seq:
    """A list."""

    items: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Map:
    """A mapping in file order; every key once."""

    pairs: tuple[tuple[Scalar, Node], ...]
    line: int

    def __iter__(self) -> Iterator[tuple[str, int, Node]]:
        """``(key, line of the key, value)`` for each pair."""
        return ((str(key.value), key.line, value) for key, value in self.pairs)

    def get(self, name: str) -> Node | None:
        """The value of a key, or None."""
        return next((value for key, value in self.pairs if key.value == name), None)


Node = Scalar | Seq | Map

_LETTER_KEYS = ("n", "y")  # booleans by the letter of YAML 1.1, but its parsers in use leave them alone
_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = ("true", "True", "TRUE")
_FALSE = ("false", "False", "FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# (pattern, what YAML 1.1 makes of it, what to write)
_SURPRISES = tuple(
    (re.compile(pattern), what, fix)
    for pattern, what, fix in (
        (r"y|Y|yes|Yes|YES|on|On|ON", "true in YAML 1.1, text in YAML 1.2", "write true, or quote it"),
        (r"n|N|no|No|NO|off|Off|OFF", "false in YAML 1.1, text in YAML 1.2", "write false, or quote it"),
        (r"[-+]?0[0-7_]+", "an octal number in YAML 1.1, a decimal one in YAML 1.2", "write it without leading zeros"),
        (r"[-+]?0[0-9_]+", "text in YAML 1.1, a number in YAML 1.2", "write it without leading zeros"),
        (r"0o[0-7]+", "text in YAML 1.1, an octal number in YAML 1.2", "write the decimal number"),
        (r"[-+]?0b[01_]+", "a binary number in YAML 1.1, text in YAML 1.2", "write the decimal number"),
        (r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?", "a base-60 number in YAML 1.1, text in YAML 1.2",
         "quote it if text is meant"),
        (r"[-+]?[0-9]+_[0-9_]*(\.[0-9_]*)?|[-+]?[0-9]+\.[0-9]*_[0-9_]*", "a number in YAML 1.1, text in YAML 1.2",
         "write it without underscores"),
        (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?", "a date in YAML 1.1, text in YAML 1.2", "quote it"),
        (r"=|<<", "a special key in YAML 1.1, text in YAML 1.2", "write the keys out; lists multiply"),
    )
)  # fmt: skip


class _Composer(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML's composer without its YAML 1.1 resolver. Aliases are recorded as problems and read as empty scalars."""

    def __init__(self, text: str, problems: Problems) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._problems = problems
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            sign, kind = ("*", "aliases") if isinstance(event, yaml.AliasEvent) else ("&", "anchors")
            self._problems.add(
                line, "", f"{sign}{anchor}: {kind} are no part of a spec", fix="write the value out; lists multiply"
            )
        if isinstance(event, yaml.AliasEvent):
            self.get_event()
            return ScalarNode("", f"*{anchor}", event.start_mark, event.end_mark)  # type: ignore[arg-type]
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._problems.add(line, "", f"{tag}: tags are no part of a spec", fix="write the plain value")
        self.anchors.clear()  # a second anchor of one name is not worth a second problem
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def parse(text: str, problems: Problems) -> Node | None:
    """The document as a tree, or None (with a problem recorded) where it is empty or no YAML at all."""
    try:
        composer = _Composer(text, problems)
        root = composer.get_single_node()
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        what = e.problem or e.context or "cannot be read"
        problems.add(mark.line + 1 if mark else 1, "", f"not valid YAML: {what}", fix=_syntax_fix(what))
        return None
    except yaml.YAMLError as e:
        problems.add(1, "", f"not valid YAML: {e}".replace("\n", " "), fix="save the file as UTF-8 text")
        return None
    if root is None:
        problems.add(1, "", "the file is empty", fix="start it with 'edition: 2026'")
        return None
    return _convert(root, "", problems)


def _syntax_fix(what: str) -> str:
    if "'\\t'" in what:
        return "indent with spaces"
    if "expected a single document" in what or "but found another document" in what:
        return "keep one document per file, without a second '---'"
    return ""


def _convert(node: yaml.Node, path: str, problems: Problems) -> Node:
    line = node.start_mark.line + 1
    if isinstance(node, ScalarNode):
        return _scalar(node, path, problems)
    if isinstance(node, SequenceNode):
        return Seq(tuple(_convert(n, f"{path}[{i}]", problems) for i, n in enumerate(node.value)), line)
    assert isinstance(node, MappingNode)
    pairs: list[tuple[Scalar, Node]] = []
    first: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = _key(key_node, path, problems)
        if key is None:
            continue
        name = str(key.value)
        here = f"{path}.{name}" if path else name
        if name in first:
            problems.add(key.line, here, f"given twice, first on line {first[name]}", fix="keep one")
            continue
        first[name] = key.line
        pairs.append((key, _convert(value_node, here, problems)))
    return Map(tuple(pairs), line)


def _key(node: yaml.Node, path: str, problems: Problems) -> Scalar | None:
    line = node.start_mark.line + 1
    if not isinstance(node, ScalarNode):
        problems.add(line, path, "a key that is a list or a mapping", fix="keys are plain names")
        return None
    if node.style is None and node.value in _LETTER_KEYS:
        return Scalar(node.value, node.value, line)
    key = _scalar(node, path, problems)
    if key.bad:
        return None
    if not isinstance(key.value, str) or not key.value:
        problems.add(line, path, f"key {key.text!r} is not a name", fix="keys are plain names")
        return None
    return key


def _scalar(node: ScalarNode, path: str, problems: Problems) -> Scalar:
    text, line = node.value, node.start_mark.line + 1
    if node.style is not None:  # quoted or block: text, whatever it looks like
        return Scalar(text, text, line)
    if text.startswith("*"):  # an alias, already reported
        return Scalar(None, text, line, bad=True)
    for pattern, what, fix in _SURPRISES:
        if pattern.fullmatch(text):
            problems.add(line, path, f"{text} is {what}", fix=fix)
            return Scalar(None, text, line, bad=True)
    return Scalar(_resolve(text), text, line)


def _resolve(text: str) -> str | int | float | bool | None:
    """A plain scalar by the YAML 1.2 core schema, less what `_SURPRISES` refused."""
    if _NULL.fullmatch(text):
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if len(text) > MAX_NUMBER_CHARS:
        return text
    if _INT.fullmatch(text):
        return int(text, 16) if text.startswith("0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
