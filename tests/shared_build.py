"""Bundles that all test processes share: one of them builds, under a lock, and the others find everything cached."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from pathlib import Path

import pytest


def shared_build(
    factory: pytest.TempPathFactory, spec: Path, folder: str, arch: str | None = None, source: bool = False
) -> Path:
    """The bundle of a spec file, in a folder of this test session. One build at a time: two that hold the same kernels
    must not compile them twice. Skips where the CuTe-DSL is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("the CuTe-DSL is not installed")
    from fmha_gen.build import BuildOptions, build_bundle
    from fmha_gen.spec import read_specs

    base = factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    file = read_specs([spec], arch=arch)
    with open(session / "shared_build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_bundle(file.bundle, file.specs, session / folder, BuildOptions(source=source)).root
