"""One attention problem from an ``.npz`` file through a bundle: what ``fmha-gen run`` does.

Inputs ``q k v`` are float arrays (batch, seqlen, num_heads, head_dim), rounded to the kernel's dtype; ``out`` and
``lse`` are written as float32, ``lse`` unless the kernels asked for were built without it. The launcher is the one that
serving uses; only the driver differs.
"""

from __future__ import annotations

import os
import time
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import output_file
from .built import built_features
from .errors import DriverError, FileError, FmhaGenError, ProblemError, SelectionError
from .manifest import Manifest
from .reference import from_bits, to_bits
from .runtime import Bundle, PreparedLaunch, TensorArg
from .runtime.cuda import CudaDriver
from .runtime.cuda_memory import DeviceMemory
from .runtime.driver import ARCH_CAPABILITY
from .runtime.select import matching

REQUIRED = ("q", "k", "v")
# optional arrays -> the feature that a kernel must have been built with
OPTIONAL = {
    "cu_seqlens_q": "varlen", "cu_seqlens_k": "varlen", "seqused_k": "varlen", "page_table": "paged_kv", "sink": "sink",
}  # fmt: skip
_NOT_BUILT = "this fmha-gen builds no such kernels yet; leave it out"
Array = NDArray[Any]


@dataclass(frozen=True)
class RunOptions:
    """Options of one run; the fields are those of the command line.

    driver: ``auto sim cuda``. dtype: None takes bf16 where the bundle has it. window: (left, right), None unbounded.
    sms: multiprocessors that the grid is laid out for. seed: of the simulator's scheduler.
    """

    driver: str = "auto"
    dtype: str | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    num_splits: int | None = None
    variant: str | None = None
    seed: int = 0
    sms: int | None = None


@dataclass(frozen=True)
class RunResult:
    """What came out. out: float32 (batch, seqlen_q, num_heads_q, head_dim_v); lse: float32 (batch, heads, seqlen_q), or
    None of a kernel that was built without it.

    out_bits: the kernel's own 16-bit words. grid: None where nothing was launched. counters: the simulator's executed
    instructions by role and loop, None on a GPU. seconds: of the launch alone, to its end.
    """

    out: Array
    lse: Array | None
    out_bits: NDArray[np.uint16]
    kernel: str
    driver: str
    device: str
    dtype: str
    grid: tuple[int, int, int] | None
    seconds: float
    counters: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """The keys of ``fmha-gen run --json``."""
        return {
            "kernel": self.kernel, "driver": self.driver, "device": self.device, "dtype": self.dtype,
            "grid": None if self.grid is None else list(self.grid), "seconds": round(self.seconds, 6),
            "out_shape": list(self.out.shape), "lse_shape": None if self.lse is None else list(self.lse.shape),
            "counters": self.counters, "warnings": self.warnings,
        }  # fmt: skip


class Executor(Protocol):
    """Where a problem's arrays live and its kernels run."""

    name: str
    bundle: Bundle

    def run(self, arrays: dict[str, Array], dtype: str, options: RunOptions) -> RunResult:
        """Launch on 16-bit q, k, v and return what came out."""


def run_npz(bundle: str | os.PathLike[str], input: str, output: str, options: RunOptions) -> RunResult:
    """Read `input`, run the problem, write `output` (atomically) with ``out`` and, where the kernel gives it, ``lse``.

    Raises FileError for files that the system does not open, ProblemError for what is in them,
    SelectionError when no kernel serves it, DriverError, SimError.
    """
    arrays = read_npz(input)
    check_output(output)
    result = run_arrays(bundle, arrays, options)
    write_npz(output, {"out": result.out} | ({} if result.lse is None else {"lse": result.lse}))
    return result


def run_arrays(bundle: str | os.PathLike[str], arrays: dict[str, Array], options: RunOptions) -> RunResult:
    """`run_npz` without files: `arrays` holds ``q k v`` (float, BSHD) and the optional arrays."""
    executor = open_executor(bundle, options)
    manifest = executor.bundle.manifest
    check_features(manifest, arrays, options)
    dtype = options.dtype or default_dtype(manifest)
    return executor.run({name: arrays[name] for name in REQUIRED}, dtype, options)


def open_executor(bundle: str | os.PathLike[str], options: RunOptions) -> Executor:
    """Where ``--driver`` says; ``auto`` takes a GPU that runs the bundle's kernels, else the simulator."""
    if options.driver not in ("auto", "sim", "cuda"):
        raise ProblemError(f"driver: {options.driver!r}; it is one of auto, sim, cuda")
    if options.driver == "sim":
        return open_simulator(bundle, options)
    driver = CudaDriver()
    cuda = CudaExecutor(Bundle.open(bundle, driver), driver)
    if options.driver == "cuda" or cuda.usable(options.variant):
        return cuda
    return open_simulator(bundle, options)


