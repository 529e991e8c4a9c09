"""The instruction counts that the plan's model predicts with, against the machine code that templates give today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fmha_gen.analyze import Analysis, analyze
from fmha_gen.bundle import check_bundle
from fmha_gen.manifest import KernelRecord

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def kernels(core_bundle: Path) -> list[tuple[KernelRecord, Any, Analysis]]:
    """(record, plan, analysis) of each."""
    checked = check_bundle(core_bundle)
    known = {r.id: (r, plan) for r, plan in zip(checked.records, checked.plans, strict=True)}
    return [(*known[a.id], a) for a in analyze(core_bundle).kernels if a.id is not None]


def test_recorded_slots_are_those_of_the_machine_code(kernels: list[tuple[KernelRecord, Any, Analysis]]) -> None:
    """Within 6%: update `plan.model` when a template gets leaner, or `exp2_emulation: auto` chooses by old figures."""
    compared = 0
    for record, plan, analysis in kernels:
        if record.spec["q_stage"] != 2:
            continue
        assert analysis.bound is not None, analysis.no_bound
        real, model = analysis.bound.terms, plan["model"]
        assert real.mufu_per_row == model["mufu_per_row"], record.id
        assert real.mma_clk == model["mma_clk"], record.id
        for name in ("softmax_slots", "correction_slots", "mma_slots"):
            got = getattr(real, name)
            assert got == pytest.approx(model[name], rel=0.06), f"{record.id}: {name}: model {model[name]}, code {got}"
        compared += 1
    assert compared == 16


def test_softmax_registers_hold_a_row_without_spills(kernels: list[tuple[KernelRecord, Any, Analysis]]) -> None:
    for record, plan, analysis in kernels:
        held = {r["name"]: r["num_regs"] for r in plan["roles"]}
        moves = {(c.kind, c.registers) for c in analysis.kernel.setmaxnreg}
        want = {(r["setmaxnreg"], r["num_regs"]) for r in plan["roles"] if r["setmaxnreg"] != "keep"}
        assert moves == want, record.id
        assert held["softmax0"] >= 128 and record.resources.spill_ops == 0
