"""Options and markers shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fmha_gen.resources import data_dir
from tests.shared_build import shared_build


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
    return shared_build(tmp_path_factory, data_dir("specs") / "core.yaml", "core bundle", "sm_100a", source=True)