def open_simulator(bundle: str | os.PathLike[str], options: RunOptions) -> Executor:
    """Kernels of this bundle in the simulator."""
    from .sim.driver import SimDriver  # numba and the simulator load only when asked for

    driver = SimDriver(num_sms=options.sms, seed=options.seed)
    return SimExecutor(Bundle.open(bundle, driver), driver)


@dataclass
class CudaExecutor:
    """Runs on CUDA device 0."""

    bundle: Bundle
    driver: CudaDriver
    name: str = "cuda"

    def usable(self, variant: str | None) -> bool:
        """Whether a device runs a kernel of the bundle. No driver or no device is an answer, not an error."""
        try:
            device = self.driver.device(0)
        except DriverError:
            return False
        entries = matching(self.bundle.kernels, variant)
        return any(ARCH_CAPABILITY.get(e.arch) == device.compute_capability for e in entries)

    def run(self, arrays: dict[str, Array], dtype: str, options: RunOptions) -> RunResult:
        driver = self.driver
        with DeviceMemory(driver, driver.device(0)) as memory:
            host = with_outputs(arrays, dtype, gives_lse(self.bundle.manifest, options.variant))
            tensors = {
                name: TensorArg.contiguous(memory.upload(a.tobytes(), name), a.shape, _dtype_of(a, dtype), 0)
                for name, a in host.items()
            }
            prepared = prepare(self.bundle, tensors, options)
            start = time.perf_counter()
            prepared(0)
            memory.synchronize(f"{prepared.kernel}: run")
            seconds = time.perf_counter() - start
            for name in {"out", "lse"} & set(host):
                data = bytearray(host[name].nbytes)
                memory.download(tensors[name].address, data, name)
                host[name] = np.frombuffer(data, host[name].dtype).reshape(host[name].shape)
        return _result(self, host, prepared, dtype, seconds)


@dataclass
class SimExecutor:
    """Runs in the simulator."""

    bundle: Bundle
    driver: Any
    name: str = "sim"

    def run(self, arrays: dict[str, Array], dtype: str, options: RunOptions) -> RunResult:
        host = with_outputs(arrays, dtype, gives_lse(self.bundle.manifest, options.variant))
        tensors = {name: self.driver.place(name, a, _dtype_of(a, dtype)) for name, a in host.items()}
        prepared = prepare(self.bundle, tensors, options)
        start = time.perf_counter()
        prepared(0)
        seconds = time.perf_counter() - start
        result = _result(self, host, prepared, dtype, seconds)
        last = self.driver.last_result
        if last is not None:
            from .sim.driver import counters

            warnings = [*result.warnings, *(str(f) for f in last.findings)]
            result = replace(result, counters=counters(last), warnings=warnings)
        return result


def prepare(bundle: Bundle, tensors: dict[str, TensorArg], options: RunOptions) -> PreparedLaunch:
    """The launch that `options` describe."""
    return bundle.prepare(
        tensors["q"], tensors["k"], tensors["v"], tensors["out"], lse=tensors.get("lse"), causal=options.causal,
        window=options.window, softmax_scale=options.scale, softcap=options.softcap, variant=options.variant,
        num_sms=options.sms,
    )  # fmt: skip


def gives_lse(manifest: Manifest, variant: str | None) -> bool:
    """Whether to ask for the log-sum-exp: unless every kernel that may be taken was built without it."""
    entries = matching(manifest.kernels, variant)
    return not entries or any(e.serves.lse for e in entries)


def with_outputs(arrays: dict[str, Array], dtype: str, lse: bool = True) -> dict[str, Array]:
    """q, k, v as bit patterns of `dtype`, beside out and (with `lse`) lse to be written, filled with NaN."""
    bits = {name: np.ascontiguousarray(to_bits(a, dtype)) for name, a in arrays.items()}
    for name, a in bits.items():
        if a.ndim != 4:
            raise ProblemError(f"{name}: shape {a.shape}; wanted (batch, seqlen, num_heads, head_dim)")
    batch, seqlen_q, heads, _ = bits["q"].shape
    bits["out"] = np.full((batch, seqlen_q, heads, bits["v"].shape[3]), 0x7FFF, np.uint16)
    return {**bits, **({"lse": np.full((batch, heads, seqlen_q), np.nan, np.float32)} if lse else {})}


