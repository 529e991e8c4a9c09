"""The build cache: compiled kernels by build digest, outside any bundle.

One file per kernel: a SHA-256 of the rest, a line of JSON (names, sizes, resources), then the outputs' bytes. It is
verified before use; a damaged one, one of another owner or one that others can write counts as missing and is built
again. Files appear by rename, so that any number of builders may share the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from pathlib import Path

from ..bundle import write_file
from ..compiler import CompiledKernel
from ..errors import BundleError, ToolchainError
from ..manifest import Resources, from_dict

_OUTPUTS = ("cubin", "ptx", "line_map")


def default_cache_dir() -> Path:
    """``$FMHA_GEN_CACHE_DIR``, else ``fmha-gen`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises ToolchainError when there is no home folder either.
    """
    if explicit := os.environ.get("FMHA_GEN_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "fmha-gen"
    try:
        return Path("~/.cache/fmha-gen").expanduser()
    except RuntimeError:
        raise ToolchainError("build cache: no home folder is known for this user; set FMHA_GEN_CACHE_DIR") from None


class BuildCache:
    """A folder of compiled kernels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ToolchainError(
                f"{folder}: the build cache cannot be made ({e.strerror}); set FMHA_GEN_CACHE_DIR to a folder of yours"
            ) from None

    @property
    def log_dir(self) -> Path:
        """Where logs and sources of failed kernels are kept."""
        return self.folder / "failed"

    def path(self, key: str) -> Path:
        return self.folder / "kernels" / key[:2] / key

    def load(self, key: str) -> CompiledKernel | None:
        """The kernel with this build digest, or None if there is none that can be trusted."""
        try:
            data = _read_own(self.path(key))
        except OSError:
            return None
        digest, _, rest = data.partition(b"\n")
        if hashlib.sha256(rest).hexdigest().encode() != digest:
            return None
        head, _, payload = rest.partition(b"\n")
        return _decode(json.loads(head), payload, key)

    def store(self, key: str, kernel: CompiledKernel) -> None:
        """Keep a kernel. Raises ToolchainError when the disk does not take it."""
        outputs = [getattr(kernel, name) for name in _OUTPUTS]
        head = {
            "key": key,
            "sizes": [len(o) for o in outputs],
            "resources": dataclasses.asdict(kernel.resources),
            "cuda": kernel.cuda,
            "ptxas": kernel.ptxas,
            "seconds": round(kernel.seconds, 3),
        }
        rest = json.dumps(head, sort_keys=True).encode() + b"\n" + b"".join(outputs)
        try:
            write_file(self.path(key), hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        except OSError as e:
            raise ToolchainError(
                f"{self.folder}: the build cache cannot be written ({e.strerror}); free some space, or set "
                f"FMHA_GEN_CACHE_DIR to another folder"
            ) from None


def _read_own(path: Path) -> bytes:
    """The file's bytes if it is a regular file of this user that nobody else can write; OSError otherwise."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        os.close(fd)
        raise PermissionError(f"{path}: not a private file of this user")
    with os.fdopen(fd, "rb") as f:
        return f.read()


def _decode(head: dict[str, object], payload: bytes, key: str) -> CompiledKernel | None:
    sizes = head.get("sizes")
    if head.get("key") != key or not isinstance(sizes, list) or sum(sizes) != len(payload):
        return None
    outputs, at = {}, 0
    for name, size in zip(_OUTPUTS, sizes, strict=True):
        outputs[name] = payload[at : at + size]
        at += size
    try:
        resources = from_dict(Resources, head.get("resources"), "cache")
    except BundleError:  # of another version of fmha_gen
        return None
    seconds = head.get("seconds")
    return CompiledKernel(
        **outputs,
        resources=resources,
        cuda=str(head.get("cuda")),
        ptxas=str(head.get("ptxas")),
        seconds=float(seconds) if isinstance(seconds, (int, float)) else 0.0,
    )
