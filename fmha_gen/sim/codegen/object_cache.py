"""Machine code of compiled modules, kept between processes in the user's cache folder.

A file is named by the digest of the LLVM IR, the CPU and the LLVM version, and starts with the digest of its contents;
what does not match is compiled again. It lies beside the build cache: FMHA_GEN_CACHE_DIR names another place.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_MAX_BYTES = 512 << 20
_DIGEST_BYTES = 32


def folder() -> Path | None:
    """The cache folder, or None when there is no home for it."""
    chosen = os.environ.get("FMHA_GEN_CACHE_DIR")
    if chosen:
        return Path(chosen) / "sim"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "fmha-gen" / "sim" if not base.startswith("~") else None


class ObjectCache:
    """The two callbacks that LLVM asks for, keyed by module name."""

    def __init__(self) -> None:
        self.where = folder()

    def load(self, module: object) -> bytes | None:
        if self.where is None:
            return None
        try:
            path = self.where / _name(module)
            data = path.read_bytes()
            os.utime(path)  # the least recently used go first
        except OSError:
            return None
        body = data[_DIGEST_BYTES:]
        return body if hashlib.sha256(body).digest() == data[:_DIGEST_BYTES] else None

    def store(self, module: object, body: bytes) -> None:
        if self.where is None:
            return
        try:
            self.where.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.where, delete=False) as f:
                f.write(hashlib.sha256(body).digest() + body)
            os.replace(f.name, self.where / _name(module))
            if _name(module)[0] == "0":  # now and then: one file in sixteen
                self._prune()
        except OSError:
            return  # a cache that cannot be written is no cache

    def _prune(self) -> None:
        assert self.where is not None
        files = sorted(((p.stat(), p) for p in self.where.glob("*.o")), key=lambda item: item[0].st_mtime)
        excess = sum(stat.st_size for stat, _ in files) - _MAX_BYTES
        for stat, path in files:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= stat.st_size


def _name(module: object) -> str:
    return f"{module.name}.o"  # type: ignore[attr-defined]
