"""``fmha-gen doctor``."""

from __future__ import annotations

import click
from rich.text import Text

from .. import __version__
from .output import add_row, json_option, out, print_json, table


@click.command("doctor")
@json_option
def command(as_json: bool) -> int:
    """Say what this installation can do, and what it lacks.

    Exit code 0 if it can compile bundles and simulate them; a GPU is not needed for either.
    """
    from ..doctor import conclusions, examine, exit_code, report

    checks = examine()
    if as_json:
        print_json(report(checks))
    else:
        t = table(f"fmha-gen {__version__}", "part", "", "finding")
        for c in checks:
            add_row(t, c.part, "ok" if c.ok else Text("missing", "red"), c.what)
        out().print(t)
        for line in conclusions(checks):
            click.echo(line)
    return exit_code(checks)
