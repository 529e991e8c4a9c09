"""What stands in the tree: documentation names paths that exist, and nothing names somebody's machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fmha_gen.resources import checkout_root

ROOT = checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="needs a checkout, not an installed wheel")

TOP = r"(?:fmha_gen|templates|specs|tests|docs|benchmarks|tools|\.ci)"
NAMED_PATH = re.compile(rf"`({TOP}/[\w./-]*[\w/]|[A-Z]+\.md|Makefile|pyproject\.toml)`")
PAGE = re.compile(r"(?<![\w/])(?:docs|benchmarks)/[\w./-]+\.(?:md|py|json)\b")
LINK = re.compile(r"\]\(([^)#:]+?)(?:#[^)]*)?\)")
# A machine's own places: home folders, work trees and their like. "somebody" and "u" are nobody.
MACHINE = re.compile(r"(?<![\w.])/(home|root|work|Users|mnt)/(?!somebody\b|u\b)[A-Za-z]")


def tracked() -> list[Path]:
    assert ROOT is not None
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        paths = [ROOT / name for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for p in ROOT.rglob("*") if not {".git", ".venv", "out"} & set(p.relative_to(ROOT).parts)]
    return [p for p in paths if p.is_file()]


def documents() -> list[Path]:
    return [p for p in tracked() if p.suffix == ".md"]


def test_there_is_documentation():
    assert ROOT is not None
    names = {p.relative_to(ROOT).as_posix() for p in documents()}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/spec.md"} <= names


def test_every_path_that_the_docs_name_exists():
    assert ROOT is not None
    wrong = []
    for doc in documents():
        for number, line in enumerate(doc.read_text().splitlines(), 1):
            paths = [ROOT / m for m in NAMED_PATH.findall(line)] + [doc.parent / m for m in LINK.findall(line)]
            wrong += [f"{doc.relative_to(ROOT)}:{number}: {p}" for p in paths if not p.exists()]
    assert not wrong, "\n".join(wrong)


def test_every_page_and_benchmark_that_code_names_exists():
    assert ROOT is not None
    wrong = []
    for path in tracked():
        if path.suffix in (".py", ".j2", ".yaml", ".toml") or path.name == "Makefile":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                missing = [m for m in PAGE.findall(line) if not (ROOT / m).exists()]
                wrong += [f"{path.relative_to(ROOT)}:{number}: {m}" for m in missing]
    assert not wrong, "\n".join(wrong)


def test_no_file_names_a_place_on_somebodys_machine():
    assert ROOT is not None
    wrong = []
    for path in tracked():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        wrong += [f"{path.relative_to(ROOT)}:{n}: {line.strip()[:100]}" for n, line in enumerate(lines, 1)
                  if MACHINE.search(line)]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_every_field_of_a_spec_is_documented():
    from fmha_gen.spec.fields import FIELDS

    assert ROOT is not None
    text = (ROOT / "docs" / "spec.md").read_text()
    missing = [name for name in FIELDS if f"| `{name}` |" not in text]
    assert not missing, f"docs/spec.md lacks a row for {missing}"


def test_every_decision_record_is_numbered_once():
    assert ROOT is not None
    numbers = [p.name[:4] for p in documents() if p.parent.name == "adr"]
    assert numbers and sorted(numbers) == sorted(set(numbers)) and all(n.isdigit() for n in numbers)


def test_pre_commit_has_the_pins_of_pyproject():
    assert ROOT is not None
    pin = re.compile(r'"([A-Za-z][\w.-]*)==([\w.]+)"')
    pinned = dict(pin.findall((ROOT / "pyproject.toml").read_text()))
    hooks = pin.findall((ROOT / ".pre-commit-config.yaml").read_text())
    assert {"ruff", "mypy"} <= {name for name, _ in hooks}
    wrong = [(name, version, pinned[name]) for name, version in hooks if name in pinned and pinned[name] != version]
    assert not wrong


def test_every_finding_of_the_simulator_is_documented():
    assert ROOT is not None
    named = re.compile(r"(?:Fault|report)\(\s*\"([a-z0-9-]+)\"")
    kinds = {k for p in (ROOT / "fmha_gen" / "sim").rglob("*.py") for k in named.findall(p.read_text())}
    assert {"race", "deadlock", "mbar-overflow"} <= kinds
    page = (ROOT / "docs" / "simulator.md").read_text()
    missing = sorted(k for k in kinds if f"`{k}`" not in page)
    assert not missing, f"docs/simulator.md lacks {missing}"


def test_every_error_code_of_the_command_line_is_documented():
    from fmha_gen import errors

    assert ROOT is not None
    source = (ROOT / "fmha_gen" / "cli" / "__init__.py").read_text()
    codes = set(re.findall(r"print_error\(\s*\"(\w+)\"", source))
    codes |= {e.code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.FmhaGenError)}
    assert {"usage", "file", "spec", "verify"} <= codes
    page = (ROOT / "docs" / "cli.md").read_text()
    missing = sorted(c for c in codes - {errors.FmhaGenError.code} if f"`{c}`" not in page)
    assert not missing, f"docs/cli.md lacks {missing}"