def _dtype_of(array: Array, dtype: str) -> str:
    return "float32" if array.dtype == np.float32 else dtype


def _result(
    executor: Executor, host: dict[str, Array], prepared: PreparedLaunch, dtype: str, seconds: float
) -> RunResult:
    warnings = [] if "lse" in host else [f"lse: {prepared.kernel} was built without it; the output has no array lse"]
    return RunResult(
        out=from_bits(host["out"], dtype), lse=host.get("lse"), out_bits=host["out"], kernel=prepared.kernel,
        driver=executor.name, device=prepared.device.name, dtype=dtype,
        grid=prepared.packed.grid if prepared.packed else None, seconds=seconds, warnings=warnings,
    )  # fmt: skip


def default_dtype(manifest: Manifest) -> str:
    """bf16 where the bundle has it, else fp16."""
    dtypes = {e.serves.dtype for e in manifest.kernels}
    return "bf16" if "bf16" in dtypes or not dtypes else sorted(dtypes)[0]


def check_features(manifest: Manifest, arrays: dict[str, Array], options: RunOptions) -> None:
    """Refuse arrays and options that need kernels which the bundle does not have, naming the spec field."""
    wanted = {name: feature for name, feature in OPTIONAL.items() if name in arrays}
    if options.num_splits is not None:
        if options.num_splits < 1:
            raise ProblemError(f"num_splits: {options.num_splits}; it must be >= 1")
        if options.num_splits > 1:
            wanted["num_splits"] = "split_kv"
    built = {feature for e in manifest.kernels for feature in e.serves.features}
    for name, feature in wanted.items():
        if feature not in built:
            can = feature in built_features()
            raise SelectionError(
                f"{name}: no kernel of bundle {manifest.name} {manifest.version} was built with {feature}; "
                + (f"add `{feature}: true` to a kernel of the spec and build again" if can else _NOT_BUILT)
            )
        raise ProblemError(f"{name}: this fmha-gen cannot launch {feature} kernels yet; install a newer one")


def read_npz(path: str) -> dict[str, Array]:
    """Arrays of an ``.npz`` file. Raises FileError: it cannot be opened; ProblemError: no such archive, or an array
    missing, unknown or of another type."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("it holds one array, .npy")
        with file:
            arrays = {name: file[name] for name in file.files}
    except OSError as e:
        raise FileError(f"{path}: cannot be read ({e.strerror or e}); check the path and its permissions") from None
    except MemoryError:
        raise ProblemError(f"{path}: its arrays need more memory than there is; check their shapes") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as e:
        raise ProblemError(f"{path}: cannot be read as .npz ({_why(e)}); write it with numpy.savez") from None
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        held = ", ".join(arrays) or "nothing"
        raise ProblemError(f"{path}: {', '.join(missing)}: not in the file, which holds {held}; q, k and v are needed")
    unknown = sorted(set(arrays) - set(REQUIRED) - set(OPTIONAL))
    if unknown:
        raise ProblemError(f"{path}: {unknown[0]}: unknown array; known are {', '.join((*REQUIRED, *OPTIONAL))}")
    for name in REQUIRED:
        if arrays[name].dtype.kind != "f":
            raise ProblemError(
                f"{path}: {name}: dtype {arrays[name].dtype}; wanted float16, float32 or float64; convert it"
            )
        if arrays[name].ndim != 4:
            raise ProblemError(f"{path}: {name}: shape {arrays[name].shape}; wanted (batch, seqlen, heads, head_dim)")
    return arrays


def _why(error: Exception) -> str:
    """An error of numpy's reader without its advice to unpickle what it does not know."""
    if "allow_pickle" in str(error):
        return "it holds Python objects" if "Object arrays" in str(error) else "it is neither .npz nor .npy"
    return str(error)


def write_npz(path: str, arrays: dict[str, Array]) -> None:
    """Write an ``.npz`` file whole or not at all. Raises FileError when it cannot be written."""
    try:
        output_file.write_output(Path(path), lambda file: np.savez(file, allow_pickle=False, **arrays))
    except OSError as e:
        raise _not_writable(path, e) from None


def check_output(path: str) -> None:
    """Raise FileError, before the work, when no file can be written to `path`."""
    try:
        output_file.check_output(Path(path))
    except OSError as e:
        raise _not_writable(path, e) from None


def _not_writable(path: str, e: OSError) -> FileError:
    return FileError(f"{path}: cannot be written ({e.strerror}); choose a file in a folder of yours that exists")


__all__ = ["FmhaGenError", "RunOptions", "RunResult", "run_arrays", "run_npz"]
