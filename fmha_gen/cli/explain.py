"""``fmha-gen explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import HEAD_DIM, LENGTH, SIZE, Architecture, NonEmpty, WindowBound, options_alone
from .output import add_row, bundle_argument, json_option, out, print_json, table

if TYPE_CHECKING:
    from ..explain import Explanation


@click.command("explain")
@bundle_argument
@click.option("--head-dim", type=HEAD_DIM, required=True, metavar="N", help="head_dim_qk.")
@click.option("--head-dim-v", type=HEAD_DIM, metavar="N", help="Default: head_dim_qk.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), help="Default: the bundle's, bf16 before fp16.")
@click.option("--causal", is_flag=True, help="Bottom-right aligned causal mask.")
@click.option("--window", nargs=2, type=WindowBound(), metavar="L R", help="Keys left and right of the diagonal.")
@click.option("--softcap", is_flag=True, help="The problem has a softcap.")
@click.option("--sink", is_flag=True, help="The problem has a sink.")
@click.option("--lse", is_flag=True, help="The log-sum-exp is wanted.")
@click.option("--batch", type=LENGTH, default=1, show_default=True)
@click.option("--seqlen-q", type=LENGTH, default=4096, show_default=True)
@click.option("--seqlen-k", type=LENGTH, metavar="N", help="Default: seqlen_q.")
@click.option("--heads", type=SIZE, default=16, show_default=True, help="num_heads_q.")
@click.option("--heads-kv", type=SIZE, metavar="N", help="Default: as many as q heads.")
@click.option(
    "--arch",
    type=Architecture(),
    metavar="ARCH",
    help="Default: this machine's GPU, else the bundle's only architecture.",
)
@click.option("--variant", type=NonEmpty(), metavar="GLOB", help="Choose among kernels whose id matches.")
@json_option
def command(
    bundle: str,
    head_dim: int,
    head_dim_v: int | None,
    dtype: str | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: bool,
    sink: bool,
    lse: bool,
    batch: int,
    seqlen_q: int,
    seqlen_k: int | None,
    heads: int,
    heads_kv: int | None,
    arch: str | None,
    variant: str | None,
    as_json: bool,
) -> int:
    """Say which kernel of a bundle the launcher takes for a problem, and why not the others.

    Needs no GPU and loads nothing. Exit code 1 if no kernel serves the problem.
    """
    from ..explain import device_for, explain, make_problem
    from ..manifest_io import read_manifest

    manifest = read_manifest(bundle)
    with options_alone():
        problem = make_problem(
            manifest,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            causal=causal,
            window=window,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads=heads,
            heads_kv=heads_kv,
            softcap=softcap,
            sink=sink,
            lse=lse,
        )
    found = explain(manifest, problem, device_for(manifest, arch), variant)
    if as_json:
        print_json(found.report())
    else:
        _print(found)
    return 0 if found.kernel else 1


def _print(found: Explanation) -> None:
    console = out()
    console.print(f"problem  {found.problem}", markup=False)
    console.print(f"device   {found.device}", markup=False)
    console.print(f"kernel   {found.kernel or 'none serves it'}", markup=False)
    for reason in found.reasons:
        console.print(f"because  {reason}", markup=False)
    for line in found.spec_lines:
        console.print(f"add      {line}", markup=False)
    for line in found.not_built:
        console.print(f"no spec  {line}", markup=False)
    t = table(None, "kernel", "", "why")
    for verdict in found.verdicts:
        add_row(t, verdict.kernel, verdict.state, "; ".join(verdict.why))
    console.print(t)
