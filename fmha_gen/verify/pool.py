"""Where verification runs: side by side in the simulator; on a GPU in one process that a hanging kernel cannot outlive.

The simulator stops a kernel that hangs by itself. A GPU does not: whoever waits for it waits for ever. So a worker
process waits there, and a kernel that takes longer than its limit costs that process, not the verification.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from ..errors import FmhaGenError, VerifyError
from .kernel import CaseVerdict, KernelVerdict


@dataclass(frozen=True)
class Task:
    """One kernel to verify, as plain data for a worker process. ptx_sha256, cubin_sha256: of its files."""

    bundle: str
    kernel: str
    driver: str
    quick: bool
    seeds: int | None
    ptx_sha256: str
    cubin_sha256: str


Verify = Callable[[Task], KernelVerdict]


def side_by_side(verify: Verify, tasks: Sequence[Task], jobs: int | None) -> Iterator[KernelVerdict]:
    """Verdicts as they come, from a pool of fresh processes; one task or one job runs here.

    Raises VerifyError when a worker dies.
    """
    workers = min(len(tasks), jobs or _cores())
    if workers == 1:
        yield from (verify(task) for task in tasks)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with_parent)
    try:
        futures = {pool.submit(verify, task): task for task in tasks}
        for future in as_completed(futures):
            try:
                verdict = future.result()
            except BrokenProcessPool as e:
                raise VerifyError(
                    f"{futures[future].kernel}: a worker process died, perhaps for want of memory ({e}); try --jobs 1"
                ) from e
            yield verdict
    except BaseException:  # an interrupt does not wait for kernels that have minutes to go
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def under_limit(verify: Verify, tasks: Sequence[Task], limit_s: float) -> Iterator[KernelVerdict]:
    """Verdicts in order, from a worker process. A kernel that takes longer than `limit_s` has failed, and the next one
    gets a new process.

    Raises VerifyError when the worker dies, and what `verify` raises.
    """
    worker = None
    try:
        for task in tasks:
            worker = worker or _Worker(verify)
            verdict = worker.ask(task, limit_s)
            if verdict is None:
                worker.stop()
                worker = None
                verdict = _hung(task, limit_s)
            yield verdict
    finally:
        if worker is not None:
            worker.stop()


def _hung(task: Task, limit_s: float) -> KernelVerdict:
    problem = f"not done after {limit_s:g} s: it hangs, or needs a longer --time-limit; its process was ended"
    case = CaseVerdict("time limit", (), 0.0, (problem,))
    return KernelVerdict(task.kernel, task.ptx_sha256, task.cubin_sha256, (case,), limit_s)


class _Worker:
    """A process that verifies one kernel after the other."""

    def __init__(self, verify: Verify) -> None:
        context = multiprocessing.get_context("spawn")
        self.here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(verify, there), daemon=True)
        self.process.start()
        there.close()

    def ask(self, task: Task, limit_s: float) -> KernelVerdict | None:
        """The verdict, or None if there is none within `limit_s`."""
        try:
            self.here.send(task)
            if not self.here.poll(limit_s):
                return None
            answer = self.here.recv()
        except (EOFError, OSError) as e:
            self.process.join()
            raise VerifyError(
                f"{task.kernel}: its worker process died (exit code {self.process.exitcode}, {type(e).__name__}); "
                f"fmha-gen run with --variant shows what the driver says"
            ) from e
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process, whatever it waits for."""
        self.here.close()
        self.process.kill()
        self.process.join()


def _serve(verify: Verify, connection: Connection) -> None:
    """The worker's side."""
    _end_with_parent()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            sys.exit(0)
        try:
            connection.send(verify(task))
        except FmhaGenError as e:
            connection.send(e)


def _end_with_parent() -> None:
    """In a worker: end when the verification does, even by SIGKILL, which lets nobody tell the workers.

    A pool's workers wait for tasks on a pipe that they hold open themselves, and one that waits for a GPU reads none.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
