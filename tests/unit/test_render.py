"""Rendering: strict names, exact literals, complete Python; errors name template, line and name."""

from __future__ import annotations

import ast
import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import jinja2
import pytest

from fmha_gen.errors import RenderError
from fmha_gen.plan import make_plan
from fmha_gen.render import check_source, py, render, render_template, template_digest
from fmha_gen.resources import data_dir
from fmha_gen.spec import KernelSpec

SPEC = KernelSpec("fmha_fwd", "sm_100a", "bf16", 128, 128, "full", q_stage=2, source="specs/x.yaml:14")
COMPLETE = 'KERNEL_NAME = "k"\n\n\ndef host_entry():\n    pass\n\n\ndef trace_arguments():\n    return ()\n'


def one(tmp_path: Path, text: str, **context: Any) -> str:
    (tmp_path / "t.py.j2").write_text(text)
    return render_template("t.py.j2", context, tmp_path)


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128)])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("q_stage", [1, 2])
def test_every_core_variant_renders(d: int, dv: int, mask: str, q_stage: int) -> None:
    plan = make_plan(dataclasses.replace(SPEC, head_dim_qk=d, head_dim_v=dv, mask=mask, q_stage=q_stage))
    rendered = render(plan)
    assert rendered.kernel_name == plan.id.replace("-", "_") == plan.symbol_prefix
    assert render(plan) == rendered
    namespace = {
        t.id: node.value
        for node in ast.parse(rendered.text).body
        if isinstance(node, ast.Assign)
        for t in node.targets
        if isinstance(t, ast.Name)
    }
    assert ast.literal_eval(namespace["SMEM_BYTES"]) == plan.smem_bytes
    assert ast.literal_eval(namespace["EXP2_FMA_PAIRS"]) == plan.exp2.emulated_pairs


def test_a_missing_context_key_fails_by_name(tmp_path: Path) -> None:
    """Case C07 (pallets/jinja#1849): an undefined variable must not become empty text."""
    with pytest.raises(RenderError, match=r"^t\.py\.j2:2: 'tile_n' is undefined"):
        one(tmp_path, "A = {{ tile_m | py }}\nB = {{ tile_n | py }}\n", tile_m=1)
    with pytest.raises(RenderError, match=r"^t\.py\.j2:1: 'tile_n' is undefined"):
        one(tmp_path, "{{ tile_n }} = 1\n")
    with pytest.raises(RenderError, match="'tile_n' is undefined"):
        one(tmp_path, "# {% if tile_n %}\nA = 1\n# {% endif %}\n")
    with pytest.raises(RenderError, match=r"t\.py\.j2:1: .*has no attribute 'smem_byte'"):
        one(tmp_path, "A = {{ plan.smem_byte | py }}\n", plan=make_plan(SPEC))


def test_the_real_templates_fail_by_name_when_the_plan_lacks_a_field(tmp_path: Path) -> None:
    root = tmp_path / "templates"
    shutil.copytree(data_dir("templates"), root)
    constants = root / "fmha_fwd/sm100/constants.py.j2"
    constants.write_text("X = {{ plan.no_such_field | py }}\n" + constants.read_text())
    with pytest.raises(RenderError, match=r"fmha_fwd/sm100/constants\.py\.j2:1: .*no_such_field"):
        render(make_plan(SPEC), root)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (7, "7"),
        (-3, "-3"),
        (1e-7, "1e-07"),
        (0.1, "0.1"),
        (8.0, "8.0"),
        (1e300, "1e+300"),
        (math.inf, 'float("inf")'),
        (-math.inf, 'float("-inf")'),
        ("bf16", '"bf16"'),
        ('a"b', '"a\\"b"'),
        ("ä\n", "'ä\\n'"),
        ((), "()"),
        ((1,), "(1,)"),
        ((1, (2, 3)), "(1, (2, 3))"),
        ([1, None], "[1, None]"),
        ({"a": (1,)}, '{"a": (1,)}'),
    ],
)
def test_literals_round_trip(tmp_path: Path, value: object, text: str) -> None:
    assert py(value) == text
    assert eval(one(tmp_path, "{{ v | py }}", v=value)) == value


def test_numpy_like_and_subclass_numbers_stay_plain() -> None:
    class Count(int):
        def __repr__(self) -> str:
            return "Count!"

    assert py(Count(4)) == "4"
    assert math.isnan(eval(py(math.nan)))
    assert py(0x8200490, hex=True) == "0x8200490"


def test_floats_round_trip_exactly() -> None:
    for x in (0.695146143436431884765625, 0.6931471805599453, 1 / 3, 5e-324, 2.0**-1074, 1.7976931348623157e308):
        assert ast.literal_eval(py(x)) == x


def test_long_literals_are_broken_by_element() -> None:
    value = tuple(tuple(range(16)) for _ in range(3))
    text = py(value)
    assert text.count("\n") == 4
    assert max(len(line) for line in text.splitlines()) <= 120
    assert ast.literal_eval(text) == value


@pytest.mark.parametrize(
    "value", [object(), make_plan(SPEC).smem[0], {1, 2}, b"x"], ids=["object", "dataclass", "set", "bytes"]
)
def test_what_has_no_literal_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(RenderError, match=r"t\.py\.j2:1: .* has no Python literal"):
        one(tmp_path, "A = {{ v | py }}\n", v=value)


@pytest.mark.parametrize("value", [4, 0.5, (1, 2), None, "a"])
def test_values_without_a_filter_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(RenderError, match=r"t\.py\.j2:1: .* is written without a filter"):
        one(tmp_path, "A = {{ v }}\n", v=value)


