"""``fmha-gen plan``."""

from __future__ import annotations

import click
from rich.text import Text

from .output import add_row, arch_option, json_option, only_option, out, plans_of, print_json, spec_argument, table


@click.command("plan")
@spec_argument
@arch_option
@only_option
@json_option
def command(specs: tuple[str, ...], arch: str | None, only: str | None, as_json: bool) -> None:
    """Show every kernel's budgets: SMEM map, TMEM columns, warps x registers, pipelines, and why auto chose what."""
    from ..plan import describe

    _, plans = plans_of(specs, arch, only)
    if as_json:
        print_json({"kernels": [{"id": p.id, "plan": p.to_dict()} for p in plans]})
        return
    console = out()
    for plan in plans:
        console.print(Text(plan.id, style="bold"))
        for data in describe(plan):
            shown = table(data.title, *data.columns, right=data.right)
            for row in data.rows:
                add_row(shown, *row)
            shown.caption, shown.caption_justify = Text(data.note), "left"
            console.print(shown)
