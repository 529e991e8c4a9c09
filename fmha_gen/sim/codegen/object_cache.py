"""Machine code of compiled modules, kept between processes in the user's cache folder.

A file is named by the digest of the LLVM IR, the CPU and the LLVM version, and starts with the digest of its contents;
what does not match is compiled again. FMHA_GEN_SIM_CACHE names another folder, or turns the cache off when empty.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_MAX_FILES = 400
_DIGEST_BYTES = 32


def folder() -> Path | None:
    """The cache folder, or None when it is off or there is no home."""
    chosen = os.environ.get("FMHA_GEN_SIM_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "fmha_gen" / "sim" if not base.startswith("~") else None


class ObjectCache:
    """The two callbacks that LLVM asks for, keyed by module name."""

    def __init__(self) -> None:
        self.where = folder()

    def load(self, module: object) -> bytes | None:
        if self.where is None:
            return None
        try:
            data = (self.where / _name(module)).read_bytes()
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
            self._prune()
        except OSError:
            return  # a cache that cannot be written is no cache

    def _prune(self) -> None:
        assert self.where is not None
        files = sorted(self.where.glob("*.o"), key=lambda p: p.stat().st_mtime)
        for old in files[: max(0, len(files) - _MAX_FILES)]:
            old.unlink(missing_ok=True)


def _name(module: object) -> str:
    return f"{module.name}.o"  # type: ignore[attr-defined]
