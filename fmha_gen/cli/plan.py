"""``fmha-gen plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .output import (
    add_row,
    arch_option,
    count,
    json_option,
    only_option,
    out,
    plans_of,
    print_json,
    spec_argument,
    table,
)

if TYPE_CHECKING:
    from ..plan import KernelPlan


@click.command("plan")
@spec_argument
@arch_option
@only_option
@click.option("--brief", is_flag=True, help="One row a kernel instead of its tables.")
@json_option
def command(specs: tuple[str, ...], arch: str | None, only: str | None, brief: bool, as_json: bool) -> None:
    """Show how each kernel of a spec spends SMEM, TMEM and registers, its pipelines, and why `auto` chose what it did.

    A variant that does not fit is an error, with the arithmetic. Nothing is compiled.
    """
    _, plans = plans_of(specs, arch, only)
    if as_json:
        print_json({"kernels": [{"id": p.id, **p.to_dict()} for p in plans]})
    elif brief:
        _print_brief(plans)
    else:
        for p in plans:
            _print(p)


def _print(plan: KernelPlan) -> None:
    from ..plan.describe import describe

    console = out()
    click.echo(click.style(plan.id, bold=True) + f"  ({plan.spec.source})")
    for t in describe(plan):
        drawn = table(t.title, *t.columns, right=t.right)
        for row in t.rows:
            add_row(drawn, *row)
        console.print(drawn)
        if t.note:
            click.echo(f"  {t.note}\n")


def _print_brief(plans: list[KernelPlan]) -> None:
    numbers = ("KV stages", "SMEM B", "TMEM cols", "bound clk (model)")
    t = table(count(len(plans), "kernel"), "kernel", "registers", *numbers, "schedule", right=numbers)
    for p in plans:
        registers = "/".join(str(r) for r in p.spec.registers or ())
        bound = f"{p.model.bound_clk:.0f} ({p.model.limiter})"
        add_row(t, p.id, registers, p.kv_ring.stages, p.smem_bytes, p.tmem_alloc_cols, bound, p.schedule.name)
    out().print(t)
