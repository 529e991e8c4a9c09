"""``fmha-gen list``."""

from __future__ import annotations

from typing import Any

import click

from ..manifest import KernelEntry, Manifest
from .options import NonEmpty
from .output import add_row, bundle_argument, count, json_option, out, plans_of, print_json, table


@click.command("list")
@bundle_argument
@click.argument("specs", type=NonEmpty(), nargs=-1, metavar="[SPEC...]")
@json_option
def command(bundle: str, specs: tuple[str, ...], as_json: bool) -> int:
    """Show what a bundle serves: one row a problem, one column a kernel for it.

    With spec files, compare: kernels that the spec asks for and the bundle lacks ("holes") make the exit code 1.
    """
    from ..manifest_io import read_manifest

    manifest = read_manifest(bundle)
    wanted = [p.id for p in plans_of(specs, None, None)[1]] if specs else None
    have = {e.id for e in manifest.kernels}
    holes = [i for i in wanted if i not in have] if wanted is not None else []
    extra = sorted(have - set(wanted)) if wanted is not None else []
    if as_json:
        print_json(_as_dict(manifest, wanted, holes, extra))
    else:
        _print(manifest, wanted, holes, extra)
    return 1 if holes else 0


def _as_dict(manifest: Manifest, wanted: list[str] | None, holes: list[str], extra: list[str]) -> dict[str, Any]:
    kernels = [
        {
            "id": e.id,
            "family": e.family,
            "arch": e.arch,
            "dtype": e.serves.dtype,
            "head_dim_qk": e.serves.head_dim_qk,
            "head_dim_v": e.serves.head_dim_v,
            "masks": list(e.serves.masks),
            "features": list(e.serves.features),
            "min_rows": e.serves.min_rows,
            "max_rows": e.serves.max_rows,
            "rank": e.rank,
        }
        for e in manifest.kernels
    ]
    data: dict[str, Any] = {"name": manifest.name, "version": manifest.version, "kernels": kernels}
    if wanted is not None:
        data["spec"] = {"kernels": len(wanted), "holes": holes, "not_in_spec": extra}
    return data


def _rows_served(e: KernelEntry) -> str:
    """Query rows of one head that a kernel is chosen for, e.g. ``rows <= 128``."""
    low, high = e.serves.min_rows, e.serves.max_rows
    if high is not None:
        return f"rows {low} to {high}" if low else f"rows <= {high}"
    return f"rows >= {low}" if low else "any rows"


def _print(manifest: Manifest, wanted: list[str] | None, holes: list[str], extra: list[str]) -> None:
    """The coverage matrix: arch, dtype and head dims down, masks across; a cell names kernels by rows served."""
    masks = list(dict.fromkeys(m for e in manifest.kernels for m in e.serves.masks))
    cells: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for e in sorted(manifest.kernels, key=lambda e: (e.serves.head_dim_qk, e.serves.head_dim_v, e.rank, e.id)):
        s = e.serves
        dims = str(s.head_dim_qk) if s.head_dim_qk == s.head_dim_v else f"({s.head_dim_qk}, {s.head_dim_v})"
        key: tuple[str, ...] = (e.family, e.arch, s.dtype, dims, ", ".join(s.features) or "-")
        for mask in s.masks:
            cells.setdefault(key, {}).setdefault(mask, []).append(_rows_served(e))
    title = f"{manifest.name} {manifest.version}: {count(len(manifest.kernels), 'kernel')}"
    t = table(title, "family", "arch", "dtype", "head dim", "features", *masks)
    for key, by_mask in cells.items():
        add_row(t, *key, *("\n".join(by_mask.get(mask, ["none"])) for mask in masks))
    out().print(t)
    if wanted is None:
        return
    for hole in holes:
        click.echo(f"missing: {hole}")
    for kernel_id in extra:
        click.echo(f"not in the spec: {kernel_id}")
    click.echo(f"the spec asks for {count(len(wanted), 'kernel')}; the bundle lacks {len(holes)} of them")
