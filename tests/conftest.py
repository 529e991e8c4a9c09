"""Options and markers shared by all tests."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full product of cases, not the pairwise set")
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="part of the full product: run with --full")
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(skip)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True when golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def core_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of specs/core.yaml that the simulator runs, compiled once for all test processes.

    They are kept in the user's build cache. Tests must not write to the bundle.
    """
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("the CuTe-DSL is not installed")
    from fmha_gen.build import BuildOptions, build_bundle
    from fmha_gen.resources import data_dir
    from fmha_gen.spec import read_specs

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    file = read_specs([data_dir("specs") / "core.yaml"], arch="sm_100a")
    with open(shared / "core_bundle.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_bundle(file.bundle, file.specs, shared / "core bundle", BuildOptions(source=True)).root
