"""The pinned compiler stack, and what identifies it in a build cache's keys."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform

from ..errors import ToolchainError

DSL_PACKAGE = "nvidia-cutlass-dsl"
DSL_VERSION = "4.8.1"
CUDA_MAJOR = 13
MIN_DRIVER = 580  # branch that the CUDA 13 toolkit asks for
_PARTS = ("nvidia-cutlass-dsl-libs-core", f"nvidia-cutlass-dsl-libs-cu{CUDA_MAJOR}")
INSTALL_HINT = f"pip install '{DSL_PACKAGE}[cu{CUDA_MAJOR}]=={DSL_VERSION}'"


@functools.cache
def identity() -> dict[str, str]:
    """What the bytes of a cubin depend on beside its source. Cheap: imports nothing of the DSL.

    Raises ToolchainError when the DSL or its CUDA 13 libraries are missing or of another version.
    """
    for package in (DSL_PACKAGE, *_PARTS):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ToolchainError(
                f"toolchain: {package} is not installed; kernels compile with {DSL_VERSION}; {INSTALL_HINT}"
            ) from None
        if found != DSL_VERSION:
            raise ToolchainError(f"toolchain: {package} is {found}; kernels compile with {DSL_VERSION}; {INSTALL_HINT}")
    return {"dsl": DSL_VERSION, "cuda_major": str(CUDA_MAJOR), "files": _files_digest()}


def python_version() -> str:
    return platform.python_version()


def _files_digest() -> str:
    """SHA-256 over what the wheels record of their code: each file's path inside the package and its digest.

    Where the packages lie and when they were written stays out, so that another path to them, a link or a
    reinstallation keeps every key.
    """
    lines = []
    for package in _PARTS:
        for file in importlib.metadata.files(package) or []:
            if file.hash is not None and ".dist-info/" not in str(file):
                lines.append(f"{file.as_posix()} {file.hash.mode}={file.hash.value}")
    if not any(".so " in line for line in lines):
        raise ToolchainError(f"toolchain: {_PARTS[1]} has no libraries; its installation is damaged; {INSTALL_HINT}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