def test_notes_stand_in_comments(tmp_path: Path) -> None:
    assert one(tmp_path, "A = 1  # {{ n | note }}: {{ 7 | note(-3) }}|\n", n="q_full") == "A = 1  # q_full:   7|\n"
    for bad in ("two\nlines", 'end """ here', "\u00e4"):
        with pytest.raises(RenderError, match=r"t\.py\.j2:1: .* cannot stand in a comment"):
            one(tmp_path, "# {{ n | note }}\n", n=bad)


def test_tags_look_like_comments_and_leave_nothing(tmp_path: Path) -> None:
    text = "# {# a remark #}\nA = 1\n    # {% if on %}\nB = 2\n# {% else %}\nB = 3\n# {% endif %}\n"
    assert one(tmp_path, text, on=True) == "A = 1\nB = 2\n"
    assert one(tmp_path, text, on=False) == "A = 1\nB = 3\n"


@pytest.mark.parametrize("bad", ["x = '{%'", "# % if q", "y = '{{ z }}'", "# {# note"])
def test_leftover_tags_are_refused(bad: str) -> None:
    with pytest.raises(RenderError, match="k.py.j2: rendered line 2 still holds"):
        check_source(f"A = 1\n{bad}\n" + COMPLETE, "k.py.j2", "k")


def test_invalid_python_is_refused_with_its_line() -> None:
    with pytest.raises(RenderError, match=r"k.py.j2: rendered line 2 is not Python: .*def f\("):
        check_source("A = 1\ndef f(:\n", "k.py.j2", "k")


def test_what_the_compiler_imports_must_be_there() -> None:
    check_source(COMPLETE, "k.py.j2", "k")
    for name in ("KERNEL_NAME", "host_entry", "trace_arguments"):
        with pytest.raises(RenderError, match=f"does not define {name}"):
            check_source(COMPLETE.replace(name, "other"), "k.py.j2", "k")
    with pytest.raises(RenderError, match="KERNEL_NAME is not 'other'"):
        check_source(COMPLETE, "k.py.j2", "other")


def test_names_that_nothing_defines_are_refused() -> None:
    """A role whose template is empty leaves a call of nothing; so does a helper that was renamed in one place."""
    use = "def f(a):\n    b = [gone(x, a) for x in range(3)]\n    return lambda: b + LOST\n"
    with pytest.raises(RenderError, match="k.py.j2: the rendered source uses LOST, gone, which nothing defines"):
        check_source(use + COMPLETE, "k.py.j2", "k")
    check_source("import math as gone\n" + use + "LOST = 1\n" + COMPLETE, "k.py.j2", "k")


@pytest.mark.parametrize("role", ["softmax", "correction", "mma", "load", "epilogue"])
def test_an_empty_or_unreadable_role_template_is_refused(role: str, tmp_path: Path) -> None:
    templates = Path(shutil.copytree(data_dir("templates"), tmp_path / "templates"))
    path = templates / "fmha_fwd" / "sm100" / "roles" / f"{role}.py.j2"
    path.write_text("")
    with pytest.raises(RenderError, match="the rendered source uses .*, which nothing defines; is a template empty"):
        render(make_plan(SPEC), templates)
    path.write_bytes(b"# \xff\n")
    other = Path(shutil.copytree(templates, tmp_path / "again"))  # environments are kept by folder
    with pytest.raises(RenderError, match="is not UTF-8"):
        render(make_plan(SPEC), other)


def test_missing_and_broken_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"parts/gone\.j2: no such template"):
        one(tmp_path, '# {% include "parts/gone.j2" %}\n')
    with pytest.raises(RenderError, match=r"t\.py\.j2:2: .*tags stand on a line of their own"):
        one(tmp_path, "A = 1\n# {% endfor %}\n")
    with pytest.raises(RenderError, match=r"kernel\.py\.j2: no such template"):
        render(make_plan(SPEC), tmp_path)


def test_the_template_digest_follows_names_and_contents(tmp_path: Path) -> None:
    family = tmp_path / "f"
    family.mkdir()
    (family / "a.j2").write_text("1")
    first = template_digest(tmp_path, "f")
    (family / "a.j2").rename(family / "b.j2")
    second = template_digest(tmp_path, "f")
    (family / "b.j2").write_text("2")
    assert len({first, second, template_digest(tmp_path, "f")}) == 3


def test_spec_fields_reach_the_source() -> None:
    """Case A04: two specs that differ in one field give two sources."""
    base = render(make_plan(SPEC))
    changes: list[dict[str, Any]] = [
        {"dtype": "fp16"},
        {"mask": "causal"},
        {"kv_stage": 2},
        {"exp2_emulation": 0},
        {"rescale_threshold": 0.0},
        {"q_stage": 1},
        {"tile_n": 64},
        {"schedule": "longest_first"},
    ]
    for change in changes:
        other = render(make_plan(dataclasses.replace(SPEC, **change)))
        assert other.digest != base.digest, change
        assert other.kernel_name != base.kernel_name, change


def test_templates_are_python_as_they_are() -> None:
    """Each template parses with tags as comments and expressions replaced, so that editors and ruff can read them."""
    env = jinja2.Environment(block_start_string="# {%", block_end_string="%}", variable_start_string="{{")
    for path in sorted(data_dir("templates").rglob("*.j2")):
        source = path.read_text()
        for number, line in enumerate(source.splitlines(), 1):
            if "{%" in line:
                assert line.strip().startswith("# {%") and line.rstrip().endswith("%}"), f"{path.name}:{number}: {line}"
        env.parse(source)
