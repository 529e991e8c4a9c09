"""Imports point one way. Every arrow that is not listed here fails, and so does a listed module that is gone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fmha_gen

PACKAGE = Path(fmha_gen.__file__).parent

# unit -> (units of fmha_gen that it may import, third-party packages that it may import). A unit is a module or package
# directly under fmha_gen, or one module named with its path where that has rules of its own.
BASE = {"errors"}
BUILD_STAGES = {"__init__", "arch", "bundle", "compiler", "elf", "launch_rules", "manifest", "manifest_io", "plan"} | {
    "render",
    "resources",
    "sass",
    "spec",
}
RULES: dict[str, tuple[set[str], set[str]]] = {
    "__init__": (set(), set()),
    "errors": (set(), set()),
    "arch": (BASE, set()),
    "built": (BASE | {"arch"}, set()),
    "manifest": (BASE, set()),
    "launch_rules": (BASE | {"manifest"}, set()),
    "resources": (BASE, set()),
    "output_file": (set(), set()),
    "elf": (BASE, set()),
    "record_checks": (BASE | {"arch", "built", "elf", "launch_rules", "manifest"}, set()),
    "manifest_io": (BASE | {"manifest", "elf", "record_checks"}, set()),
    "spec": (BASE | {"arch", "built"}, {"yaml"}),
    "plan": (BASE | {"arch", "manifest", "launch_rules", "spec"}, set()),
    "render": (BASE | {"resources", "spec", "plan"}, {"jinja2"}),
    "device": (set(), {"cutlass"}),
    "sass": (BASE | {"elf"}, set()),
    "compiler": (BASE | {"elf", "manifest", "plan", "render", "sass"}, {"cutlass"}),
    "bundle": (BASE | {"manifest", "manifest_io", "elf", "record_checks"}, set()),
    "build": (BASE | BUILD_STAGES, set()),
    "build/executors.py": (BASE, {"distributed"}),
    "runtime": (BASE | {"built", "elf", "launch_rules", "manifest", "manifest_io"}, {"cuda"}),
    "sim": (BASE, {"numpy", "numba", "llvmlite"}),
    "sim/driver.py": (BASE | {"manifest", "runtime", "sim"}, {"numpy"}),
    "interop": (BASE | {"runtime"}, set()),
    "interop/torch.py": (BASE | {"runtime", "interop"}, {"torch"}),
    "analyze": (BASE | {"arch", "manifest", "manifest_io", "plan", "sass"}, set()),
    "reference": (BASE, {"numpy"}),
    "run": (
        BASE | {"built", "launch_rules", "manifest", "manifest_io", "output_file", "reference", "runtime", "sim"},
        {"numpy"},
    ),
    "bench": (BASE | {"__init__", "arch", "manifest", "reference", "runtime"}, {"numpy"}),
    "bench/peers.py": (BASE | {"bench", "runtime"}, {"torch"}),
    "bench/plot.py": (BASE | {"bench"}, {"matplotlib"}),
    "explain": (BASE | {"manifest", "runtime"}, set()),
    "verify": (
        BASE | {"launch_rules", "manifest", "manifest_io", "output_file", "reference", "run", "runtime", "sim"},
        {"numpy"},
    ),
    "doctor": (BASE | {"__init__", "arch", "built", "compiler", "resources", "runtime", "sass", "spec"}, set()),
    "__main__": ({"__init__", "cli", "doctor"}, {"click", "rich"}),
}
CLI_THIRD_PARTY = {"click", "rich"}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "_data" not in p.parts)


def unit_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.as_posix() if relative.as_posix() in RULES else relative.parts[0].removesuffix(".py")


def imports(path: Path) -> set[tuple[str, int]]:
    """``(dotted absolute name, line)`` of everything that the module imports, wherever the statement stands."""
    package = ("fmha_gen", *path.relative_to(PACKAGE).parts[:-1])
    found: set[tuple[str, int]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*base, *([node.module] if node.module else [])))
            if name == "fmha_gen":
                found |= {(f"fmha_gen.{alias.name}", node.lineno) for alias in node.names}
            else:
                found.add((name, node.lineno))
    return found


def target_unit(name: str) -> str:
    first = name.split(".")[1]
    return first if (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file() else "__init__"


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path):
    unit = unit_of(path)
    if unit == "cli":
        allowed, third_party = None, CLI_THIRD_PARTY
    else:
        assert unit in RULES, f"{unit}: a new module needs a line in RULES: decide what it may import"
        allowed, third_party = RULES[unit]
    wrong = []
    for name, line in sorted(imports(path)):
        top = name.partition(".")[0]
        if top == "fmha_gen":
            target = target_unit(name)
            own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
            if allowed is not None and target not in allowed | {unit, own}:
                wrong.append(f"{path}:{line}: {unit} imports {target}")
        elif top not in sys.stdlib_module_names and top not in third_party:
            wrong.append(f"{path}:{line}: {unit} imports {top}")
    assert not wrong, "\n".join(wrong)


def test_the_rules_name_modules_that_exist():
    units = {unit_of(p) for p in modules()}
    assert sorted(set(RULES) - units) == []


def test_the_run_time_imports_nothing_that_compiles_and_does_not_start_cuda():
    """What a serving process pays for: the run time pulls in no DSL, template, YAML, array or CLI package."""
    code = (
        "import sys, fmha_gen.runtime; "
        "print(' '.join(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'cutlass', 'jinja2', 'yaml', 'numpy', 'numba', 'llvmlite', 'click', 'rich', 'torch', 'cuda'})))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert out.stdout.strip() == ""


def test_help_imports_no_command():
    """`fmha-gen --help` stays fast: commands are loaded when they run."""
    code = (
        "import sys\n"
        "from fmha_gen.cli import cli\n"
        "try:\n    cli(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([m for m in sys.modules if m in ('numpy', 'yaml', 'cutlass', 'fmha_gen.cli.build')], file=sys.stderr)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert out.stderr.strip() == "[]" and "build" in out.stdout
