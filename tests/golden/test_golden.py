"""Plans and rendered sources of variants one feature apart, against committed files.

A change that moves a byte of shared memory, a register or a line of a kernel shows up here as a diff to read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fmha_gen.plan import make_plan
from fmha_gen.plan.describe import to_text
from fmha_gen.render import render
from fmha_gen.spec import KernelSpec, Registers
from tests.golden.files import HERE, check_golden, orphans

BASE = KernelSpec("fmha_fwd", "sm_100a", "bf16", 128, 128, "full", q_stage=2, source="golden")
# name -> what differs from BASE
VARIANTS: dict[str, dict[str, object]] = {
    "d128-full-q2": {},
    "d128-full-q1": {"q_stage": 1},
    "d128-causal-q2": {"mask": "causal"},
    "d128-full-q2-fp16": {"dtype": "fp16"},
    "d64-full-q2": {"head_dim_qk": 64, "head_dim_v": 64},
    "d96-full-q2": {"head_dim_qk": 96, "head_dim_v": 96},
    "d192x128-full-q2": {"head_dim_qk": 192},
    "d192x128-full-q1": {"head_dim_qk": 192, "q_stage": 1},
    "d192x128-causal-q2-200-64-48": {"head_dim_qk": 192, "mask": "causal", "registers": Registers(200, 64, 48)},
    "d128-full-q2-sm103a": {"arch": "sm_103a"},
    "sm90a-d128-causal": {"arch": "sm_90a", "mask": "causal", "q_stage": None},
    "sm90a-d256-causal": {
        "arch": "sm_90a",
        "head_dim_qk": 256,
        "head_dim_v": 256,
        "mask": "causal",
        "q_stage": None,
    },
    "sm90a-d64-causal-192-rows": {
        "arch": "sm_90a",
        "head_dim_qk": 64,
        "head_dim_v": 64,
        "mask": "causal",
        "q_stage": None,
        "tile_m": 192,
    },
    "sm90a-d96-causal": {"arch": "sm_90a", "head_dim_qk": 96, "head_dim_v": 96, "mask": "causal", "q_stage": None},
    "sm90a-d192x128-full": {"arch": "sm_90a", "head_dim_qk": 192, "q_stage": None},
    "sm90a-d64-full-serial-exp-qreg": {
        "arch": "sm_90a",
        "head_dim_qk": 64,
        "head_dim_v": 64,
        "q_stage": None,
        "warpgroup_order": "exp",
        "overlap": False,
        "q_in_registers": True,
    },
}
SOURCES = tuple(n for n in VARIANTS if n not in ("d192x128-full-q1", "d128-full-q2-sm103a"))


def spec_of(name: str) -> KernelSpec:
    return dataclasses.replace(BASE, **VARIANTS[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VARIANTS)
def test_plan(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"plans/{name}.txt", to_text(make_plan(spec_of(name))))


@pytest.mark.parametrize("name", SOURCES)
def test_source(name: str, golden: Callable[[str, str], None]) -> None:
    """The digest of the templates stays out, lest every edit of a template change every file."""
    text = render(make_plan(spec_of(name))).text
    masked, count = re.subn(r"^(templates +)[0-9a-f]{64}$", r"\1(digest)", text, flags=re.M)
    assert count == 1, "the notice holds the digest of the templates once"
    golden(f"sources/{name.replace('-', '_')}.py", masked)


def test_no_golden_file_is_an_orphan() -> None:
    folders = {
        "plans": {f"{n}.txt" for n in VARIANTS},
        "sources": {f"{n.replace('-', '_')}.py" for n in SOURCES},
    }
    found = orphans(HERE, folders)
    assert not found, f"no test compares with {', '.join(map(str, found))}; delete them"


def test_the_machinery_fails_where_it_must(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"a/b\.txt: no such golden file.*--update-golden"):
        check_golden(tmp_path, "a/b.txt", "one\n", update=False)
    check_golden(tmp_path, "a/b.txt", "one\n", update=True)
    check_golden(tmp_path, "a/b.txt", "one\n", update=False)
    with pytest.raises(AssertionError, match="differs; if on purpose: pytest tests/golden --update-golden"):
        check_golden(tmp_path, "a/b.txt", "two\n", update=False)
    with pytest.raises(pytest.fail.Exception, match="differs in line ends"):
        check_golden(tmp_path, "a/b.txt", "one", update=False)
    assert orphans(tmp_path, {"a": {"b.txt"}}) == []
    assert orphans(tmp_path, {"a": {"c.txt"}}) == [tmp_path / "a/b.txt"]
