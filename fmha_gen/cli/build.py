"""``fmha-gen build``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import NonEmpty, Scheduler
from .output import (
    add_row,
    arch_option,
    count,
    err,
    json_option,
    only_option,
    out,
    print_json,
    progress,
    spec_argument,
    table,
)

if TYPE_CHECKING:
    from ..build import BuildResult, KernelResult


@click.command("build")
@spec_argument
@click.option(
    "-o", "--out", "out_dir", type=NonEmpty(), default="out", show_default=True, metavar="DIR", help="Where bundles go."
)
@click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Kernels compiled side by side.")
@arch_option
@only_option
@click.option("--dry-run", is_flag=True, help="List what would be built; compile and write nothing.")
@click.option(
    "--executor",
    type=Scheduler(),
    metavar="dask://HOST:PORT",
    help="Compile on a dask.distributed cluster instead of here.",
)
@click.option("--source", is_flag=True, help="Ship each kernel's rendered source beside its cubin.")
@json_option
def command(
    specs: tuple[str, ...],
    out_dir: str,
    jobs: int | None,
    arch: str | None,
    only: str | None,
    dry_run: bool,
    executor: str | None,
    source: bool,
    as_json: bool,
) -> None:
    """Compile spec files into the bundle DIR/<name>-<version>, whose path is the last line printed.

    Kernels whose spec, templates and toolchain did not change come from the build cache. A kernel that fails fails the
    build, by name; the others are kept for the next try and no manifest is written. With --only or --arch, kernels of
    the bundle that is there stay if the spec still asks for them and nothing that makes them changed.
    """
    from ..build import BuildOptions, build_bundle
    from ..build.executors import open_executor
    from ..spec import only_arch, read_specs

    start = time.perf_counter()
    file = read_specs(specs)
    arch = None if arch is None else only_arch(file, arch).archs[0]
    bar, advance = progress(len(file.specs), "compiling")

    def report(kernel: KernelResult, done: int, total: int) -> None:
        bar.update(bar.task_ids[0], total=total)
        advance(kernel.id)

    with bar, open_executor(executor) as cluster:
        options = BuildOptions(
            jobs=jobs, only=only, arch=arch, dry_run=dry_run, source=source, executor=cluster, progress=report
        )
        result = build_bundle(file.bundle, file.specs, Path(out_dir), options)
    if as_json:
        print_json(_as_dict(result, dry_run, time.perf_counter() - start))
    else:
        _print(result, dry_run, time.perf_counter() - start)


def _as_dict(result: BuildResult, dry_run: bool, seconds: float) -> dict[str, object]:
    keys = ("id", "arch", "state", "seconds", "cubin_bytes", "registers")
    return {
        "path": str(result.root),
        "dry_run": dry_run,
        "archs": list(result.archs),
        "cubin_bytes": result.cubin_bytes,
        "files_written": result.files_written,
        "seconds": round(seconds, 3),
        "kernels": [{key: getattr(k, key) for key in keys} for k in result.kernels],
        "dropped": [{"id": d.id, "why": d.why} for d in result.dropped],
    }


def _print(result: BuildResult, dry_run: bool, seconds: float) -> None:
    numbers = ("seconds", "cubin B", "registers")
    t = table(None, "kernel", "state", *numbers, right=numbers)
    for k in result.kernels:
        figures = ("", "", "") if dry_run else (f"{k.seconds:.1f}", str(k.cubin_bytes), str(k.registers))
        add_row(t, k.id, k.state, *figures)
    out().print(t)
    kernels, archs = count(len(result.kernels), "kernel"), ", ".join(result.archs)
    if dry_run:
        click.echo(f"{kernels} for {archs}; nothing was compiled or written")
    else:
        done = f"{result.count('compiled')} compiled, {result.count('cached')} from the build cache"
        if kept := result.count("kept"):
            done += f", {kept} kept of the bundle that was there"
        for gone in result.dropped:
            err().print(f"warning: {gone.id or result.root}: left out: {gone.why}", markup=False, soft_wrap=True)
        size = f"{result.cubin_bytes} B of cubins; {count(result.files_written, 'file')} written"
        click.echo(f"{kernels} for {archs} in {seconds:.1f} s: {done}; {size}")
    click.echo(str(result.root))
