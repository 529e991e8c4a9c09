"""What this installation can do: one `Check` per part, each in words. Asking changes nothing and never fails.

Three abilities are judged: ``build`` (compile bundles), ``simulate`` (run them without a GPU) and ``launch`` (run them
on a GPU). A part that is missing says which of them it takes away, and what to do.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from . import __version__
from .errors import FmhaGenError

ABILITIES = ("build", "simulate", "launch")
MIN_PYTHON = (3, 11)
_WORDS = {
    "build": "compile bundles",
    "simulate": "run bundles in the simulator",
    "launch": "launch bundles on a GPU",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One part. needed_for: abilities that need it. ok: usable as it is. what: the finding, with the fix if not ok."""

    part: str
    ok: bool
    what: str
    needed_for: tuple[str, ...]


def examine() -> list[Check]:
    """Every check, in the order in which a person would fix them."""
    checks = [_python(), *(_package(name, ("build", "simulate")) for name in ("click", "rich"))]
    checks += [_package("PyYAML", ("build",)), _package("jinja2", ("build",)), _templates(), _toolchain()]
    checks += [_nvdisasm(), _package("numpy", ("simulate",)), _package("numba", ("simulate",)), _cores()]
    checks += [_package("cuda-bindings", ("launch",)), *_driver()]
    return checks


def abilities(checks: list[Check]) -> dict[str, bool]:
    """Which abilities this installation has."""
    return {name: all(c.ok for c in checks if name in c.needed_for) for name in ABILITIES}


def report(checks: list[Check]) -> dict[str, object]:
    """The keys of ``fmha-gen doctor --json``."""
    return {"version": __version__, "can": abilities(checks), "checks": [dataclasses.asdict(c) for c in checks]}


def conclusions(checks: list[Check]) -> list[str]:
    """One line for each ability."""
    return [f"can {_WORDS[name]}: {'yes' if ok else 'no'}" for name, ok in abilities(checks).items()]


def exit_code(checks: list[Check]) -> int:
    """0 if this installation can compile bundles and simulate them, else 1."""
    can = abilities(checks)
    return 0 if can["build"] and can["simulate"] else 1


def _python() -> Check:
    version = platform.python_version()
    ok = sys.version_info[:2] >= MIN_PYTHON
    fix = "" if ok else f"; fmha-gen {__version__} needs {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer"
    return Check("Python", ok, f"{version} ({platform.machine()}, {platform.system()}){fix}", ABILITIES)


def _package(name: str, needed_for: tuple[str, ...]) -> Check:
    extra = "fmha-gen" if name == "cuda-bindings" else "fmha-gen[build]"
    try:
        return Check(name, True, importlib.metadata.version(name), needed_for)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, f"not installed; pip install '{extra}'", needed_for)


def _asked(part: str, needed_for: tuple[str, ...], ask: Callable[[], str]) -> Check:
    """The outcome of a question that answers with words or an error of ours."""
    try:
        return Check(part, True, ask(), needed_for)
    except FmhaGenError as e:
        return Check(part, False, str(e), needed_for)


def _templates() -> Check:
    from .resources import checkout_root, data_dir

    def ask() -> str:
        where = "of this checkout" if checkout_root() else "of the installed package"
        return f"{data_dir('templates')} ({where})"

    return _asked("templates", ("build",), ask)


def _toolchain() -> Check:
    from .compiler import toolchain

    def ask() -> str:
        found = toolchain.identity()
        return f"nvidia-cutlass-dsl {found['dsl']}, CUDA {found['cuda_major']} libraries, the pinned version"

    return _asked("compiler", ("build",), ask)


def _nvdisasm() -> Check:
    from .sass import find_nvdisasm

    return _asked("nvdisasm", ("build",), find_nvdisasm)


def _cores() -> Check:
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free_gib = shutil.disk_usage(".").free / 2**30
    ok = free_gib >= 1
    fix = "" if ok else "; a build needs about 1 GiB: free some space"
    return Check("machine", ok, f"{cores} cores, {free_gib:.0f} GiB free in the current folder{fix}", ("build",))


def _driver() -> list[Check]:
    """The NVIDIA driver and each GPU; no GPU is no fault of a build machine, but takes ``launch`` away."""
    if importlib.util.find_spec("cuda") is None:
        return [Check("driver", False, "cannot be asked without cuda-bindings", ("launch",))]
    from .runtime.cuda import CudaDriver
    from .runtime.cuda_errors import branch_of, version_text

    driver = CudaDriver()
    try:
        version = int(driver.check(driver.api.cuDriverGetVersion(), "driver"))
        count = int(driver.check(driver.api.cuDeviceGetCount(), "driver"))
    except FmhaGenError as e:
        return [Check("driver", False, str(e), ("launch",))]
    branch = branch_of(version)
    what = f"supports CUDA {version_text(version)}" + (f" (branch {branch})" if branch else "")
    checks = [Check("driver", True, what, ("launch",))]
    if not count:
        checks.append(Check("GPU", False, "the driver sees none", ("launch",)))
    return checks + [_gpu(driver, i) for i in range(count)]


def _gpu(driver: object, ordinal: int) -> Check:
    from .arch import arch_of_device
    from .built import built_archs
    from .runtime.cuda import CudaDriver

    assert isinstance(driver, CudaDriver)

    def ask() -> str:
        device = driver.device(ordinal)
        arch = arch_of_device(device.compute_capability)
        major, minor = device.compute_capability
        text = f"{device.name}, compute capability {major}.{minor}, {device.num_sms} multiprocessors"
        if arch is None or arch.name not in built_archs():
            return f"{text}; no kernels are built for it ({', '.join(built_archs())} are)"
        return f"{text}; runs {arch.name} kernels"

    return _asked(f"GPU {ordinal}", (), ask)
