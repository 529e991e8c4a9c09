"""The real compiler on a small kernel: what comes out, that it is the same everywhere, and that every gate closes."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from fmha_gen import elf
from fmha_gen.arch import ARCHS
from fmha_gen.compiler import CompiledKernel, CompileJob, LineMap, code_digest, compile_kernel, kill_running, toolchain
from fmha_gen.compiler import run as compiler_run
from fmha_gen.compiler.child import _hidden_driver
from fmha_gen.compiler.gates import Expected
from fmha_gen.errors import CompileError, ToolchainError
from tests.nvidia_tools import find_cuobjdump

pytestmark = pytest.mark.compile
pytest.importorskip("cutlass", reason="the CuTe-DSL is not installed")

SOURCE = (Path(__file__).parent / "fixture_kernel.py").read_text()
_SIZES = {"tma": 128, "lse": 8, "i64": 8, "i32": 4}
_KINDS = ["tma"] * 4 + ["lse"] + ["i64"] * 3 + ["i32"] * 6


def _params() -> tuple[tuple[str, int, int], ...]:
    out, at = [], 0
    for i, kind in enumerate(_KINDS):
        out.append((f"{kind}{i}", at, _SIZES[kind]))
        at += _SIZES[kind]
    return tuple(out)


EXPECTED = Expected("sm_100a", "fixture_sm100a_bf16_0", _params(), 512, 128)


def make_job(tmp_path: Path, source: str = SOURCE, time_limit_s: float = 120.0, **expected) -> CompileJob:
    want = dataclasses.replace(EXPECTED, **expected)
    return CompileJob("fixture", source, want, 0, str(tmp_path / "failed logs"), code_digest(), time_limit_s)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledKernel:
    return compile_kernel(make_job(tmp_path_factory.mktemp("fixture")))


def refuse(job: CompileJob) -> str:
    with pytest.raises(CompileError) as e:
        compile_kernel(job)
    return str(e.value)


def edited(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


def test_outputs(compiled: CompiledKernel):
    cubin = elf.read_cubin(compiled.cubin, "fixture")
    assert (cubin.arch, cubin.ptxas, compiled.cuda) == ("sm_100a", compiled.ptxas, "13.4")
    ptx = compiled.ptx.decode("ascii")
    assert ".target sm_100a" in ptx and ".entry fixture_sm100a_bf16_0(" in ptx and "\0" not in ptx
    assert not re.search(r"^\s*\.(loc|file)\b", ptx, re.MULTILINE)
    r = compiled.resources
    assert (r.registers, r.stack_bytes, r.spill_ops, r.static_smem_bytes) == (128, 0, 0, 0)
    assert r.code_bytes == cubin.kernels[0].code_bytes > 0


def test_line_map_leads_to_the_source(compiled: CompiledKernel):
    lines = LineMap.from_json(compiled.line_map)
    ptx, source = compiled.ptx.decode().splitlines(), SOURCE.splitlines()
    for instruction, text in (
        ("setmaxnreg.dec", "setmaxregister_decrease"),
        ("setmaxnreg.inc", "setmaxregister_increase"),
        ("cp.async.bulk.tensor", "cp_async_bulk_tensor"),
        ("mbarrier.init", "mbarrier_init(full_mbar"),
        ("ex2.approx", "cute.arch.exp2("),
    ):
        (number,) = (n for n, line in enumerate(ptx, 1) if instruction in line and "fence" not in line)
        place = lines.lookup(number)
        assert place is not None and place[0] == "kernel.py"
        assert text in source[place[1] - 1]
    assert lines.lookup(1) is None


def test_elf_reader_agrees_with_cuobjdump(compiled: CompiledKernel, tmp_path: Path):
    tool = find_cuobjdump()
    path = tmp_path / "k.cubin"
    path.write_bytes(compiled.cubin)
    kernel = elf.read_cubin(compiled.cubin, "k").kernels[0]
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    reg, stack, shared = (int(re.search(rf"{k}:(\d+)", usage)[1]) for k in ("REG", "STACK", "SHARED"))
    assert (kernel.registers, kernel.stack_bytes) == (reg, stack)
    assert kernel.static_smem_bytes + elf.RESERVED_SMEM_BYTES == shared
    dump = subprocess.run([tool, "-elf", path], capture_output=True, text=True, check=True).stdout
    table = re.findall(r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)", dump)
    told = {tuple(int(x, 16) for x in row) for row in table}
    assert {(p.index, p.offset, p.size) for p in kernel.params} == told and len(told) == len(_KINDS)


def test_same_bytes_in_any_surroundings(compiled: CompiledKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A16, A19: another hash seed, home, temporary folder with spaces, a stray CUDA_HOME, leftover DSL settings."""
    odd = tmp_path / "tmp dir (1)"
    odd.mkdir()
    monkeypatch.chdir(odd)
    monkeypatch.setattr("tempfile.tempdir", str(odd))
    for name, value in {
        "PYTHONHASHSEED": "12345",
        "HOME": str(odd),
        "CUDA_HOME": ":/usr/local/cuda",
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_KEEP": "ptx",
    }.items():
        monkeypatch.setenv(name, value)
    again = compile_kernel(make_job(tmp_path))
    assert (again.cubin, again.ptx, again.line_map) == (compiled.cubin, compiled.ptx, compiled.line_map)
    assert list(odd.iterdir()) == []


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_other_architectures(tmp_path: Path, arch: str):
    """A02: the name given is the name built; offsets follow each architecture's parameter base, as the plan's do."""
    base = at = ARCHS[arch].param_base_bytes
    params = []
    for i, kind in enumerate(_KINDS):
        align = 64 if kind == "tma" else _SIZES[kind]
        at = -(-at // align) * align
        params.append((f"{kind}{i}", at - base, _SIZES[kind]))
        at += _SIZES[kind]
    assert params[0][1] == {"sm_90a": 48, "sm_103a": 0}[arch]
    built = compile_kernel(make_job(tmp_path, arch=arch, params=tuple(params)))
    cubin = elf.read_cubin(built.cubin, "k")
    assert (cubin.arch, cubin.kernels[0].param_base) == (arch, base)
    assert f".target {arch}".encode() in built.ptx


def test_side_by_side_kernels_keep_apart(compiled: CompiledKernel, tmp_path: Path):
    """The DSL returns another process's kernel from a shared dump folder; ours has a folder of its own."""
    from concurrent.futures import ThreadPoolExecutor

    other = edited("setmaxregister_increase(200)", "setmaxregister_increase(192)")
    jobs = [make_job(tmp_path, s) for s in (SOURCE, other)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(compile_kernel, jobs)
    assert first.ptx == compiled.ptx and first.cubin == compiled.cubin
    assert b"setmaxnreg.inc.sync.aligned.u32 \t192" in second.ptx


def test_no_private_strings_in_outputs(compiled: CompiledKernel):
    """A17: no build folder, user or home in what ships."""
    private = [str(Path(compiler_run.__file__).parents[2]), os.path.expanduser("~") + "/", "/tmp/", "fmha-gen-"]
    for data in (compiled.cubin, compiled.ptx, compiled.line_map):
        assert not [p for p in private if p.encode() in data]


def test_dropped_setmaxnreg_is_caught(tmp_path: Path):
    """Without min_blocks_per_mp ptxas drops every setmaxnreg and says nothing."""
    message = refuse(make_job(tmp_path, edited(", min_blocks_per_mp=1", "")))
    assert "2 setmaxnreg in the PTX, 0 in the machine code; they must agree" in message


def test_contradictions_between_plan_and_cubin_are_caught(tmp_path: Path):
    wrong = list(_params())
    wrong[4] = ("lse", 516, 8)
    message = refuse(make_job(tmp_path, params=tuple(wrong), threads=384, registers=168))
    assert "parameter 4 (lse) is 8 bytes at offset 512, the plan's ABI has 8 bytes at 516" in message
    assert "required block is (512, 1, 1), the plan launches (384, 1, 1)" in message
    assert "128 registers per thread at launch, the plan's setmaxnreg split assumes 168 x 384 threads" in message
    message = refuse(make_job(tmp_path, symbol="other_0"))
    assert "kernels in the cubin: fixture_sm100a_bf16_0; expected exactly one, other_0" in message


def test_local_memory_is_caught(tmp_path: Path):
    """Spills and indexed local arrays: from the ELF's frame size and from the machine code."""
    indexed = """row = bid * 128 + tid
        local = cute.make_rmem_tensor(64, Float32)
        for i in cutlass.range_constexpr(64):
            local[i] = Float32(tile[i * 64 + tid])
        out_local = cute.make_tensor(lse, cute.make_layout(1 << 20))
        out_local[tid] = local[seqlen_k % 64]"""
    message = refuse(make_job(tmp_path, edited("row = bid * 128 + tid", indexed)))
    assert re.search(r"\d{3} bytes of stack per thread .* the limit is 0", message)
    assert re.search(r"\d+ STL/LDL instructions; the limit is 0", message)


def test_failures_name_kernel_cause_and_log(tmp_path: Path):
    """C08: a kernel that does not compile: name, cause in one line, the full log and the source kept."""
    message = refuse(make_job(tmp_path, edited("tid, _, _ = cute.arch.thread_idx()", "tid = undefined_thing")))
    log = Path(re.search(r"full log: (.*)$", message)[1])
    assert message.startswith("fixture: ") and "undefined_thing" in message and "\n" not in message
    assert "Traceback" in log.read_text() and "\x1b" not in message
    assert "undefined_thing" in log.with_suffix(".py").read_text()
    assert "no trace_arguments" in refuse(make_job(tmp_path, SOURCE.replace("def trace_arguments", "def renamed")))


def test_a_compiler_that_dies_or_hangs_is_a_failure_of_its_kernel(tmp_path: Path):
    """C08: killed as by the out-of-memory killer, a crash, and the time limit: three causes, told apart."""
    assert "running out of memory" in refuse(make_job(tmp_path, "import os\nos.kill(os.getpid(), 9)\n"))
    assert "died of SIGSEGV" in refuse(make_job(tmp_path, "import os\nos.kill(os.getpid(), 11)\n"))
    start = time.perf_counter()
    hanging = make_job(tmp_path, "import time\nwhile True:\n    time.sleep(1)\n", time_limit_s=3.0)
    assert "took longer than its limit of 3 s" in refuse(hanging)
    assert time.perf_counter() - start < 30


def test_running_compilers_can_be_ended(tmp_path: Path):
    import threading

    errors: list[str] = []
    job = make_job(tmp_path, "import time\ntime.sleep(600)\n")
    thread = threading.Thread(target=lambda: errors.append(refuse(job)))
    thread.start()
    deadline = time.monotonic() + 20
    while not compiler_run._running and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_running()
    thread.join(20)
    assert len(errors) == 1 and "SIGKILL" in errors[0]


def test_helpers_that_change_meanwhile_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A06: a kernel compiled from other helpers than its key stands for must not reach the cache under that key."""
    stale = dataclasses.replace(make_job(tmp_path), code="0" * 64)
    assert "changed before it was compiled, or differs on this worker" in refuse(stale)
    digests = iter([code_digest(), "0" * 64])
    monkeypatch.setattr(compiler_run, "code_digest", lambda: next(digests))
    job = dataclasses.replace(make_job(tmp_path), code=code_digest())
    assert "changed while it was compiled" in refuse(job)


def test_an_unwritable_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """C08: no room to work."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert re.search(r"fixture: No such file .*missing.* set TMPDIR", refuse(make_job(tmp_path)))


def test_wrong_toolchains_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """C08: another DSL version, the other CUDA flavour, nothing installed: each says what to install."""
    monkeypatch.setattr(toolchain, "DSL_VERSION", "4.7.0")
    toolchain.identity.cache_clear()
    with pytest.raises(ToolchainError, match=r"dsl is 4\.8\.1; kernels compile with 4\.7\.0; pip install"):
        toolchain.identity()
    monkeypatch.setattr(toolchain, "identity", dict)
    with pytest.raises(ToolchainError, match=r"nvidia-cutlass-dsl is 4\.8\.1, pinned is 4\.7\.0; pip install"):
        compile_kernel(make_job(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(toolchain, "CUDA_MAJOR", 12)
    with pytest.raises(ToolchainError, match="the DSL loaded its CUDA 13 libraries, pinned is CUDA 12"):
        compile_kernel(make_job(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(toolchain, "DSL_PACKAGE", "no-such-package")
    toolchain.identity.cache_clear()
    with pytest.raises(ToolchainError, match=r"no-such-package is not installed; kernels compile with 4\.8\.1"):
        toolchain.identity()
    monkeypatch.undo()
    toolchain.identity.cache_clear()


def test_an_old_driver_does_not_choose_the_toolkit(compiled: CompiledKernel, tmp_path: Path, monkeypatch):
    """A16: beside a CUDA 12 driver the DSL takes its CUDA 12 libraries, and makes other bytes; here it never asks."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler to build a stand-in for the driver")
    stub = tmp_path / "driver.c"
    stub.write_text("int cuDriverGetVersion(int *v) { *v = 12080; return 0; }\n")
    subprocess.run([cc, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", stub], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert compile_kernel(make_job(tmp_path)).cubin == compiled.cubin


def test_the_driver_is_hidden_only_while_asked():
    before = ctypes.CDLL
    with _hidden_driver():
        with pytest.raises(OSError, match="hidden while the DSL chooses"):
            ctypes.CDLL("libcuda.so.1")
        assert ctypes.CDLL(None) is not None
    assert ctypes.CDLL is before
