"""``fmha-gen run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .output import add_row, bundle_argument, err, json_option, out, print_json, table

if TYPE_CHECKING:
    from ..run import RunResult

INT32_MAX = 2**31 - 1


class WindowBound(click.ParamType):
    """One bound of a window: a number of keys, or ``none`` for unbounded."""

    name = "bound"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "none":
            return None
        try:
            bound = int(str(value))
        except ValueError:
            self.fail(f"{value!r} is neither a number nor `none`", param, ctx)
        if not 0 <= bound <= INT32_MAX:
            self.fail(f"{bound} is out of range; allowed is 0 to {INT32_MAX}; `none` is unbounded", param, ctx)
        return bound


@click.command("run")
@bundle_argument
@click.option("--input", "input_path", required=True, metavar="FILE.npz", help="Arrays q, k, v.")
@click.option("--output", "output_path", required=True, metavar="FILE.npz", help="Gets out and lse, float32.")
@click.option("--driver", type=click.Choice(["auto", "sim", "cuda"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), help="What inputs are rounded to. Default: the bundle's.")
@click.option("--causal", is_flag=True, help="Bottom-right aligned causal mask.")
@click.option("--window", nargs=2, type=WindowBound(), metavar="L R", help="Keys left and right of the diagonal.")
@click.option("--scale", type=float, metavar="X", help="softmax_scale. Default: 1/sqrt(head_dim_qk).")
@click.option("--softcap", type=float, metavar="X", help="Needs kernels built with softcap.")
@click.option("--num-splits", type=int, metavar="N", help="Needs kernels built with split_kv.")
@click.option("--variant", metavar="GLOB", help="Choose among kernels whose id matches.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the simulator's scheduler.")
@click.option("--sms", type=click.IntRange(min=1), metavar="N", help="Multiprocessors the grid is laid out for.")
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
