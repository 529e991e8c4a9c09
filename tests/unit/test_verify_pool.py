"""Workers of `verify` that die or hang: reported, and never taken for kernels that passed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fmha_gen.errors import BundleError, VerifyError
from fmha_gen.verify.kernel import CaseVerdict, KernelVerdict
from fmha_gen.verify.pool import Task, side_by_side, under_limit
from tests.unit.test_interrupt import ROOT, is_running


class OnArrival(Task):
    """A task that calls `act` when it arrives in the worker process."""

    act: tuple[Callable[..., object], tuple[object, ...]]

    def __reduce__(self) -> tuple[object, ...]:
        return self.act


class Dies(OnArrival):
    """As a process does that the system ends for want of memory."""

    act = os._exit, (9,)


class Hangs(OnArrival):
    """As a process does that waits for a GPU."""

    act = time.sleep, (1000,)


def record_and_hang() -> None:
    Path(os.environ["PIDS"], str(os.getpid())).touch()
    time.sleep(1000)


class Records(OnArrival):
    """Hangs, after it has left the process's id as a file's name."""

    act = record_and_hang, ()


def task(number: int, kind: type[Task] = Task) -> Task:
    return kind("no bundle", f"kernel{number}", "cuda", True, None, "p" * 64, "c" * 64)


def passes(task: Task) -> KernelVerdict:
    return KernelVerdict(task.kernel, task.ptx_sha256, task.cubin_sha256, (CaseVerdict("one", (0,), 0.5, ()),), 0.1)


def refuses(task: Task) -> KernelVerdict:
    raise BundleError(f"{task.bundle}: not a folder")


def test_a_dead_worker_is_an_error_by_name() -> None:
    with pytest.raises(VerifyError, match=r"kernel\d: a worker process died"):
        list(side_by_side(passes, [task(n, Dies) for n in range(2)], 2))
    with pytest.raises(VerifyError, match=r"kernel0: its worker process died \(exit code 9"):
        list(under_limit(passes, [task(0, Dies), task(1)], 60))


def test_an_interrupt_does_not_wait_for_kernels_that_run() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    try:
        signal.alarm(3)
        with pytest.raises(KeyboardInterrupt):
            list(side_by_side(passes, [task(n, Hangs) for n in range(2)], 2))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("pool", ["side_by_side({}, 2)", "under_limit({}, 600)"])
def test_a_killed_verification_takes_its_workers_with_it(pool: str, tmp_path: Path) -> None:
    """SIGKILL: workers that wait, or are in the middle of a kernel, do not go on."""
    code = (
        "from tests.unit.test_verify_pool import *\n"
        "if __name__ == '__main__':\n"
        f"    list({pool.format('passes, [task(n, Records) for n in range(2)]')})\n"
    )
    script = tmp_path / "verification.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PIDS": str(tmp_path)}
    verification = subprocess.Popen([sys.executable, str(script)], env=env)
    end = time.monotonic() + 60
    wanted = 2 if "side" in pool else 1
    while len(pids := [int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()]) < wanted:
        assert verification.poll() is None and time.monotonic() < end, "workers start"
        time.sleep(0.05)
    verification.kill()
    verification.wait()
    end = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "workers outlive the verification"


def test_r12_a_kernel_that_hangs_fails_and_the_others_are_verified() -> None:
    """R12: a GPU that never answers is a verdict within the limit."""
    tasks = [task(0), task(1, Hangs), task(2)]
    start = time.monotonic()
    first, hung, last = under_limit(passes, tasks, 5)
    assert 5 <= time.monotonic() - start < 60
    assert first == passes(task(0)) and last == passes(task(2))
    assert not hung.passed and hung.id == "kernel1" and hung.ptx_sha256 == "p" * 64
    assert hung.problems == (
        "time limit: not done after 5 s: it hangs, or needs a longer --time-limit; its process was ended",
    )


def test_r12_what_a_worker_refuses_is_raised_here() -> None:
    with pytest.raises(BundleError, match="no bundle: not a folder"):
        list(under_limit(refuses, [task(0)], 60))
