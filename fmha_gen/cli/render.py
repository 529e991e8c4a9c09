"""``fmha-gen render``."""

from __future__ import annotations

import click

from .options import NonEmpty
from .output import arch_option, json_option, only_option, output_folder, plans_of, print_json, spec_argument


@click.command("render")
@spec_argument
@arch_option
@only_option
@click.option(
    "-o",
    "--out",
    "out_dir",
    type=NonEmpty(),
    metavar="DIR",
    help="Write <id>.py files there instead of printing one source.",
)
@json_option
def command(specs: tuple[str, ...], arch: str | None, only: str | None, out_dir: str | None, as_json: bool) -> None:
    """Print the CuTe-DSL source of one kernel, or write those of many with -o."""
    from ..bundle import write_file
    from ..render import render

    _, plans = plans_of(specs, arch, only)
    if out_dir is None and not as_json and len(plans) > 1:
        ids = "\n  ".join(p.id for p in plans)
        raise click.UsageError(
            f"{len(plans)} kernels, and one can be printed; choose with --only, or give -o:\n  {ids}"
        )
    folder = None if out_dir is None else output_folder(out_dir)
    rendered = [(p.id, render(p)) for p in plans]
    paths = {}
    if folder is not None:
        for kernel_id, r in rendered:
            path = folder / f"{kernel_id}.py"
            write_file(path, r.text.encode())
            paths[kernel_id] = str(path)
    if as_json:
        print_json(
            {
                "kernels": [
                    {"id": i, "digest": r.digest, **({"path": paths[i]} if paths else {"source": r.text})}
                    for i, r in rendered
                ]
            }
        )
    elif paths:
        click.echo("\n".join(paths.values()))
    else:
        click.echo(rendered[0][1].text, nl=False)
