"""The process that compiles one kernel: ``python -m fmha_gen.compiler.child JOB.json`` in a folder of its own.

The DSL keeps process-wide state, crashes when threads compile side by side, and names the files that it dumps after
the host function: two kernels that share a dump folder get each other's code without an error. Hence one process and
one folder for each kernel.

Reads ``{"source", "arch", "dsl", "cuda_major"}``; writes ``plain.cubin``, ``plain.ptx``, ``lines.ptx`` and
``result.json`` beside the job: ``{"ok": true, "symbols": [...], "cuda": "13.4"}`` or
``{"ok": false, "kind": "toolchain" | "compile", "message": ...}``. Everything else goes to stdout and stderr. When its
standard input closes, the build is gone (SIGKILL lets it end nothing), and the process ends itself and its folder.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER_PREFIX = "fmha-gen-"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
_OTHER = re.compile(r"(suggestion|note|hint|warning)\b.*:")  # a message that follows an error's own text


class _WrongToolchain(Exception):
    pass


def main(job_path: str) -> int:
    """Compile the job and write its result; 0 when it worked."""
    job: dict[str, Any] = json.loads(Path(job_path).read_text())
    threading.Thread(target=_end_with_build, args=(Path(job_path).resolve().parent,), daemon=True).start()
    try:
        result = _compile(job)
    except _WrongToolchain as e:
        result = {"ok": False, "kind": "toolchain", "message": str(e)}
    except Exception as e:  # whatever a rendered source or the DSL raises is this kernel's failure
        traceback.print_exc()
        result = {"ok": False, "kind": "compile", "message": summarize(e)}
    Path("result.json").write_text(json.dumps(result))
    return 0 if result["ok"] else 1


def _end_with_build(work: Path) -> None:
    os.read(0, 1)
    if work.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(work, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    cutlass, cuda = _import_dsl(job["dsl"], job["cuda_major"])
    import cutlass.cute as cute

    _locate_at_callers()
    module = _load(job["source"])
    for name in ("host_entry", "trace_arguments", "KERNEL_NAME"):
        if not hasattr(module, name):
            raise AttributeError(f"the rendered source has no {name}")
    options = f"--gpu-arch {job['arch']} --keep-cubin --keep-ptx --dump-dir"
    Path("dump-plain").mkdir()
    Path("dump-lines").mkdir()
    plain = cute.compile(module.host_entry, *module.trace_arguments(), options=f"{options} dump-plain")
    if plain.total_added_arguments:
        raise RuntimeError(f"the DSL added {plain.total_added_arguments} hidden kernel arguments; the ABI has none")
    lines = cute.compile(
        module.host_entry, *module.trace_arguments(), options=f"{options} dump-lines --generate-line-info"
    )
    Path("plain.cubin").write_bytes(plain.__cubin__)
    Path("plain.ptx").write_text(plain.__ptx__.rstrip("\0"))
    Path("lines.ptx").write_text(lines.__ptx__.rstrip("\0"))
    return {"ok": True, "symbols": list(plain.kernel_info), "cuda": cuda}


def _import_dsl(version: str, cuda_major: int) -> tuple[ModuleType, str]:
    """(cutlass, its CUDA version). Raises _WrongToolchain unless both are the pinned ones."""
    try:
        with _hidden_driver():
            import cutlass
    except ImportError as e:
        raise _WrongToolchain(f"the CuTe-DSL cannot be imported: {summarize(e)}") from e
    except RuntimeError as e:  # an incomplete installation says so this way
        raise _WrongToolchain(f"the CuTe-DSL is not whole: {summarize(e)}") from e
    if cutlass.__version__ != version:
        raise _WrongToolchain(f"nvidia-cutlass-dsl is {cutlass.__version__}, pinned is {version}")
    cuda = cutlass.CUDA_VERSION
    if cuda.major != cuda_major:
        raise _WrongToolchain(f"the DSL loaded its CUDA {cuda.major} libraries, pinned is CUDA {cuda_major}")
    return cutlass, f"{cuda.major}.{cuda.minor}"


def _locate_at_callers() -> None:
    """Line information names the rendered source, not the helper that wrapped an instruction: it is the kernel's line
    that tells one of twenty waits from another. Raises AttributeError if the DSL no longer has this list."""
    from cutlass._mlir_helpers import op

    op._FRAMEWORK_MODULE_PREFIXES = (*op._FRAMEWORK_MODULE_PREFIXES, "fmha_gen.device")


class _hidden_driver:
    """While the DSL is imported, no CUDA driver is found: it would choose its CUDA 12 or 13 libraries by that driver,
    and so give other bytes on another machine. Without one it takes the newest."""

    def __enter__(self) -> None:
        self._cdll = ctypes.CDLL

        def without_driver(name: Any, *args: Any, **kwargs: Any) -> ctypes.CDLL:
            if isinstance(name, str) and "libcuda.so" in name:
                raise OSError(f"{name}: hidden while the DSL chooses its libraries")
            return self._cdll(name, *args, **kwargs)

        ctypes.CDLL = without_driver  # type: ignore[assignment, misc]

    def __exit__(self, *_: object) -> None:
        ctypes.CDLL = self._cdll  # type: ignore[misc]


def _load(source: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rendered_kernel", source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rendered_kernel"] = module
    spec.loader.exec_module(module)
    return module


def summarize(error: BaseException) -> str:
    """One line that says what went wrong: the last message that calls itself an error, which is the innermost."""
    lines = [t for line in ANSI.sub("", str(error)).splitlines() if (t := " ".join(line.split()))]
    if not lines:
        return type(error).__name__
    start = max((n for n, line in enumerate(lines) if "error:" in line), default=0)
    end = next((n for n in range(start + 1, len(lines)) if _OTHER.match(lines[n])), len(lines))
    text = " ".join(lines[start:end] if "error:" in lines[start] else lines[:1])
    return f"{type(error).__name__}: {text}"[:400]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
