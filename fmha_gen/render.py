"""Plan -> source text: the only place that knows the template engine.

Templates choose structure; constants carry numbers. They stay valid Python (block tags look like comments, ``# {%``),
undefined names are errors, and every ``{{ }}`` goes through a filter: ``py`` writes Python literals, ``note`` words of
a comment or docstring.
Everything is rendered and checked in memory; writing files is the caller's.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import json
import math
import re
import symtable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from .errors import RenderError
from .plan import KernelPlan
from .resources import data_dir

# Which folder of a family's templates an architecture uses.
ARCH_FOLDER = {"sm_100a": "sm100", "sm_103a": "sm100", "sm_90a": "sm90"}
LINE_LENGTH = 120
_LEFTOVER = re.compile(r"\{%|%\}|\{\{|\}\}|# %|\{#|#\}")
_REQUIRED = ("KERNEL_NAME", "host_entry", "trace_arguments")


@dataclass(frozen=True, slots=True)
class Rendered:
    """One kernel's source. digest: SHA-256 (hex) of text. kernel_name: what the kernel's symbol starts with."""

    text: str
    digest: str
    kernel_name: str


class Literal(str):
    """Text that a filter made; nothing else may stand in a source."""


def render(plan: KernelPlan, templates: Path | None = None) -> Rendered:
    """The source of a plan's kernel. `templates`: another template folder than the installation's.

    Raises RenderError ``template:line: name: what is wrong``: an undefined name, a leftover tag, invalid Python.
    """
    root = templates if templates is not None else data_dir("templates")
    spec = plan.spec
    name = f"{spec.family}/{ARCH_FOLDER[spec.arch]}/kernel.py.j2"
    context = {
        "plan": plan,
        "kernel_name": plan.symbol_prefix,
        "longest_first": plan.longest_first,
        "paired": plan.paired,
        "balanced": plan.balanced,
        "o_aliases_q": plan.o_aliases_q,
        "spec_digest": spec.digest,
        "template_digest": template_digest(root, spec.family),
    }
    text = render_template(name, context, root)
    check_source(text, name, plan.symbol_prefix)
    return Rendered(text, hashlib.sha256(text.encode()).hexdigest(), plan.symbol_prefix)


def render_template(name: str, context: dict[str, Any], root: Path) -> str:
    """One template with a context. Raises RenderError that names template, line and the missing name."""
    try:
        return _environment(root).get_template(name).render(context)
    except jinja2.TemplateNotFound as e:
        raise RenderError(f"{root / str(e.name)}: no such template; it is included by {name} or is its own file") from e
    except jinja2.TemplateSyntaxError as e:
        raise RenderError(f"{e.name or name}:{e.lineno}: {e.message}; tags stand on a line of their own") from e
    except jinja2.UndefinedError as e:
        raise RenderError(
            f"{_position(e, root, name)}: {e.message}; give it a value, in the plan or in the template"
        ) from e
    except UnicodeDecodeError as e:
        raise RenderError(
            f"{name}: it, or a template that it includes, is not UTF-8 (byte {e.start}); save it as UTF-8 text"
        ) from e
    except _LiteralError as e:
        raise RenderError(f"{_position(e, root, name)}: {e}") from e


def check_source(text: str, name: str, kernel_name: str) -> None:
    """Raises RenderError unless `text` is complete Python that defines what it uses, and what the compiler imports."""
    for number, line in enumerate(text.splitlines(), 1):
        found = _LEFTOVER.search(line)
        if found:
            raise RenderError(
                f"{name}: rendered line {number} still holds {found[0]!r}: {line.strip()}; a tag or an expression was "
                f"not rendered: tags stand alone on a line that starts with '# {{%'"
            )
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        raise RenderError(
            f"{name}: rendered line {e.lineno} is not Python: {e.msg}: {(e.text or '').strip()}; fix the template"
        ) from e
    missing = _undefined_names(text, name)
    if missing:
        raise RenderError(
            f"{name}: the rendered source uses {', '.join(missing)}, which nothing defines; is a template empty, or an "
            f"include missing?"
        )
    defined = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    values = {
        t.id: n.value for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    for required in _REQUIRED:
        if required not in defined and required not in values:
            raise RenderError(f"{name}: the rendered source does not define {required}; the compiler imports it")
    value = values.get("KERNEL_NAME")
    if not isinstance(value, ast.Constant) or value.value != kernel_name:
        raise RenderError(f"{name}: KERNEL_NAME is not {kernel_name!r}; write it as {{{{ kernel_name | py }}}}")


def _undefined_names(text: str, name: str) -> list[str]:
    """Names that some scope of a module uses and none defines: of the role whose template is empty, say."""
    module = symtable.symtable(text, name, "exec")
    known = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    known |= {*dir(builtins), "__file__", "__name__"}
    missing, scopes = set(), [module]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        used = (s for s in scope.get_symbols() if s.is_referenced() and (s.is_global() or scope is module))
        missing |= {s.get_name() for s in used} - known
    return sorted(missing)


def template_digest(root: Path, family: str) -> str:
    """SHA-256 over the templates that a family is made of: names and contents."""
    files = sorted((root / family).rglob("*.j2"))
    listing = [[p.relative_to(root).as_posix(), hashlib.sha256(p.read_bytes()).hexdigest()] for p in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def _environment(root: Path) -> jinja2.Environment:
    """The settings that keep a template valid Python, also after a formatter ran over it."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        block_start_string="# {%",
        block_end_string="%}",
        comment_start_string="# {#",
        comment_end_string="#}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        finalize=_only_literals,
    )
    env.filters["py"] = py
    env.filters["note"] = note
    return env


