"""``fmha-gen schema``."""

from __future__ import annotations

import click

from .output import json_option, print_json


@click.command("schema")
@json_option
def command(as_json: bool) -> None:
    """Print the JSON schema of spec files (JSON in any case), for editors."""
    from ..spec import schema

    print_json(schema())
