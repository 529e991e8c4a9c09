"""The command line ``fmha-gen``. Thin: every command parses, calls one function of the package, and prints.

A command lives in a module of its own, imported only when it runs. Exit codes: 0 done, 1 failed, 2 wrong usage. With
``--json`` a failure is printed as ``{"error": {"code", "message", ...}}``; `docs/cli.md` lists codes and keys.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import click

from .. import __version__
from ..errors import FmhaGenError
from .output import flush_output, print_error

# name -> what `fmha-gen --help` says; a command is the function `command` of the module `cli/<name>.py`.
COMMANDS = {
    "build": "Compile spec files into a bundle.",
    "plan": "Show the budgets of each kernel of a spec: SMEM, TMEM, registers, pipelines.",
    "render": "Print or write the kernel sources of a spec.",
    "list": "Show which kernels a bundle holds, and what it lacks of a spec.",
    "inspect": "Check every file of a bundle and show its kernels' records.",
    "analyze": "Read the machine code of a bundle or cubin: registers, spills, loops by role.",
    "verify": "Run a bundle's kernels against an fp64 reference.",
    "run": "Run one attention problem from an .npz file.",
    "bench": "Time a bundle on this machine's GPU, beside cuDNN and FlashAttention-3.",
    "explain": "Say which kernel of a bundle serves a problem, and why not the others.",
    "doctor": "Say what this installation can do, and what it lacks.",
    "schema": "Print the JSON schema of spec files, for editors.",
}
# A module called `list` would replace the builtin in this package's namespace.
_MODULES = {"list": "listing"}


class _Group(click.Group):
    """Loads a command when it is asked for, and turns every error into the exit codes above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".{_MODULES.get(name, name)}", __name__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> Any:
        argv = list(sys.argv[1:] if args is None else args)
        if not _standard_streams():
            click.echo("error: standard output is closed, and results go there; send it to a file or a pipe", err=True)
            sys.exit(1)
        sys.exit(_run(self, argv))


def _standard_streams() -> bool:
    """Whether there is a standard output. Streams that the caller closed (``>&-``) are opened on the null device: else
    the next file that is opened takes their number, and what a library prints goes into it."""
    found = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    return found


def _run(group: _Group, argv: list[str]) -> int:
    """Run the command line `argv`; returns the exit code."""
    as_json = "--json" in argv
    try:
        with _ended_politely():
            return _dispatch(group, argv, as_json)
    except (click.Abort, KeyboardInterrupt) as e:
        cause = e.__cause__ or e  # click turns a KeyboardInterrupt into an Abort
        print_error("interrupted", str(cause) or "interrupted", as_json)
        return 1


@contextlib.contextmanager
def _ended_politely() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as SIGINT does: by an exception, so that child processes and temporary folders
    go with it. A signal that is ignored (nohup) stays so."""

    def end(number: int, _: Any) -> None:
        raise KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}")

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _dispatch(group: _Group, argv: list[str], as_json: bool) -> int:
    try:
        result = click.Group.main(group, args=argv, prog_name="fmha-gen", standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is a failure of this command
        return result if isinstance(result, int) else 0
    except click.UsageError as e:
        if as_json:
            print_error("usage", e.format_message(), as_json=True)
        else:
            e.show()
        return 2
    except click.ClickException as e:
        print_error("file", e.format_message(), as_json)
        return 1
    except FmhaGenError as e:
        print_error(e.code, str(e), as_json, problems=getattr(e, "problems", None))
        return 1
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] in ("fmha_gen", "cutlass"):
            raise
        fix = "pip install 'fmha-gen[build]'"
        print_error("toolchain", f"{e.name} is not installed; this command needs it; {fix}", as_json)
        return 1
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.Abort:
        raise
    except BrokenPipeError:
        flush_output()
        return 1
    except OSError as e:  # of the machine, not of the program: a path, a full disk, a limit
        where = f"{e.filename}: " if e.filename else _lost_folder(e)
        message = f"{where}{e.strerror or e}; check the path, its permissions and the free space"
        writable = flush_output()
        print_error("file", message, as_json and writable)
        return 1
    except MemoryError as e:
        what = f" ({e})" if str(e) else ""
        print_error("memory", f"out of memory{what}; free some, lower -j, or take a smaller problem", as_json)
        return 1
    except Exception as e:
        if as_json:
            print_error("internal", f"{type(e).__name__}: {e}; this is a bug of fmha-gen", as_json=True)
            return 1
        raise


def _lost_folder(e: OSError) -> str:
    """What an error without a path is about, where that is the working folder: asking for a deleted one names none."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working folder was deleted: " if e.errno == errno.ENOENT else ""
    return ""


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="fmha-gen")
def cli() -> None:
    """Ahead-of-time compiler of fused multi-head attention kernels.

    A YAML spec becomes a bundle of proven cubins; the run time launches them and never compiles.
    """