class _LiteralError(Exception):
    pass


def _only_literals(value: Any) -> str:
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    if isinstance(value, Literal):
        return value
    raise _LiteralError(f"{value!r} is written without a filter; write {{{{ ... | py }}}}, or | note in a comment")


def py(value: Any, hex: bool = False) -> Literal:
    """A value as a Python literal that evaluates to it exactly; integers in hexadecimal if `hex`.

    None, bool, int, float (round-trip, also inf and nan), str, and tuples, lists and dicts of them. Undefined values
    raise their own error again. A literal that is too long for a line is broken, one element a line.
    """
    flat = _literal(value, hex)
    if len(flat) > LINE_LENGTH - 40 and isinstance(value, (tuple, list, dict)) and value:
        return Literal(_broken(value, hex, ""))
    return Literal(flat)


def note(value: Any, width: int = 0) -> Literal:
    """A value as words of a comment or a docstring, padded to `width` (negative: to the right); never code."""
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    text = str(value)
    if not (text.isprintable() and text.isascii()) or '"""' in text:
        raise _LiteralError(f"{value!r} cannot stand in a comment: one line of printable ASCII can")
    return Literal(f"{text:<{width}}" if width >= 0 else f"{text:>{-width}}")


def _literal(value: Any, hex_: bool) -> str:
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return f"{int(value):#x}" if hex_ else repr(int(value))
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, str):
        return json.dumps(value) if value.isprintable() and value.isascii() else repr(str(value))
    if isinstance(value, (tuple, list, dict)):
        opening, closing = _brackets(value)
        items = _items(value, hex_)
        comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
        return opening + ", ".join(items) + comma + closing
    raise _LiteralError(f"{value!r} of type {type(value).__name__} has no Python literal; name one of its fields")


def _items(value: tuple[Any, ...] | list[Any] | dict[Any, Any], hex_: bool) -> list[str]:
    if isinstance(value, dict):
        return [f"{_literal(k, hex_)}: {_literal(v, hex_)}" for k, v in value.items()]
    return [_literal(v, hex_) for v in value]


def _brackets(value: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> tuple[str, str]:
    return ("{", "}") if isinstance(value, dict) else ("[", "]") if isinstance(value, list) else ("(", ")")


def _broken(value: tuple[Any, ...] | list[Any] | dict[Any, Any], hex_: bool, indent: str) -> str:
    opening, closing = _brackets(value)
    inner = indent + "    "
    lines = [f"{inner}{item}," for item in _items(value, hex_)]
    return "\n".join([opening, *lines, indent + closing])


def _position(error: BaseException, root: Path, name: str) -> str:
    """``template:line`` of the innermost template frame of an error."""
    found, tb = name, error.__traceback__
    while tb is not None:
        path = Path(tb.tb_frame.f_code.co_filename)
        if path.is_relative_to(root):
            found = f"{path.relative_to(root).as_posix()}:{tb.tb_lineno}"
        tb = tb.tb_next
    return found
