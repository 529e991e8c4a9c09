"""Workers of `verify` that die are reported, and never taken for kernels that passed."""

from __future__ import annotations

import os

import pytest

from fmha_gen.errors import VerifyError
from fmha_gen.verify import Task, _run_all


class Killer(Task):
    """A task that ends its worker process when it arrives there, as the system does when memory runs out."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


def test_a_dead_worker_is_an_error_by_name() -> None:
    tasks = [Killer("no bundle", f"kernel{n}", "sim", True, None) for n in range(2)]
    with pytest.raises(VerifyError, match=r"kernel\d: a worker process died"):
        list(_run_all(tasks, 2))
