"""``fmha-gen inspect``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from .output import add_row, bundle_argument, count, json_option, only_entries, only_option, out, print_json, table

if TYPE_CHECKING:
    from ..bundle import CheckedBundle
    from ..manifest import KernelRecord


@click.command("inspect")
@bundle_argument
@only_option
@json_option
def command(bundle: str, only: str | None, as_json: bool) -> None:
    """Check every file of a bundle, and show its index and its kernels' records."""
    from ..bundle import check_bundle

    checked = check_bundle(bundle)
    wanted = {e.id for e in only_entries(checked.manifest, only)}
    records = [r for r in checked.records if r.id in wanted]
    if as_json:
        data = dataclasses.asdict(checked.manifest)
        data["kernels"] = [
            dataclasses.asdict(r) | {"plan_file": dataclasses.asdict(r.plan), "plan": plan}
            for r, plan in zip(checked.records, checked.plans, strict=True)
            if r.id in wanted
        ]
        data["unreferenced"] = list(checked.unreferenced)
        print_json(data)
        return
    _print_header(checked)
    _print_kernels(records)
    if only is not None:
        for record in records:
            _print_record(record)


def _print_header(checked: CheckedBundle) -> None:
    m = checked.manifest
    size = sum(r.cubin.size_bytes for r in checked.records)
    commit = f", commit {m.generator.commit}" if m.generator.commit else ""
    dirty = " (with local changes)" if m.generator.dirty else ""
    archs = ", ".join(sorted({e.arch for e in m.kernels}))
    kernels = count(len(m.kernels), "kernel") + (f" for {archs}" if archs else "")
    click.echo(f"{m.name} {m.version}: {kernels}, {size} B of cubins; every file checked")
    click.echo(f"format {m.format_version[0]}.{m.format_version[1]}; fmha-gen {m.generator.version}{commit}{dirty}")
    t = m.toolchain
    click.echo(f"DSL {t.dsl}, CUDA {t.cuda}, ptxas {t.ptxas}, Python {t.python}; driver {m.min_driver} or newer")
    for path in checked.unreferenced:
        click.echo(f"not in the index: {path}")


def _print_kernels(records: list[KernelRecord]) -> None:
    numbers = ("registers", "spills", "stack B", "SMEM B", "TMEM cols", "cubin B")
    t = table(None, "kernel", "rank", "grid rule", *numbers, right=("rank", *numbers))
    for r in records:
        add_row(
            t,
            r.id,
            str(r.rank),
            r.launch.grid.name,
            str(r.resources.registers),
            str(r.resources.spill_ops),
            str(r.resources.stack_bytes),
            str(r.launch.dynamic_smem_bytes),
            str(r.resources.tmem_cols),
            str(r.cubin.size_bytes),
        )
    out().print(t)


def _print_record(record: KernelRecord) -> None:
    """The parameter table of one kernel, as the packer reads it."""
    t = table(record.id, "parameter", "kind", "offset", "size", "note", right=("offset", "size"))
    for p in record.params:
        note = "may be null" if p.nullable else ""
        if p.tensor_map is not None:
            m = p.tensor_map
            axes = ", ".join(f"{a.axis}={a.extent} box {a.box}" for a in m.axes)
            note = f"{m.tensor}, {m.element}, swizzle {m.swizzle}: {axes}"
        add_row(t, p.name, p.kind, str(p.offset), str(p.size), note)
    out().print(t)
    click.echo(f"symbol {record.symbol}, {record.launch.threads} threads, cubin sha256 {record.cubin.sha256}")
