"""The SVG of a report: throughput against length, one panel per mask and head dims, with the device's limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import ToolchainError
from .peers import TITLES
from .report import OURS, limits

COLOURS = {OURS: "#2a6f2b", "cudnn": "#1f5fa8", "fa3": "#b5651d"}
MARKS = {OURS: "o", "cudnn": "s", "fa3": "^"}


def require() -> None:
    """Raise ToolchainError now, rather than after minutes of GPU time, when plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ToolchainError(
            "bench: matplotlib is not installed, and the plot needs it; pip install 'fmha-gen[bench]', or --no-plot"
        ) from None


def draw(report: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `path`. The same report gives the same bytes with the same matplotlib."""
    require()
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    results = report["results"]
    masks = list(dict.fromkeys(r["mask"] for r in results))
    shapes = list(dict.fromkeys(r["shape"] for r in results))
    with rc_context({"svg.hashsalt": "fmha_gen", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(2.9 * len(shapes) + 1.2, 2.6 * len(masks) + 1.1), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(masks), len(shapes), squeeze=False, sharex=True, sharey=True)
        for i, mask in enumerate(masks):
            for j, shape in enumerate(shapes):
                points = [r for r in results if r["mask"] == mask and r["shape"] == shape]
                _panel(axes[i][j], report, points, f"{shape}, {mask}")
        for j in range(len(shapes)):
            axes[-1][j].set_xlabel("seqlen")
        for i in range(len(masks)):
            axes[i][0].set_ylabel("TFLOP/s")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)
        device = report["device"]["name"]
        figure.suptitle(f"{report['bundle']['name']} {report['bundle']['version']}, {report['dtype']}, {device}")
        figure.savefig(Path(path), format="svg", metadata={"Date": None, "Creator": "fmha-gen bench"})


def _panel(axis: Any, report: dict[str, Any], points: list[dict[str, Any]], title: str) -> None:
    lengths = [p["seqlen"] for p in points]
    for name in (OURS, *report["peers"]):
        xy = [(p["seqlen"], p["tflops"][name]) for p in points if name in p["tflops"]]
        label = TITLES.get(name, "fmha_gen")
        axis.plot(*zip(*xy, strict=True) if xy else ([], []), marker=MARKS[name], color=COLOURS[name], label=label)
    for (what, tflops), style in zip(limits(report), ("-", "--"), strict=False):
        axis.axhline(tflops, color="0.4", linestyle=style, linewidth=0.9, label=what)
    axis.set_title(title, fontsize=9)
    axis.set_ylim(bottom=0)
    axis.grid(True, color="0.9")
    if lengths:
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths])
        axis.minorticks_off()
