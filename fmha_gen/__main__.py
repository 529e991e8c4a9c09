"""The console script ``fmha-gen`` (also ``python -m fmha_gen``)."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; say what to install where only the run time is installed."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as e:
        print(
            f"fmha-gen: {e.name} is not installed; this installation holds the run time alone; "
            "pip install 'fmha-gen[build]'",
            file=sys.stderr,
        )
        sys.exit(1)
    from .cli import cli

    cli()


if __name__ == "__main__":
    main()
