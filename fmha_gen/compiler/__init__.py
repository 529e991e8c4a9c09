"""Rendered source -> cubin, PTX, resources and line map; no GPU and no driver needed.

`compile_kernel(job)` is a pure function of its job: same job and toolchain, same bytes, in any process, folder or user.
Each call starts one child process with a folder of its own (see `child` for why) and gates what comes back.
"""

from __future__ import annotations

from .code import code_digest
from .linemap import SOURCE_NAME, LineMap
from .run import CompiledKernel, CompileJob, compile_kernel, kill_running
from .toolchain import CUDA_MAJOR, DSL_VERSION, MIN_DRIVER, identity

__all__ = [
    "CUDA_MAJOR",
    "DSL_VERSION",
    "MIN_DRIVER",
    "SOURCE_NAME",
    "CompileJob",
    "CompiledKernel",
    "LineMap",
    "code_digest",
    "compile_kernel",
    "identity",
    "kill_running",
]
