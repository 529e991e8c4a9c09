"""A kernel with a fence taken out, in a bundle that is right in every other way: `fmha-gen verify` tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .mutators import drop
from .sites import find_sites
from .test_mutants import kernel

pytestmark = [pytest.mark.sim, pytest.mark.compile]


def test_verify_names_role_and_source_line_of_a_missing_fence(mutants_bundle: Path, tmp_path: Path) -> None:
    k = kernel(mutants_bundle, "d128-full-q1")
    fences = [s for s in find_sites(k.ptx) if s.kind == "fence_before"]
    (mutant,) = drop(fences[1])  # of softmax, behind the first part of P; fences[0] is the whole CTA's
    bundle = k.write_bundle(mutant, tmp_path / "bundle")
    command = [sys.executable, "-m", "fmha_gen", "verify", str(bundle), "--quick", "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    assert "FAILED" in done.stdout
    line = next(text for text in done.stdout.splitlines() if "error tcgen05-fence" in text)
    assert "(mma), PTX line " in line and " [kernel.py:" in line and "tcgen05.mma" in line
    assert "the write by CTA 0 warp" in line and "(softmax0) tcgen05.st at PTX line" in line and "(kernel.py:" in line
    assert "tcgen05.fence::before_thread_sync and ::after_thread_sync do not both lie between" in line
    proof = json.loads((bundle / "proof.json").read_text())
    assert proof["kernels"][k.entry.id]["passed"] is False
