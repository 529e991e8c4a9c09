"""The default bundle, compiled: resources, integrity, privacy, and that building it again changes nothing."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from fmha_gen import elf
from fmha_gen.arch import ARCHS
from fmha_gen.build import BuildOptions, build_bundle, orchestrate
from fmha_gen.bundle import CheckedBundle, check_bundle
from fmha_gen.compiler import LineMap, code_digest, compile_kernel
from fmha_gen.manifest_io import read_verified_file
from fmha_gen.plan import make_plan
from fmha_gen.render import render
from fmha_gen.resources import data_dir
from fmha_gen.spec import SpecFile, read_specs, read_text
from tests.nvidia_tools import find_cuobjdump

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def core(core_bundle: Path) -> CheckedBundle:
    return check_bundle(core_bundle)


@pytest.fixture(scope="module")
def specs() -> SpecFile:
    return read_specs([data_dir("specs") / "core.yaml"], arch="sm_100a")


def test_every_kernel_of_the_spec_is_there_without_spills(core: CheckedBundle, specs: SpecFile):
    """A02, C02, H05: no hole in the matrix; zero spills; budgets as planned."""
    assert len(core.records) == len(specs.specs) == 32
    for r in core.records:
        limit = ARCHS[r.arch]
        assert (r.resources.spill_ops, r.resources.stack_bytes, r.resources.static_smem_bytes) == (0, 0, 0), r.id
        assert r.resources.registers * r.launch.threads <= limit.registers, r.id
        assert r.launch.dynamic_smem_bytes <= limit.smem_bytes and r.resources.tmem_cols <= limit.tmem_cols, r.id
        assert r.params[-1].offset + r.params[-1].size < 4096


@pytest.mark.parametrize(
    "fields",
    [
        "dtype: bf16, head_dim: 64, mask: full, tile: {n: 192}",
        "dtype: fp16, head_dim: 96, mask: causal, tile: {n: 160}",
    ],
)
def test_wide_tiles_that_the_plan_advises_compile_without_spills(fields: str, tmp_path: Path):
    """The shapes with the fewest registers to spare: `auto` emulates few exponentials beside a wide row."""
    text = (
        f"edition: 2026\nbundle: {{name: wide, version: '1'}}\nkernels: [{{family: fmha_fwd, q_stage: 1, {fields}}}]\n"
    )
    file = read_text(text, "wide.yaml")
    built = build_bundle(file.bundle, file.specs, tmp_path / "out", BuildOptions(jobs=1))
    (record,) = check_bundle(built.root).records
    assert (record.resources.spill_ops, record.resources.stack_bytes) == (0, 0)


def test_hopper_kernels_of_the_spec_pass_the_gates(tmp_path: Path):
    """No spills, and every wgmma product, wait and setmaxnreg of the PTX is in the machine code."""
    file = read_specs([data_dir("specs") / "core.yaml"], arch="sm_90a")
    built = build_bundle(file.bundle, file.specs, tmp_path, BuildOptions(only="*-bf16-*"))
    records = check_bundle(built.root).records
    assert len(records) == len(file.specs) // 2 and {r.arch for r in records} == {"sm_90a"}
    for r in records:
        assert (r.resources.spill_ops, r.resources.stack_bytes, r.resources.tmem_cols) == (0, 0, 0), r.id
        assert r.launch.dynamic_smem_bytes <= ARCHS[r.arch].smem_bytes, r.id


def test_elf_reader_agrees_with_cuobjdump_on_every_kernel(core: CheckedBundle):
    tool = find_cuobjdump()
    for r in core.records:
        path = core.root / r.cubin.path
        kernel = elf.read_cubin(path.read_bytes(), r.id).kernels[0]
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        reg, stack = (int(re.search(rf"{k}:(\d+)", usage)[1]) for k in ("REG", "STACK"))
        assert (kernel.registers, kernel.stack_bytes) == (reg, stack), r.id
        assert f"Function {kernel.symbol}:" in usage


def test_line_maps_lead_into_the_shipped_source(core: CheckedBundle):
    for r in core.records:
        assert r.line_map is not None and r.source is not None
        lines = LineMap.from_json(read_verified_file(core.root, r.line_map))
        length = len(read_verified_file(core.root, r.source).splitlines())
        ptx = read_verified_file(core.root, r.ptx).decode().splitlines()
        places = [lines.lookup(n) for n in range(1, len(ptx) + 1)]
        assert all(p[1] <= length for p in places if p is not None and p[0] == "kernel.py")
        mma = [p for p, text in zip(places, ptx, strict=True) if text.strip().startswith("tcgen05.mma")]
        assert mma and all(p is not None for p in mma), r.id


def test_no_private_strings_anywhere_in_the_bundle(core: CheckedBundle):
    """A17: no folder, user or home of the machine that built it, in any file of the bundle."""
    root = Path(orchestrate.__file__).parents[2]
    private = [str(root), str(Path.home()) + "/", str(core.root.parent), "/tmp/", "/site-packages/"]
    if len(getpass.getuser()) > 4:  # "root" is a word
        private.append(getpass.getuser())
    for path in core.root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [p for p in private if p.encode() in data], path.name


def test_building_again_compiles_and_writes_nothing(core: CheckedBundle, specs: SpecFile):
    start = time.perf_counter()
    result = build_bundle(specs.bundle, specs.specs, core.root.parent, BuildOptions(source=True))
    print(f"rebuild of {len(result.kernels)} unchanged kernels: {time.perf_counter() - start:.2f} s")
    assert (result.count("cached"), result.files_written) == (len(specs.specs), 0)


def test_a_clean_compilation_gives_the_shipped_bytes(core: CheckedBundle, specs: SpecFile, tmp_path: Path, monkeypatch):
    """A16: no cache, another temporary folder, another hash seed: the cubin and the PTX of the bundle, to the byte."""
    spec = next(s for s in specs.specs if (s.head_dim_qk, s.head_dim_v, s.mask, s.q_stage) == (192, 128, "causal", 2))
    monkeypatch.setenv("PYTHONHASHSEED", "777")
    (tmp_path / "tmp dir").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp dir"))
    plan = make_plan(spec)
    item = orchestrate.make_item(plan, render(plan), code_digest(), str(tmp_path / "logs"), 600.0)
    again = compile_kernel(item.job)
    record = next(r for r in core.records if r.id == item.id)
    assert again.cubin == read_verified_file(core.root, record.cubin)
    assert again.ptx == read_verified_file(core.root, record.ptx)
    assert record.build_digest == item.key


def test_a_copy_with_one_flipped_bit_is_refused(core: CheckedBundle, tmp_path: Path):
    """A08: on a real bundle."""
    copy = tmp_path / "copy"
    shutil.copytree(core.root, copy)
    path = copy / core.records[3].cubin.path
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(Exception, match=path.name):
        check_bundle(copy)
