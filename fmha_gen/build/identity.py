"""What identifies a build: digests of the code that shapes a kernel, and the generator's own version."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

from .. import __version__
from ..compiler import CompileJob, identity
from ..manifest import Generator
from ..resources import checkout_root


def build_digest(job: CompileJob) -> str:
    """SHA-256 over all that a kernel's bytes depend on.

    id and source (so spec and templates), what the gates expect, the code of device helpers and compiler driver, and
    the toolchain. As JSON, in which no two different sets of strings read alike.
    """
    want = job.expected
    parts = {
        "id": job.id,
        "source": hashlib.sha256(job.source.encode()).hexdigest(),
        "expected": [want.arch, want.symbol, [list(p) for p in want.params], want.threads, want.registers],
        "tmem_cols": job.tmem_cols,
        "code": job.code,
        "toolchain": identity(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def generator() -> Generator:
    """This fmha_gen: version, and in a checkout the commit and whether anything that shapes a kernel differs from it.

    A checkout that git cannot describe counts as dirty: nobody can say what made the bundle.
    """
    root = checkout_root()
    if root is None or not (root / ".git").exists():
        return Generator(__version__, None, False)
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "fmha_gen", "templates", "pyproject.toml")
    except (OSError, subprocess.CalledProcessError):
        return Generator(__version__, None, True)
    return Generator(__version__, commit, bool(changed))


def _git(root: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"GIT_OPTIONAL_LOCKS": "0"}
    run = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True, env=env)
    return run.stdout.strip()
