"""The console script ``fmha-gen`` (also ``python -m fmha_gen``)."""

from __future__ import annotations

import json
import sys

_FIX = "this installation holds the run time alone; pip install 'fmha-gen[build]'"


def main() -> None:
    """Run the command line. Where only the run time is installed: ``doctor`` as always, else say what to install."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as e:
        sys.exit(_without_command_line(e.name or "click", sys.argv[1:]))
    from .cli import cli

    cli()


def _without_command_line(package: str, argv: list[str]) -> int:
    """Plain text or JSON without the packages of the command line; returns the exit code."""
    if argv and argv[0] == "doctor" and set(argv[1:]) <= {"--json"}:
        return _doctor("--json" in argv)
    message = f"{package} is not installed; {_FIX}"
    if "--json" in argv:
        print(json.dumps({"error": {"code": "toolchain", "message": message}}, indent=1))
    else:
        print(f"fmha-gen: {message}", file=sys.stderr)
    return 1


def _doctor(as_json: bool) -> int:
    from . import __version__
    from .doctor import conclusions, examine, exit_code, report

    checks = examine()
    if as_json:
        print(json.dumps(report(checks), indent=1))
        return exit_code(checks)
    print(f"fmha-gen {__version__}")
    width = max(len(c.part) for c in checks)
    for c in checks:
        print(f"  {c.part:{width}}  {'ok' if c.ok else 'missing':7}  {c.what}")
    print("\n".join(conclusions(checks)))
    return exit_code(checks)


if __name__ == "__main__":
    main()
