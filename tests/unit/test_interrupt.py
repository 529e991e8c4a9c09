"""Builds that a signal ends: no compiler process, no temporary folder and no traceback stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fmha_gen.compiler.toolchain import CUDA_MAJOR, DSL_VERSION
from fmha_gen.resources import data_dir

ROOT = Path(__file__).parents[2]
# A build whose compiler is a process that only waits, in any number of threads.
SCRIPT = """
import sys
from fmha_gen.build import identity
from fmha_gen.cli import cli
from fmha_gen.compiler import run
run.toolchain.identity = identity.identity = lambda: {"dsl": "x"}
run.sys = type("Sys", (), {"executable": sys.argv[1], "prefix": sys.prefix})
cli(sys.argv[2:])
"""
COMPILER = "#!/bin/sh\necho $$ > $PIDS/$$\nsleep 120 & wait\n"


@contextlib.contextmanager
def waiting_build(tmp_path: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A running build and the ids of its two compiler processes, which wait."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    for name in ("pids", "tmp"):
        (tmp_path / name).mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"), "PIDS": str(tmp_path / "pids")}
    env["FMHA_GEN_CACHE_DIR"] = str(tmp_path / "cache")
    args = [
        "build",
        str(data_dir("specs") / "core.yaml"),
        "--only",
        "*-bf16-d64-*",
        "-j",
        "2",
        "-o",
        str(tmp_path / "o"),
    ]
    build = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(compiler), *args, *more],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_signals_as_in_a_terminal,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while len(pids := [int(p.name) for p in (tmp_path / "pids").iterdir()]) < 2:
            assert build.poll() is None and time.monotonic() < end, "two compilers start"
            time.sleep(0.05)
        yield build, pids
    finally:
        build.kill()
        build.wait()


def _signals_as_in_a_terminal() -> None:
    """Tests that run in the background of a shell, or under nohup, inherit ignored signals."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_compilers_and_removes_their_folders(number: signal.Signals, tmp_path: Path):
    with waiting_build(tmp_path, "--json") as (build, pids):
        assert len(list((tmp_path / "tmp").iterdir())) == 2 and all(map(is_running, pids))
        build.send_signal(number)
        out, err = build.communicate(timeout=30)
    assert build.returncode == 1
    error = json.loads(out)["error"]
    assert error["code"] == "interrupted" and "Traceback" not in err
    assert error["message"] == ("interrupted" if number == signal.SIGINT else f"interrupted by {number.name}")
    assert not any(map(is_running, pids)), "compilers outlive the build"
    assert len(list((tmp_path / "pids").iterdir())) == 2, "none was started after the signal"
    assert list((tmp_path / "tmp").iterdir()) == [] and not (tmp_path / "o").exists()


def test_a_compiler_ends_with_a_build_that_is_killed(tmp_path: Path):
    """SIGKILL: the build can end nothing; the compiler sees its standard input close."""
    work = tmp_path / "fmha-gen-x"
    work.mkdir()
    (work / "kernel.py").write_text("import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(1000)\n")
    job = {"source": str(work / "kernel.py"), "arch": "sm_100a", "dsl": DSL_VERSION, "cuda_major": CUDA_MAJOR}
    (work / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "fmha_gen.compiler.child", "job.json"]
    build = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(work), *command],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert build.stdout is not None
    compiler = int(build.stdout.readline())
    wait_until((work / "started").exists)
    build.kill()
    build.wait()
    try:
        wait_until(lambda: not is_running(compiler))
    finally:
        build.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(compiler, signal.SIGKILL)
    assert not work.exists()


BUILD = """
import subprocess, sys, time
null = subprocess.DEVNULL
child = subprocess.Popen(
    sys.argv[2:], cwd=sys.argv[1], stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
)
print(child.pid, flush=True)
time.sleep(100)
"""


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "in time"
        time.sleep(0.05)


def test_what_is_ignored_stays_ignored(tmp_path: Path):
    """nohup: a build goes on when its terminal is closed."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SCRIPT
    code = code.replace("cli(sys", "signal.raise_signal(signal.SIGHUP); cli(sys")
    end = "\nimport fmha_gen.doctor as d\nd.examine = lambda: signal.raise_signal(signal.SIGHUP) or []\n"
    code = code.replace("from fmha_gen.compiler import run\n", "from fmha_gen.compiler import run\n" + end)
    done = subprocess.run(
        [sys.executable, "-c", code, "x", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout)["checks"] == []
