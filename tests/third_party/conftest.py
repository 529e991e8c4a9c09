"""PTX of flash-attn-4, compiled once per session by the interpreter that FMHA_GEN_FA4_PYTHON names."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

PYTHON_VARIABLE = "FMHA_GEN_FA4_PYTHON"
SCRIPT = Path(__file__).with_name("fa4_compile.py")


def _interpreter() -> tuple[str, str]:
    """(interpreter with flash-attn-4, "") or ("", why there is none)."""
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not python:
        return "", f"{PYTHON_VARIABLE} is not set to an interpreter with flash-attn-4 4.0.0b36"
    probe = [python, "-c", "from importlib.metadata import version; print(version('flash-attn-4'))"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{PYTHON_VARIABLE}={python}: {error}"
    if done.returncode:
        return "", f"{PYTHON_VARIABLE}={python} has no flash-attn-4"
    if done.stdout.strip() != "4.0.0b36":
        return "", f"{PYTHON_VARIABLE}={python} has flash-attn-4 {done.stdout.strip()}; these tests describe 4.0.0b36"
    return python, ""


@pytest.fixture(scope="session")
def fa4_ptx(tmp_path_factory):
    """A function Build -> PTX text. Skips, with the reason, where flash-attn-4 is not available."""
    python, reason = _interpreter()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("fa4")
    texts: dict[object, str] = {}

    def compiled(build) -> str:
        if build not in texts:
            path = folder / f"{len(texts)}.ptx"
            command = [python, str(SCRIPT), str(path), json.dumps(asdict(build))]
            # One compile at a time and nothing of ours on its path.
            environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
            assert done.returncode == 0 and path.exists(), f"compiling {build} failed:\n{done.stdout}{done.stderr}"
            texts[build] = path.read_text()
        return texts[build]

    return compiled
