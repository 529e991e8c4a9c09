"""Runs the compiling child process for one kernel, sorts its failures, and gates its results."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .. import elf
from ..errors import BundleError, CompileError, ToolchainError
from ..manifest import Resources
from . import gates, linemap, toolchain
from .child import ANSI, FOLDER_PREFIX
from .code import code_digest

DEFAULT_TIME_LIMIT_S = 600.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_DROPPED = ("CUTE_DSL_", "CUTLASS_", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "PYTHON")  # prefixes
_KEPT = ("PYTHONHOME",)


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel to compile; plain data, so that any executor can carry it.

    id: names the kernel in errors. source: rendered module text. tmem_cols: what the plan allocates, for the record.
    log_dir: folder that keeps the log and the source of a failed kernel. code: `code_digest()` of whoever made the job.
    """

    id: str
    source: str
    expected: gates.Expected
    tmem_cols: int
    log_dir: str
    code: str
    time_limit_s: float = DEFAULT_TIME_LIMIT_S


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What ships for one kernel. cuda: toolkit of the DSL's libraries. seconds: wall time, not part of any output."""

    cubin: bytes
    ptx: bytes
    line_map: bytes
    resources: Resources
    cuda: str
    ptxas: str
    seconds: float


def compile_kernel(job: CompileJob) -> CompiledKernel:
    """Compile one kernel.

    Raises CompileError naming the kernel, the cause in one line, and the full log; ToolchainError when the compiler
    stack is missing or is not the pinned one.
    """
    toolchain.identity()
    _check_code(job, "before")
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
            work = Path(folder)
            result = _run_child(job, work)
            _check_code(job, "while")
            return _gate(job, work, result, time.perf_counter() - start)
    except OSError as e:
        raise CompileError(
            f"{job.id}: {e.strerror or e} ({e.filename or tempfile.gettempdir()}); compiling needs a folder to write, "
            f"with some MiB free: free some space, or set TMPDIR"
        ) from None


def _check_code(job: CompileJob, when: str) -> None:
    """The child imports helpers from disk: they must be those that the job's build digest stands for."""
    if code_digest() != job.code:
        raise CompileError(
            f"{job.id}: fmha_gen/device or /compiler changed {when} it was compiled, or differs on this worker; "
            "build again with files that stay as they are"
        )


def _run_child(job: CompileJob, work: Path) -> dict[str, str]:
    source = work / linemap.SOURCE_NAME
    source.write_text(job.source)
    request = {"source": str(source), "arch": job.expected.arch, "dsl": toolchain.DSL_VERSION}
    (work / "job.json").write_text(json.dumps(request | {"cuda_major": toolchain.CUDA_MAJOR}))
    command = [sys.executable, "-P", "-m", "fmha_gen.compiler.child", "job.json"]
    with open(work / "log.txt", "wb") as log:
        child = subprocess.Popen(
            command,
            cwd=work,
            env=_child_env(work),
            stdin=subprocess.PIPE,  # never written to: it closes with this process, however that ends
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        _running.add(child)
        try:
            code = child.wait(timeout=job.time_limit_s)
        except subprocess.TimeoutExpired:
            limit = f"{job.time_limit_s:g} s"
            raise _failure(job, work, f"took longer than its limit of {limit}; raise the limit or lower -j") from None
        finally:
            _running.discard(child)
            if child.poll() is None:
                _kill(child)
                child.wait()
            assert child.stdin is not None
            child.stdin.close()
    return _child_result(job, work, code)


_running: set[subprocess.Popen[bytes]] = set()


def kill_running() -> None:
    """End the compiler processes that this process started; their `compile_kernel` calls raise CompileError."""
    for child in list(_running):
        _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _child_result(job: CompileJob, work: Path, code: int) -> dict[str, str]:
    """The child's result, or the error that its end means."""
    try:
        result: dict[str, str] = json.loads((work / "result.json").read_text())
    except (OSError, ValueError):
        raise _failure(job, work, _explain_exit(code)) from None
    if result["ok"]:
        return result
    if result["kind"] == "toolchain":
        raise ToolchainError(f"toolchain: {result['message']}; {toolchain.INSTALL_HINT}")
    raise _failure(job, work, result["message"])


def _explain_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the compiler process was killed (SIGKILL), which is what running out of memory looks like; lower -j"
    if code < 0:
        return f"the compiler process died of {signal.Signals(-code).name}"
    return f"the compiler process ended with code {code} and no result"


def _failure(job: CompileJob, work: Path, why: str) -> CompileError:
    """A CompileError whose log and source outlive the working folder."""
    logs = Path(job.log_dir)
    try:
        logs.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(work / linemap.SOURCE_NAME, logs / f"{job.id}.py")
        log = logs / f"{job.id}.log"
        text = (work / "log.txt").read_text(errors="replace")
        log.write_text(f"{ANSI.sub('', text)}\n{why}\n")
        where = f"full log: {log}"
    except OSError as e:
        where = f"the log could not be kept: {e.strerror}: {logs}"
    return CompileError(f"{job.id}: {why}; {where}")


def _gate(job: CompileJob, work: Path, result: dict[str, str], seconds: float) -> CompiledKernel:
    cubin_path, want = work / "plain.cubin", job.expected
    cubin, ptx = cubin_path.read_bytes(), (work / "plain.ptx").read_text()
    try:
        info = elf.read_cubin(cubin, f"{job.id}.cubin")
        line_map = linemap.build(ptx, (work / "lines.ptx").read_text(), str(work / linemap.SOURCE_NAME))
    except BundleError as e:
        raise _failure(job, work, str(e)) from None
    except ValueError as e:
        raise _failure(job, work, f"the PTX with line information is not the plain PTX: {e}") from None
    kernel, problems = gates.check_elf(info, want)
    spill_ops, more = gates.check_machine_code(cubin_path, ptx)
    outputs = {"cubin": cubin, "ptx": ptx.encode(), "line_map": line_map.to_json().encode()}
    private = (str(work), str(_PACKAGE_ROOT), sys.prefix)
    problems += [*more, *gates.check_no_paths(outputs, tuple(p for p in private if len(p) > 1))]
    if problems or kernel is None:
        raise _failure(job, work, "; ".join(problems))
    resources = Resources(
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        spill_ops=spill_ops,
        static_smem_bytes=kernel.static_smem_bytes,
        tmem_cols=job.tmem_cols,
        code_bytes=kernel.code_bytes,
    )
    return CompiledKernel(
        **outputs, resources=resources, cuda=result["cuda"], ptxas=info.ptxas or "unknown", seconds=seconds
    )


def _child_env(work: Path) -> dict[str, str]:
    """The parent's environment without what steers the DSL, CUDA or Python."""
    env = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_DROPPED)}
    paths = [str(_PACKAGE_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"CUTE_DSL_CACHE_DIR": str(work), "TMPDIR": str(work), "NO_COLOR": "1"}
    return env
