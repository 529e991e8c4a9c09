"""What the commands share: printing as text or JSON, errors, and the options that several take."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import PlanError, SelectionError, SpecError
from .options import Architecture, NonEmpty

if TYPE_CHECKING:
    from ..manifest import KernelEntry, Manifest
    from ..plan import KernelPlan
    from ..spec import SpecFile

PIPE_WIDTH = 200  # columns of a table when no terminal says how wide it is

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the keys.")
only_option = click.option(
    "--only", type=NonEmpty(), metavar="GLOB", help="Only kernels whose id matches, e.g. '*-d128-causal-*'."
)
spec_argument = click.argument("specs", type=NonEmpty(), nargs=-1, required=True, metavar="SPEC...")
arch_option = click.option(
    "--arch", type=Architecture(), metavar="ARCH", help="Only this architecture of the spec, e.g. sm_100a."
)
bundle_argument = click.argument("bundle", type=NonEmpty(), metavar="BUNDLE")


def out() -> Console:
    """The console of results. Tables keep their width when piped."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def err() -> Console:
    """The console of progress and warnings."""
    return Console(stderr=True, highlight=False)


def only_entries(manifest: Manifest, only: str | None) -> tuple[KernelEntry, ...]:
    """The kernels of a bundle that ``--only`` asks for. Raises SelectionError when it matches none."""
    from ..runtime.select import matching

    found = matching(manifest.kernels, only)
    if not found and only is not None:
        held = ", ".join(e.id for e in manifest.kernels) or "nothing"
        raise SelectionError(f"--only {only}: matches no kernel of {manifest.name} {manifest.version}; it holds {held}")
    return found


def plans_of(specs: Sequence[str], arch: str | None, only: str | None) -> tuple[SpecFile, list[KernelPlan]]:
    """Spec files, and the plans of the variants that ``--only`` (a glob over ids, with or without digest) asks for.

    Raises SpecError, and PlanError with every variant that does not fit.
    """
    from ..manifest import id_matches
    from ..plan import make_plan
    from ..spec import check_identities, read_specs

    file = read_specs(specs, arch)
    plans, problems = [], []
    for spec in file.specs:
        try:
            plans.append(make_plan(spec))
        except PlanError as e:
            problems.append(str(e))
    if problems:
        raise PlanError("\n".join(problems))
    check_identities(p.spec for p in plans)
    if only is None:
        return file, plans
    found = [p for p in plans if id_matches(p.id, only)]
    if not found:
        raise SpecError([f"--only {only}: matches no kernel of the spec; it has {', '.join(p.id for p in plans)}"])
    return file, found


def output_folder(path: str) -> Path:
    """The folder `path`, made if needed. Raises OSError, before any work, if it is none or cannot be written."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return folder


def print_json(data: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(data, indent=1, sort_keys=False, ensure_ascii=False, allow_nan=False))


def print_error(code: str, message: str, as_json: bool, problems: Sequence[str] | None = None) -> None:
    """An error: one JSON document on standard output; as text, and where that one is full, on standard error."""
    if as_json:
        error: dict[str, Any] = {"code": code, "message": message}
        if problems is not None:
            error["problems"] = list(problems)
        try:
            print_json({"error": error})
            if flush_output():
                return
        except OSError:
            flush_output()
    click.echo(f"error: {message}" if not problems else message, err=True)
    if problems:
        click.echo(f"error: {count(len(problems), 'problem')}", err=True)


def flush_output() -> bool:
    """Write what standard output holds back. Where it takes no more (a full device, a closed pipe): give that up, and
    False; Python would try again at exit, and end with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def count(number: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def table(title: str | None, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; columns named in `right` are right-aligned. Title and names are plain text, no markup."""
    heading = None if title is None else Text(title, "table.title")
    t = Table(title=heading, title_justify="left", header_style="bold", expand=False, box=box.SIMPLE_HEAD)
    for name in columns:
        t.add_column(Text(name), justify="right" if name in right else "left", overflow="fold")
    return t


def add_row(t: Table, *cells: object) -> None:
    """One row. Cells are plain text: a ``[`` in them is no markup."""
    t.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))


def progress(total: int, what: str) -> tuple[Progress, Callable[[str], None]]:
    """A bar on standard error that shows only where a terminal looks, and a function that advances it by one."""
    console = err()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bar.add_task(what, total=total)

    def advance(label: str) -> None:
        bar.update(task, advance=1, description=f"{what} {escape(label)}")

    return bar, advance
