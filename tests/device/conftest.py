"""Fixtures of the tests that need a GPU.

FMHA_GEN_DEVICE_BUNDLE names a finished bundle to test, so that a machine with a GPU needs neither the compiler nor
time to build. Without it the kernels of specs/core.yaml for the GPU's architecture are built, where the compiler is
installed.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from fmha_gen.errors import FmhaGenError
from fmha_gen.runtime import Bundle, Device
from fmha_gen.runtime.cuda import CudaDriver
from fmha_gen.runtime.driver import ARCH_CAPABILITY

BUNDLE_VARIABLE = "FMHA_GEN_DEVICE_BUNDLE"


@pytest.fixture(scope="session")
def gpu() -> Device:
    """CUDA device 0."""
    try:
        return CudaDriver().device(0)
    except FmhaGenError as e:
        pytest.skip(f"needs a GPU: {e}")


@pytest.fixture(scope="session")
def bundle_path(gpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of attention kernels that has some for device 0. Tests must not write to it."""
    if given := os.environ.get(BUNDLE_VARIABLE):
        return Path(given)
    arch = next((a for a, cc in ARCH_CAPABILITY.items() if cc == gpu.compute_capability), None)
    if arch is None or importlib.util.find_spec("cutlass") is None:
        pytest.skip(f"{BUNDLE_VARIABLE} names no bundle, and none can be built here for {gpu.describe()}")
    from fmha_gen.build import BuildOptions, build_bundle
    from fmha_gen.resources import data_dir
    from fmha_gen.spec import read_specs

    file = read_specs([data_dir("specs") / "core.yaml"], arch=arch)
    return build_bundle(file.bundle, file.specs, tmp_path_factory.mktemp("device"), BuildOptions()).root


@pytest.fixture(scope="session")
def bundle(bundle_path: Path) -> Bundle:
    """The bundle, opened once: tests of lazy loading open their own."""
    return Bundle.open(bundle_path)
