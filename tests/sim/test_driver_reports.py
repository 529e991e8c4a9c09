"""How the simulator's driver words findings, and what it checks against a kernel's plan."""

from __future__ import annotations

import pytest

from fmha_gen.errors import SimError
from fmha_gen.sim.driver import SimDriver, SimKernel, _check_registers, summary
from fmha_gen.sim.findings import Finding, Result
from tests.fake_bundle import make_kernel


def finding(line: int, loc: tuple[str, int] | None, role: str = "softmax0", kind: str = "race") -> Finding:
    return Finding(kind, "m", "error", 0, 3, role, line, loc, "x;")


def test_one_line_per_kind_role_and_source_line() -> None:
    here, there = ("kernel.py", 7), ("kernel.py", 8)
    found = [finding(1, here), finding(2, here, "softmax1"), finding(3, there), finding(4, here, kind="proxy")]
    lines = summary(found)
    assert len(lines) == 3
    assert "[kernel.py:7]" in lines[0] and lines[0].endswith("(and at 1 more instructions of this line)")
    assert "PTX line 3 [kernel.py:8]" in lines[1] and "more" not in lines[1]
    assert lines[2].startswith("error proxy")


def test_without_a_line_map_ptx_lines_tell_findings_apart() -> None:
    assert len(summary([finding(1, None), finding(2, None), finding(2, None)])) == 2


def test_a_kernel_is_not_loaded_without_its_plan() -> None:
    """Without one nothing would tell a wrong setmaxnreg."""
    kernel, driver = make_kernel(), SimDriver()
    with pytest.raises(SimError, match=r"^k\.ptx: came without its plan, .*; pass read_plan\(\)'s$"):
        driver.load(kernel.record, kernel.ptx, driver.device(0), "k.ptx", None, None)


def test_registers_must_be_those_of_the_plan() -> None:
    kernel = SimKernel("k", "", "k_0", 128, {0: "softmax0", 4: "correction"}, {0: 192, 4: 80}, "k.ptx")
    right = Result(registers={0: {192}, 4: {80}})
    _check_registers(right, kernel)
    assert right.ok
    wrong = Result(registers={0: {192, 128}, 4: {80}})
    _check_registers(wrong, kernel)
    (f,) = wrong.errors
    assert (f.kind, f.warp, f.role) == ("setmaxnreg-plan", 0, "softmax0")
    assert "128 registers per thread, the plan gives its role 192" in str(f)
