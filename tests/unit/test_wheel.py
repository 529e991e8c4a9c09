"""The wheel: it carries templates and specs, finds them without a checkout, and its run time needs nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fmha_gen.resources import checkout_root

ROOT = checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="needs a checkout, not an installed wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    assert ROOT is not None
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("fmha_gen-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel unpacked into a folder of its own, as pip does it."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run_in(site: Path, code: str, *, packages: bool = True) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that sees `site` first and, if asked, this environment's packages, but not the checkout."""
    start = f"import sys; sys.path.insert(0, {str(site)!r}); "
    flags = ["-P", "-s"] if packages else ["-P", "-S", "-s"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *flags, "-c", start + code], capture_output=True, text=True, env=env, cwd=site
    )


def test_the_wheel_holds_every_template_and_spec(wheel):
    assert ROOT is not None
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("templates", "specs"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        assert files
        missing = [p for p in files if f"fmha_gen/_data/{p.relative_to(ROOT).as_posix()}" not in names]
        assert not missing
    assert not [n for n in names if n.startswith(("tests/", "docs/"))]


def test_an_installed_wheel_plans_and_renders(installed):
    code = (
        "import fmha_gen; from fmha_gen.resources import checkout_root, data_dir; "
        "from fmha_gen.spec import read_specs; from fmha_gen.plan import make_plan; "
        "from fmha_gen.render import render; "
        "assert checkout_root() is None; spec = read_specs([data_dir('specs') / 'core.yaml']).specs[0]; "
        "print(fmha_gen.__file__); print(len(render(make_plan(spec)).text) > 1000)"
    )
    done = run_in(installed, code)
    assert done.returncode == 0, done.stderr
    where, rendered = done.stdout.split()
    assert Path(where).is_relative_to(installed) and rendered == "True"


def test_the_base_install_imports_the_run_time_with_no_package_at_all(installed):
    done = run_in(installed, "import fmha_gen.runtime; print(fmha_gen.runtime.Bundle.__name__)", packages=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Bundle"


def test_the_console_script_of_a_base_install_says_what_to_install(installed):
    done = run_in(installed, "from fmha_gen.__main__ import main; main()", packages=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "click is not installed" in done.stderr and "pip install 'fmha-gen[build]'" in done.stderr
