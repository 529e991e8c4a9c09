"""``fmha-gen verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import NonEmpty, Number
from .output import add_row, bundle_argument, count, json_option, only_option, out, print_json, progress, table

if TYPE_CHECKING:
    from ..verify import KernelVerdict, Report


@click.command("verify")
@bundle_argument
@click.option("--driver", type=click.Choice(["sim", "cuda"]), default="sim", show_default=True)
@only_option
@click.option(
    "--seeds", type=click.IntRange(1, 10**6), metavar="N", help="Scheduler seeds that must give the same bits."
)
@click.option("--quick", is_flag=True, help="A few problems and seeds a kernel instead of the full set.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Kernels verified side by side.")
@click.option(
    "--time-limit", type=Number(1, 10**6), default=120.0, show_default=True, metavar="S",
    help="Seconds that a kernel may take on a GPU before it counts as hanging.",
)  # fmt: skip
@click.option("--proof", type=NonEmpty(), metavar="FILE", help="Where proof.json goes. Default: into the bundle.")
@json_option
def command(
    bundle: str,
    driver: str,
    only: str | None,
    seeds: int | None,
    quick: bool,
    jobs: int | None,
    time_limit: float,
    proof: str | None,
    as_json: bool,
) -> int:
    """Run a bundle's kernels against an fp64 reference, with every check of the simulator on.

    Exit code 1 if any kernel gives wrong numbers, unstable bits or findings, or
    if none ran; proof.json records what was shown. Kernels for another
    architecture than what runs here are skipped, and said to be.
    """
    from ..verify import VerifyOptions, verify_bundle

    bar, advance = progress(0, "verifying")

    def report(kernel: KernelVerdict, done: int, total: int) -> None:
        bar.update(bar.task_ids[0], total=total)
        advance(kernel.id)

    options = VerifyOptions(driver, only, seeds, quick, proof, jobs, time_limit, report)
    with bar:
        result = verify_bundle(bundle, options)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)
    return 0 if result.passed else 1


def _print(result: Report) -> None:
    numbers = ("cases", "seeds", "worst error / bound", "seconds")
    t = table(None, "kernel", "verdict", *numbers, right=numbers)
    for k in result.kernels:
        verdict = "skipped" if k.skipped is not None else "passed" if k.passed else "FAILED"
        add_row(t, k.id, verdict, k.num_problems, k.num_seeds, f"{k.worst_error:.3f}", f"{k.seconds:.1f}")
    out().print(t)
    for k in result.kernels:
        for problem in k.problems:
            click.echo(f"{k.id}: {problem}")
    reasons = sorted({k.skipped for k in result.kernels if k.skipped is not None})
    skipped = sum(k.skipped is not None for k in result.kernels)
    for reason in reasons:
        click.echo(f"skipped: {reason}")
    failed = sum(k.failed for k in result.kernels)
    kernels = count(len(result.kernels), "kernel")
    more = f", {skipped} skipped" if skipped else ""
    click.echo(f"{kernels}, {failed} failed{more}, in {result.seconds:.1f} s; proof: {result.proof_path}")
