"""``fmha-gen doctor``."""

from __future__ import annotations

import dataclasses

import click
from rich.text import Text

from .. import __version__
from .output import add_row, json_option, out, print_json, table

_WORDS = {
    "build": "compile bundles",
    "simulate": "run bundles in the simulator",
    "launch": "launch bundles on a GPU",
}


@click.command("doctor")
@json_option
def command(as_json: bool) -> int:
    """Say what this installation can do, and what it lacks.

    Exit code 0 if it can compile bundles and simulate them; a GPU is not needed for either.
    """
    from ..doctor import abilities, examine

    checks = examine()
    can = abilities(checks)
    if as_json:
        print_json({"version": __version__, "can": can, "checks": [dataclasses.asdict(c) for c in checks]})
    else:
        t = table(f"fmha-gen {__version__}", "part", "", "finding")
        for c in checks:
            add_row(t, c.part, "ok" if c.ok else Text("missing", "red"), c.what)
        out().print(t)
        for name, ok in can.items():
            click.echo(f"can {_WORDS[name]}: {'yes' if ok else 'no'}")
    return 0 if can["build"] and can["simulate"] else 1
