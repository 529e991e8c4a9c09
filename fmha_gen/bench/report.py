"""What a benchmark found, as plain data: the JSON file, the rows of the table, what the plot draws. Pure."""

from __future__ import annotations

from typing import Any

from .cases import Case
from .timing import Timing

OURS = "fmha_gen"
FORMAT_VERSION = 1


def result(case: Case, timings: dict[str, Timing], refused: dict[str, str], difference: float | None) -> dict[str, Any]:
    """One case. refused: peer -> why it did not run. difference: relative RMS against the first peer that ran."""
    p = case.problem
    peers = [n for n in timings if n != OURS]
    best = min(peers, key=lambda n: timings[n].us, default=None)
    return {
        "shape": case.shape, "dtype": p.dtype, "head_dim_qk": p.head_dim_qk, "head_dim_v": p.head_dim_v,
        "mask": p.mask, "batch": p.batch, "heads": p.num_heads_q, "heads_kv": p.num_heads_kv, "seqlen": p.seqlen_q,
        "flop": case.flop, "kernel": case.kernel,
        "us": {n: round(t.us, 2) for n, t in timings.items()},
        "tflops": {n: round(case.flop / t.us / 1e6, 1) for n, t in timings.items()},
        "spread": {n: round(t.spread, 4) for n, t in timings.items()},
        "calls": {n: t.calls for n, t in timings.items()},
        "refused": refused, "best_peer": best,
        "ratio": None if best is None else round(timings[best].us / timings[OURS].us, 4),
        "difference": difference,
    }  # fmt: skip


def columns(report: dict[str, Any]) -> list[str]:
    """The table's column titles."""
    from .peers import TITLES

    peers = report["peers"]
    return ["shape", "mask", "seqlen", "batch x heads", "us", "TFLOP/s", *(TITLES[p] for p in peers)] + (
        ["of the best peer"] if peers else []
    )


def row(report: dict[str, Any], case: dict[str, Any]) -> list[str]:
    """One row of the table: throughput in TFLOP/s, and ours over that of the best peer."""
    heads = f"{case['heads']}" if case["heads"] == case["heads_kv"] else f"{case['heads']}/{case['heads_kv']}"
    cells = [case["shape"], case["mask"], str(case["seqlen"]), f"{case['batch']} x {heads}"]
    cells += [f"{case['us'][OURS]:.1f}", f"{case['tflops'][OURS]:.0f}"]
    cells += [f"{case['tflops'][p]:.0f}" if p in case["tflops"] else "refused" for p in report["peers"]]
    if report["peers"]:
        cells.append("" if case["ratio"] is None else f"{case['ratio']:.3f}")
    return cells


def markdown(report: dict[str, Any]) -> str:
    """The report as a page of documentation has it: what it was measured on, and one table."""
    device, versions = report["device"], report["versions"]
    built = f"{report['bundle']['name']} {report['bundle']['version']}"
    about = [
        f"{device['name']}, driver {device['driver'] or 'unknown'} (CUDA {device['cuda']}), {report['date'][:10]}; "
        f"bundle {built}; " + ", ".join(f"{n} {v}" for n, v in versions.items()),
        f"{report['dtype']}, medians of {report['method']['rounds']} interleaved samples, inputs rotated past the L2; "
        f"causal counted at half the work; limits: " + ", ".join(f"{n} {v:.0f} TFLOP/s" for n, v in limits(report)),
    ]
    titles = columns(report)
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += ["| " + " | ".join(row(report, case)) + " |" for case in report["results"]]
    return "\n".join([*about, "", *lines]) + "\n"


def limits(report: dict[str, Any]) -> list[tuple[str, float]]:
    """(what, TFLOP/s) of the rates that nothing on this device exceeds."""
    device, found = report["device"], []
    if device["limit_tflops"]:
        found.append((f"tensor cores at {device['max_clock_mhz']:.0f} MHz", device["limit_tflops"]))
    if report.get("matrix_product_tflops"):
        found.append(("8192^3 matrix product", report["matrix_product_tflops"]))
    return found
