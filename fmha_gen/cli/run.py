"""``fmha-gen run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import INT32_MAX, NonEmpty, Number, WindowBound, options_alone
from .output import add_row, bundle_argument, err, json_option, out, print_json, table

if TYPE_CHECKING:
    from ..run import RunResult


@click.command("run")
@bundle_argument
@click.option("--input", "input_path", type=NonEmpty(), required=True, metavar="FILE.npz", help="Arrays q, k, v.")
@click.option(
    "--output", "output_path", type=NonEmpty(), required=True, metavar="FILE.npz", help="Gets out and lse, float32."
)
@click.option("--driver", type=click.Choice(["auto", "sim", "cuda"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), help="What inputs are rounded to. Default: the bundle's.")
@click.option("--causal", is_flag=True, help="Bottom-right aligned causal mask.")
@click.option("--window", nargs=2, type=WindowBound(), metavar="L R", help="Keys left and right of the diagonal.")
@click.option("--scale", type=Number(min=0), metavar="X", help="softmax_scale. Default: 1/sqrt(head_dim_qk).")
@click.option("--softcap", type=Number(min=0), metavar="X", help="Needs kernels built with softcap.")
@click.option("--num-splits", type=click.IntRange(1, INT32_MAX), metavar="N", help="Needs kernels built with split_kv.")
@click.option("--variant", type=NonEmpty(), metavar="GLOB", help="Choose among kernels whose id matches.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the simulator's scheduler.")
@click.option("--sms", type=click.IntRange(1, INT32_MAX), metavar="N", help="Multiprocessors the grid is laid out for.")
@json_option
def command(
    bundle: str,
    input_path: str,
    output_path: str,
    driver: str,
    dtype: str | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
    num_splits: int | None,
    variant: str | None,
    seed: int,
    sms: int | None,
    as_json: bool,
) -> None:
    """Run one attention problem through the launcher, on a GPU or in the simulator.

    q, k and v are (batch, seqlen, num_heads, head_dim) arrays in float32, rounded to the kernel's dtype.
    """
    from ..run import RunOptions, run_npz
    from ..runtime.problem import check_scale, resolve_mask

    with options_alone():
        resolve_mask(causal, window)
        if scale is not None:
            check_scale(scale)
    options = RunOptions(
        driver=driver,
        dtype=dtype,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        num_splits=num_splits,
        variant=variant,
        seed=seed,
        sms=sms,
    )
    result = run_npz(bundle, input_path, output_path, options)
    if as_json:
        print_json({**result.report(), "output": output_path})
    else:
        _print(result, output_path)


def _print(result: RunResult, output_path: str) -> None:
    for warning in result.warnings:
        err().print(f"warning: {warning}", markup=False)
    t = table(None, "", "", right=())
    t.show_header = False
    grid = "nothing to launch" if result.grid is None else "x".join(str(n) for n in result.grid)
    add_row(t, "kernel", result.kernel)
    add_row(t, "device", f"{result.device} ({result.driver} driver)")
    add_row(t, "grid", grid)
    add_row(t, "seconds", f"{result.seconds:.3f}")
    if result.counters is not None:
        roles = (f"{role} {n}" for role, n in result.counters["roles"].items())
        add_row(t, "instructions", f"{', '.join(roles)} ({result.counters['unit']})")
    add_row(t, "out", f"{result.dtype} {list(result.out.shape)} written to {output_path} as float32")
    out().print(t)
