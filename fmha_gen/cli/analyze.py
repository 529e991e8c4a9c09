"""``fmha-gen analyze``."""

from __future__ import annotations

from pathlib import Path

import click

from .options import HEAD_DIM, NonEmpty
from .output import add_row, json_option, only_option, out, print_json, table


@click.command("analyze")
@click.argument("path", type=NonEmpty(), metavar="BUNDLE|FILE.cubin")
@only_option
@click.option("--all-loops", is_flag=True, help="Also loops that hold others, with their own code's figures.")
@click.option("--head-dim-qk", type=HEAD_DIM, metavar="N", help="Of a bare cubin, for its bound.")
@click.option("--head-dim-v", type=HEAD_DIM, metavar="N", help="Of a bare cubin; default: --head-dim-qk.")
@click.option(
    "--tile-n", type=click.IntRange(16, 2**16), default=128, show_default=True, help="Keys per block of a bare cubin."
)
@json_option
def command(
    path: str,
    only: str | None,
    all_loops: bool,
    head_dim_qk: int | None,
    head_dim_v: int | None,
    tile_n: int,
    as_json: bool,
) -> None:
    """Read the machine code of a bundle or of any cubin: registers, spills, and every loop's role, issue slots, counts.

    Figures are counts of SASS instructions, except the bound, which is a model figure and says so.
    """
    from ..analyze import analyze, tables

    if only is not None and Path(path).is_file():
        raise click.UsageError("--only chooses among a bundle's kernels; a cubin is analyzed whole")
    if head_dim_v is not None and head_dim_qk is None:
        raise click.UsageError("--head-dim-v without --head-dim-qk; pass both")
    if head_dim_qk is not None and Path(path).is_dir():
        raise click.UsageError("--head-dim-qk and --head-dim-v are of a bare cubin; a bundle's records say them")
    report = analyze(path, head_dim_qk, head_dim_v, tile_n, only)
    if as_json:
        print_json(report.to_dict())
        return
    for t in tables(report, all_loops):
        drawn = table(t.title, *t.columns, right=t.right)
        for row in t.rows:
            add_row(drawn, *row)
        out().print(drawn)
        for note in t.notes:
            click.echo(note)
