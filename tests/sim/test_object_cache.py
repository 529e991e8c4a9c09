"""Compiled segments between processes: found again, and compiled again when the file is damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np
from fmha_gen.sim.codegen import object_cache
from tests.sim.ptx_kit import evaluate
load = object_cache.ObjectCache.load
found = []
object_cache.ObjectCache.load = lambda self, m: found.append(load(self, m)) or found[-1]
print(evaluate("add.s32 {o}, {a}, 5;", [np.arange(32, dtype=np.uint32)])[31], any(found))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FMHA_GEN_CACHE_DIR", str(tmp_path / "cache"))
    return lambda: subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    ).stdout.split()


def test_second_process_finds_the_code_and_damage_is_noticed(run, tmp_path: Path) -> None:
    assert run() == ["36", "False"]
    assert run() == ["36", "True"]
    files = list((tmp_path / "cache" / "sim").glob("*.o"))
    assert files
    for path in files:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    assert run() == ["36", "False"]
    assert run() == ["36", "True"]


def test_a_cache_that_cannot_be_written_is_no_error(run, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert run() == ["36", "False"]
