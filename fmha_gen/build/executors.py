"""Where compilations run: in local child processes, or on the workers of a dask.distributed cluster.

The task is the same pure, picklable function either way (`fmha_gen.compiler.compile_kernel`); a worker needs the build
installation of the same fmha_gen, which the task checks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import Executor

from ..errors import ToolchainError

CONNECT_TIMEOUT_S = 10


@contextlib.contextmanager
def open_executor(address: str | None) -> Iterator[Executor | None]:
    """The executor that `address` names: None is the local pool, ``dask://HOST:PORT`` a scheduler.

    Raises ToolchainError for another spelling, when dask.distributed is not installed, or when nobody answers.
    """
    if address is None:
        yield None
        return
    match = re.fullmatch(r"dask://([^/:]+|\[[0-9a-fA-F:]+\]):(\d+)", address)
    if match is None:
        raise ToolchainError(f"executor {address!r}: not of the form dask://HOST:PORT; leave it out to compile here")
    try:
        from distributed import Client
    except ImportError:
        raise ToolchainError(
            f"executor {address}: the package distributed is not installed; pip install distributed"
        ) from None
    try:
        client = Client(f"tcp://{match[1]}:{match[2]}", timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except OSError as e:
        raise ToolchainError(
            f"executor {address}: no scheduler answers within {CONNECT_TIMEOUT_S} s ({e}); start one: dask scheduler"
        ) from None
    with client, client.get_executor(pure=False) as executor:
        yield executor
