"""``fmha-gen bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .options import HEAD_DIM, SIZE, NonEmpty
from .output import (
    add_row,
    bundle_argument,
    err,
    json_option,
    only_option,
    out,
    output_folder,
    print_json,
    progress,
    table,
)


@click.command("bench")
@bundle_argument
@only_option
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), help="Default: the bundle's, bf16 before fp16.")
@click.option(
    "--head-dim", "head_dims", type=HEAD_DIM, multiple=True, metavar="N", help="head_dim_qk; may be repeated."
)
@click.option("--mask", type=click.Choice(["full", "causal", "both"]), default="both", show_default=True)
@click.option("--seqlen", "seqlens", type=SIZE, multiple=True, metavar="N", help="May be repeated. Default: 1k 4k 16k.")
@click.option("--tokens", type=SIZE, default=16384, show_default=True, help="batch x seqlen of every problem.")
@click.option("--heads", type=SIZE, metavar="N", help="Default: 2048 / head_dim_v.")
@click.option("--heads-kv", type=SIZE, metavar="N", help="Default: as many as q heads.")
@click.option(
    "--rounds", type=click.IntRange(1, 10**6), default=20, show_default=True, help="Timed samples of each contender."
)
@click.option(
    "--peer",
    "peers",
    type=click.Choice(["cudnn", "fa3", "none"]),
    multiple=True,
    help="May be repeated. Default: what is installed.",
)
@click.option(
    "-o",
    "--output",
    type=NonEmpty(),
    default=".",
    show_default=True,
    metavar="DIR",
    help="Gets bench-*.json, .svg and .md.",
)
@click.option("--no-plot", is_flag=True, help="Write no SVG, which needs matplotlib.")
@json_option
def command(
    bundle: str,
    only: str | None,
    dtype: str | None,
    head_dims: tuple[int, ...],
    mask: str,
    seqlens: tuple[int, ...],
    tokens: int,
    heads: int | None,
    heads_kv: int | None,
    rounds: int,
    peers: tuple[str, ...],
    output: str,
    no_plot: bool,
    as_json: bool,
) -> None:
    """Time a bundle's kernels on this machine's GPU, beside cuDNN and FlashAttention-3 where they are installed.

    Prints a table and writes the report as JSON, as a page with the table, and as an SVG plot of throughput.
    """
    if "none" in peers and len(set(peers)) > 1:
        raise click.UsageError(f"--peer none with {', '.join(p for p in peers if p != 'none')}; drop one of the two")
    if heads is not None and heads % (heads_kv or heads):
        raise click.UsageError(f"--heads {heads} with --heads-kv {heads_kv}; pass a multiple of --heads-kv")
    from ..bench import BenchOptions, bench_bundle
    from ..bench.plot import draw, require

    if not no_plot:
        require()
    folder = output_folder(output)
    options = BenchOptions(
        dtype=dtype,
        head_dims=head_dims or None,
        masks=("full", "causal") if mask == "both" else (mask,),
        seqlens=seqlens or BenchOptions.seqlens,
        tokens=tokens,
        heads=heads,
        heads_kv=heads_kv,
        only=only,
        rounds=rounds,
        peers=None if not peers else tuple(p for p in peers if p != "none"),
    )
    bar, advance = progress(0, "timing")

    def report_progress(label: str, done: int, total: int) -> None:
        bar.update(bar.task_ids[0], total=total, completed=done, description=f"timing {label}")

    with bar:
        report = bench_bundle(bundle, options, report_progress)
    files = _write(report, folder, None if no_plot else draw)
    if as_json:
        print_json({**report, "files": files})
    else:
        _print(report, files)


def _write(report: dict[str, Any], folder: Path, draw: Any) -> list[str]:
    from ..bench.report import markdown

    device = report["device"]["name"].replace("NVIDIA ", "").replace(" ", "-")
    stem = f"bench-{report['bundle']['name']}-{report['bundle']['version']}-{device}-{report['dtype']}"
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(report, indent=1) + "\n")
    paths[1].write_text(markdown(report))
    if draw is not None:
        paths.append(folder / f"{stem}.svg")
        draw(report, paths[2])
    return [str(p) for p in paths]


def _print(report: dict[str, Any], files: list[str]) -> None:
    from ..bench.report import columns, limits, row

    titles = columns(report)
    device = report["device"]
    t = table(f"{device['name']}, driver {device['driver'] or device['cuda']}", *titles, right=titles[2:])
    for case in report["results"]:
        add_row(t, *row(report, case))
    out().print(t)
    for what, tflops in limits(report):
        out().print(f"limit: {what}: {tflops:.0f} TFLOP/s", markup=False)
    for case in report["results"]:
        for peer, why in case["refused"].items():
            err().print(f"{peer} refused {case['shape']} {case['mask']} {case['seqlen']}: {why}", markup=False)
    for path in files:
        out().print(path, markup=False, soft_wrap=True)
