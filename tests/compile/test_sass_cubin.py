"""The analysis on a cubin that the real toolchain made from a kernel whose loops are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fmha_gen.analyze import analyze
from fmha_gen.sass import KernelReport, read_kernels

pytestmark = pytest.mark.compile
pytest.importorskip("cutlass", reason="the CuTe-DSL is not installed")


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sass")
    script = Path(__file__).parent / "sass_kernel.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True, timeout=120)
    return folder / "out.cubin"


@pytest.fixture(scope="module")
def kernel(cubin: Path) -> KernelReport:
    (only,) = read_kernels(cubin.read_bytes(), str(cubin))
    return only


def test_resources(kernel: KernelReport) -> None:
    assert (kernel.name, kernel.arch, kernel.block) == ("sass_fixture_0", "sm_100a", (256, 1, 1))
    assert sorted((c.kind, c.registers) for c in kernel.setmaxnreg) == [("dec", 40), ("inc", 152)]
    assert kernel.tmem_cols == 256
    assert (kernel.spill_stores, kernel.spill_loads, kernel.stack_bytes) == (0, 0, 0)
    assert kernel.code_bytes == kernel.instructions * 16
    assert kernel.notes == ()


def test_the_two_loops_and_their_content(kernel: KernelReport) -> None:
    """Per iteration: 32 exponentials of one load; 32 columns loaded, scaled (16 packed or 32 plain) and stored."""
    assert sorted(p.role for p in kernel.loops) == ["correction", "softmax"]
    (softmax,) = kernel.innermost("softmax", False)
    assert softmax.mufu == {"EX2": 32} and softmax.counts["LDTM"] == 1 and "STTM" not in softmax.counts
    assert 32 + 32 < softmax.slots < 32 + 96 + 20
    assert [s.question.startswith("SYNCS.PHASECHK") for s in softmax.spins] == [True]
    (correction,) = kernel.innermost("correction")
    scaled = 2 * correction.counts.get("FMUL2", 0) + correction.counts.get("FMUL", 0)
    assert (correction.counts["LDTM"], scaled, correction.counts["STTM"]) == (1, 32, 1)
    assert correction.slots < 32 + 20 and correction.spins == ()


def test_every_instruction_of_a_loop_has_a_unit(kernel: KernelReport) -> None:
    for p in kernel.loops:
        assert sum(p.units.values()) == sum(p.counts.values()) == p.slots
        assert "other" not in p.units
        assert p.path_min_slots is not None and p.path_max_slots is not None
        assert p.path_min_slots <= p.path_max_slots <= p.slots


def test_the_command_prints_the_same(cubin: Path) -> None:
    report = analyze(cubin, 32, 32)
    command = [sys.executable, "-m", "fmha_gen", "analyze", str(cubin), "--head-dim-qk", "32", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(report.to_dict()))
