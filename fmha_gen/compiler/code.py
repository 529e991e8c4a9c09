"""Digests of the code that takes part in a compilation beside the rendered source."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = ("device", "compiler")  # helpers that kernels import; how they are compiled and gated


def code_digest() -> str:
    """SHA-256 of the device helpers and of this package as they are on disk now: names and contents, no times."""
    return hashlib.sha256(json.dumps([_listing(_PACKAGE / f) for f in FOLDERS]).encode()).hexdigest()


def _listing(folder: Path) -> list[list[str]]:
    files = sorted(folder.rglob("*.py"))
    return [[p.relative_to(folder).as_posix(), hashlib.sha256(p.read_bytes()).hexdigest()] for p in files]
