"""`analyze`: the bound from counts, the JSON keys, and the tables, on kernels built by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fmha_gen import analyze as module
from fmha_gen.analyze import Analysis, Report, kernel_bound, tables
from fmha_gen.errors import BundleError
from fmha_gen.sass import KernelReport, LoopReport, RegisterChange

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def loop(role: str, slots: int, counts: dict[str, int], masked: bool | None = None) -> LoopReport:
    return LoopReport(
        role=role,
        masked=masked,
        evidence="by hand",
        address=0x100,
        innermost=True,
        depth=0,
        parent=None,
        slots=slots,
        path_min_slots=slots,
        path_max_slots=slots,
        counts=counts,
        units={},
        mufu={},
        moves=0,
        spins=(),
        calls=(),
        call_slots=0,
    )


def kernel(*loops: LoopReport, arch: str = "sm_100a") -> KernelReport:
    return KernelReport(
        name="k",
        arch=arch,
        registers=128,
        stack_bytes=0,
        spill_stores=1,
        spill_loads=2,
        uniform_spills=0,
        static_smem_bytes=16,
        tmem_cols=512,
        block=(512, 1, 1),
        code_bytes=4096,
        instructions=256,
        setmaxnreg=(RegisterChange(0, "inc", 192), RegisterChange(16, "dec", 64), RegisterChange(32, "dec", 64)),
        loops=loops,
        spins=(),
        notes=(),
    )


# FlashAttention-4 4.0.0b36's d64 full and d128 causal, as recorded.
D64 = (
    loop("softmax", 515, {"MUFU": 113, "F2FP": 64}, False),
    loop("correction", 107, {"FMUL2": 64}),
    loop("mma", 173, {"UTCHMMA": 24}),
)
D128 = (
    loop("softmax", 689, {"MUFU": 113, "F2FP": 64}, True),
    loop("softmax", 514, {"MUFU": 113, "F2FP": 64}, False),
    loop("correction", 186, {"FMUL2": 128}),
    loop("mma", 205, {"UTCHMMA": 32}),
)


def test_the_bound_of_recorded_counts() -> None:
    """d64: MUFU 2*113*8 = 1808 over MMA 2*2*128*128*128/8192 = 1024 and issue 2*515+107+173 = 1310."""
    b = kernel_bound(kernel(*D64), 64, 64, 128)
    assert not isinstance(b, str)
    assert (b.terms.mma_clk, b.terms.mufu_clk, b.terms.issue_clk) == (1024, 1808, 1310)
    assert (b.terms.bound_clk, b.terms.limiter, b.note) == (1808, "MUFU", "")
    b = kernel_bound(kernel(*D128), 128, 128, 128)
    assert not isinstance(b, str)
    assert (b.terms.bound_clk, b.terms.limiter) == (2048, "MMA")
    assert b.terms.issue_clk == 2 * 514 + 186 + 205


def test_loops_of_another_size_are_scaled_to_one_block_of_two_tiles() -> None:
    """A softmax loop that does two blocks counts half, an MMA and a correction loop of one tile count twice."""
    loops = (
        loop("softmax", 1000, {"MUFU": 226, "F2FP": 128}, False),
        loop("correction", 60, {"FMUL2": 64}),
        loop("mma", 110, {"UTCHMMA": 16}),
    )
    b = kernel_bound(kernel(*loops), 128, 128, 128)
    assert not isinstance(b, str)
    assert (b.terms.mufu_per_row, b.terms.softmax_slots) == (113, 500)
    assert (b.terms.correction_slots, b.terms.mma_slots) == (120, 220)
    assert "mma loop scaled by 32/16" in b.note


@pytest.mark.parametrize(
    ("k", "why"),
    [
        (kernel(*D128, arch="sm_90a"), "sm_90a"),
        (kernel(D128[0]), "no softmax loop without a mask"),
    ],
)
def test_no_bound_says_why(k: KernelReport, why: str) -> None:
    result = kernel_bound(k, 128, 128, 128)
    assert isinstance(result, str) and why in result


def test_a_missing_loop_is_said_in_the_note() -> None:
    b = kernel_bound(kernel(D128[1]), 128, 128, 128)
    assert not isinstance(b, str)
    assert b.terms.issue_clk == 2 * 514 and "no mma loop" in b.note and "no correction loop" in b.note


def test_json_keys_are_the_published_ones() -> None:
    k = kernel(*D128)
    b = kernel_bound(k, 128, 128, 128)
    assert not isinstance(b, str)
    data = Report("x.cubin", (Analysis(None, "x.cubin", k, None, b, None),)).to_dict()
    (found,) = json.loads(json.dumps(data))["kernels"]
    page = (Path(__file__).parents[2] / "docs" / "analyze.md").read_text()
    for key in (*found, *found["bound"], *found["loops"][0]):
        assert f"`{key}`" in page, f"docs/analyze.md lacks the key {key}"
    assert found["bound"]["kind"] == "model" and found["bound"]["bound_clk"] == 2048
    assert found["loops"][1]["counts"] == {"MUFU": 113, "F2FP": 64}


def test_tables_show_what_was_counted() -> None:
    k = kernel(*D128)
    kernels, loops = tables(Report("x", (Analysis("id-1", "x", k, 1024, None, "head dims unknown"),)))
    assert kernels.rows == (("id-1", "sm_100a", "128", "+192/-64", "3", "0", "1040", "512", "4096", "-"),)
    assert [r[0] for r in loops.rows] == ["softmax masked", "softmax", "correction", "mma"]
    assert loops.rows[1][2] == "514" and loops.rows[1][5] == "MUFU 113 F2FP 64"
    assert loops.notes == (
        "spills: 1 STL, 2 LDL, outside of innermost loops", "no bound: head dims unknown"
    )  # fmt: skip


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nothing.cubin: cannot be read"):
        module.analyze(tmp_path / "nothing.cubin")
    (tmp_path / "cut.cubin").write_bytes(b"\x7fELF")
    with pytest.raises(BundleError, match="cut.cubin: not a whole cubin"):
        module.analyze(tmp_path / "cut.cubin")


def test_the_benchmark_marks_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's own figures against our targets: they miss what the targets ask for more."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import machine_code

    recorded = json.loads(machine_code.PEER_FILE.read_text())["kernels"]
    assert len(recorded) == 14
    d64 = machine_code.peer(recorded["d64_full"], "sm_100a")
    assert (d64.softmax, d64.bound_clk, d64.limiter) == (515, 1808, "MUFU")
    marks = {c.what: c.met for c in machine_code.checks((64, 64, "full"), d64, "sm_100a")}
    assert marks == {"spill instructions": True, "bound clk": False, "MUFU per row": True}
    wide = machine_code.peer(recorded["d192_128_full"], "sm_100a")
    marks = {c.what: c.met for c in machine_code.checks((192, 128, "full"), wide, "sm_100a")}
    assert marks == {"spill instructions": False, "softmax slots": False, "bound clk": True, "MUFU per row": True}
    sys.modules.pop("machine_code")
