"""Build orchestration with a stand-in for the compiler: keys, cache, failures, what is written when.

The real compiler is tested in `tests/compile`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import threading
from pathlib import Path

import pytest

from fmha_gen import build
from fmha_gen.build import (
    BuildCache,
    BuildOptions,
    build_bundle,
    build_digest,
    default_cache_dir,
    identity,
    jobs,
    orchestrate,
)
from fmha_gen.build.hints import spill_hint
from fmha_gen.build.orchestrate import make_item
from fmha_gen.bundle import check_bundle
from fmha_gen.compiler import CompiledKernel, CompileJob, gates
from fmha_gen.compiler.gates import Expected
from fmha_gen.elf import read_cubin
from fmha_gen.errors import CompileError, PlanError, SpecError, ToolchainError
from fmha_gen.launch_rules import HEADS_PER_SECTION
from fmha_gen.manifest import Resources
from fmha_gen.plan import KernelPlan, make_plan
from fmha_gen.render import render
from fmha_gen.sass.disasm import Instruction, Section
from fmha_gen.spec import BundleHeader, KernelSpec
from tests.fake_bundle import make_ptx
from tests.fake_cubin import make_cubin

HEADER = BundleHeader("demo", "1.2.0")
SPECS = [
    KernelSpec("fmha_fwd", "sm_100a", dtype, dim, dim, mask, q_stage=2, source=f"demo.yaml:{n}")
    for n, (dtype, dim, mask) in enumerate([("bf16", 64, "full"), ("fp16", 64, "full"), ("bf16", 128, "causal")], 3)
]
TOOLCHAIN = {"dsl": "4.8.1", "cuda_major": "13", "files": "f" * 64}


class FakeCompiler:
    """Makes synthetic cubins; counts calls; fails for ids that hold `broken`."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.broken: str | None = None
        self.complaint = "error: no such register"
        self.lock = threading.Lock()

    def __call__(self, job: CompileJob) -> CompiledKernel:
        pickle.loads(pickle.dumps(job))  # what any executor needs
        with self.lock:
            self.compiled.append(job.id)
        if self.broken is not None and self.broken in job.id:
            raise CompileError(f"{job.id}: {self.complaint}; full log: {job.log_dir}/{job.id}.log")
        want = job.expected
        cubin = make_cubin(
            (want.symbol,),
            sm=int(want.arch[3:-1]),
            params=[(o, s) for _, o, s in want.params],
            block=(want.threads, 1, 1),
            registers=128,
        )
        resources = Resources(128, 0, 0, 0, job.tmem_cols, 128)
        lines = b'{"files": [], "spans": []}\n'
        return CompiledKernel(cubin, make_ptx(want.symbol, want.arch), lines, resources, "13.4", "13.4.59", 1.5)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(orchestrate, "compile_kernel", fake)
    monkeypatch.setattr(identity, "identity", lambda: dict(TOOLCHAIN))
    return fake


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    return BuildOptions(jobs=2, cache_dir=tmp_path / "cache")


def job(**changes) -> CompileJob:
    expected = Expected("sm_100a", "k_0", (("tma_q", 0, 128), ("lse", 128, 8)), 512, 128)
    base = CompileJob("fmha_fwd-x-01234567", "print(1)\n", expected, 512, "/logs", "c" * 64)
    for name, value in changes.items():
        if name in {f.name for f in dataclasses.fields(Expected)}:
            base = dataclasses.replace(base, expected=dataclasses.replace(base.expected, **{name: value}))
        else:
            base = dataclasses.replace(base, **{name: value})
    return base


def tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_builds_a_bundle_that_checks(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    """C09: the result says what was built: how many, for which architectures, how large."""
    seen = []
    options = dataclasses.replace(options, progress=lambda k, done, total: seen.append((k.id, k.state, done, total)))
    result = build_bundle(HEADER, SPECS, tmp_path / "out", options)
    assert result.root == tmp_path / "out" / "demo-1.2.0"
    checked = check_bundle(result.root)
    assert {k.id for k in checked.manifest.kernels} == {k.id for k in result.kernels} == set(compiler.compiled)
    assert (result.count("compiled"), result.archs, result.jobs) == (3, ("sm_100a",), 2)
    assert result.cubin_bytes == sum(r.cubin.size_bytes for r in checked.records)
    assert [s[2:] for s in seen] == [(1, 3), (2, 3), (3, 3)]
    manifest = checked.manifest
    assert (manifest.toolchain.dsl, manifest.toolchain.cuda, manifest.toolchain.ptxas) == ("4.8.1", "13.4", "13.4.59")
    assert manifest.min_driver == 580
    record = next(r for r in checked.records if r.serves.masks == ("causal",))
    assert record.launch.scalars == {"heads_per_section": HEADS_PER_SECTION}
    assert record.source is None


def test_nothing_changed_means_nothing_done(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    build_bundle(HEADER, SPECS, tmp_path / "out", options)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    compiler.compiled.clear()
    result = build_bundle(HEADER, SPECS, tmp_path / "out", options)
    assert (compiler.compiled, result.count("cached"), result.files_written) == ([], 3, 0)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == times


def test_same_bytes_from_another_folder_cache_and_order(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    """A16, A19: a folder with spaces, an empty cache and another order of specs give the same bundle, to the byte."""
    a = build_bundle(HEADER, SPECS, tmp_path / "out", options).root
    other = dataclasses.replace(options, cache_dir=tmp_path / "other cache", jobs=1)
    b = build_bundle(HEADER, SPECS[::-1], tmp_path / "out dir (1)", other).root
    assert tree(a) == tree(b)


def test_reached_through_a_link_everything_is_still_cached(compiler: FakeCompiler, options, tmp_path: Path):
    """A20: neither the output folder's path nor the cache's is part of a key."""
    build_bundle(HEADER, SPECS, tmp_path / "out", options)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / "cache link").symlink_to(tmp_path / "cache")
    compiler.compiled.clear()
    linked = dataclasses.replace(options, cache_dir=tmp_path / "cache link")
    assert build_bundle(HEADER, SPECS, tmp_path / "link", linked).files_written == 0
    assert compiler.compiled == []


def test_a_failed_kernel_fails_the_build_by_name_and_the_rest_is_kept(compiler, options, tmp_path: Path):
    """C08: the failed kernel, its cause and its log in one line; no manifest; the next try compiles that one alone."""
    compiler.broken = "fp16"
    with pytest.raises(CompileError) as e:
        build_bundle(HEADER, SPECS, tmp_path / "out", options)
    lines = str(e.value).splitlines()
    assert "fp16-d64" in lines[0] and "no such register" in lines[0] and "full log: " in lines[0]
    assert lines[1].startswith("2 of 3 kernels compiled and are kept") and len(lines) == 2
    assert not (tmp_path / "out").exists()
    compiler.broken, compiler.compiled = None, []
    result = build_bundle(HEADER, SPECS, tmp_path / "out", options)
    assert len(compiler.compiled) == 1 and "fp16" in compiler.compiled[0]
    assert (result.count("cached"), result.count("compiled")) == (2, 1)


def plan_of(**changes) -> KernelPlan:
    return make_plan(dataclasses.replace(SPECS[0], **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # 2 x 192 + 72 + 56 = 512 of 65536 / 128 = 512
        ({}, "demo.yaml:3: registers: softmax 192 (softmax0 softmax1), correction 72 (correction), other 56 (mma "
             "epilogue load): raise the field of the role that spills, most often softmax (at most 256); the "
             "warpgroups hold 512 of 512 per thread, so lower another; or lower tile.n (128) or lower exp2_emul"),
        # 192 + 72 + 2 x 120 = 504
        ({"q_stage": 1}, "other 120 (mma epilogue load): raise the field of the role that spills, most often softmax "
                         "(at most 256); the warpgroups hold 504 of 512 per thread, 8 are free; or lower tile.n ("),
        # 2 consumer warpgroups of 240 and a load warpgroup of 24: 504
        ({"arch": "sm_90a", "q_stage": None}, "registers: softmax 240 (consumer0 consumer1), other 24 (load): raise"),
        ({"arch": "sm_90a", "q_stage": None}, "softmax (at most 240); the warpgroups hold 504 of 504 per thread, so "
                                              "lower another; or lower tile.n (128) or try recompute_s: true; no opt"),
    ],
)  # fmt: skip
def test_a_kernel_that_spills_is_told_which_field_of_the_spec_to_raise(changes: dict, words: str):
    hint = spill_hint(plan_of(**changes))
    assert words in hint and hint.endswith("no option lets spills pass")


def test_the_hint_comes_with_what_the_gates_call_spills(compiler, options, tmp_path: Path, monkeypatch):
    """The words that the hint goes by are those of the gates."""
    code = [Section("k", [Instruction(0, None, "STL.64", ""), Instruction(16, None, "LDL", "")])]
    monkeypatch.setattr(gates, "disassemble", lambda path: code)
    want = make_item(plan_of(), render(plan_of()), "c" * 64, "/logs", 1.0).job.expected
    _, (spills,) = gates.check_machine_code(Path("k.cubin"), "")
    stack = next(
        p for p in gates.check_elf(read_cubin(make_cubin((want.symbol,), stack_bytes=24), "k"), want)[1] if "stack" in p
    )
    for problem in (spills, stack):
        compiler.broken, compiler.complaint = "fp16", problem
        with pytest.raises(CompileError) as e:
            build_bundle(HEADER, SPECS, tmp_path / "out", options)
        (line,) = [text for text in str(e.value).splitlines() if problem in text]
        assert "fp16-d64" in line and "full log: " in line
        assert line.endswith(f"; {spill_hint(make_plan(SPECS[1]))}") and "demo.yaml:4: registers: softmax 192" in line
    compiler.complaint = "error: no such register"
    with pytest.raises(CompileError) as e:
        build_bundle(HEADER, SPECS, tmp_path / "out", options)
    assert "raise the field" not in str(e.value)


def test_a_failure_leaves_the_bundle_that_is_there(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    root = build_bundle(HEADER, SPECS[:1], tmp_path / "out", options).root
    before = tree(root)
    compiler.broken = "causal"
    with pytest.raises(CompileError):
        build_bundle(HEADER, SPECS, tmp_path / "out", options)
    assert tree(root) == before


def test_a_broken_toolchain_stops_at_once(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path, monkeypatch):
    """C08: a toolchain problem is one error, not one per kernel."""

    def broken(job: CompileJob) -> CompiledKernel:
        raise ToolchainError("toolchain: the DSL loaded its CUDA 12 libraries, pinned is CUDA 13; pip install x")

    monkeypatch.setattr(orchestrate, "compile_kernel", broken)
    with pytest.raises(ToolchainError, match="pinned is CUDA 13"):
        build_bundle(HEADER, SPECS, tmp_path / "out", options)


def test_dry_run_lists_and_compiles_nothing(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    """C09: --dry-run."""
    result = build_bundle(HEADER, SPECS, tmp_path / "out", dataclasses.replace(options, dry_run=True))
    assert [k.state for k in result.kernels] == ["planned"] * 3
    assert compiler.compiled == [] and not (tmp_path / "out").exists()


def test_dry_run_needs_no_compiler(options: BuildOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing() -> dict[str, str]:
        raise ToolchainError("toolchain: not installed")

    monkeypatch.setattr(identity, "identity", missing)
    result = build_bundle(HEADER, SPECS, tmp_path / "out", dataclasses.replace(options, dry_run=True))
    assert len(result.kernels) == 3
    with pytest.raises(ToolchainError):
        build_bundle(HEADER, SPECS, tmp_path / "out", options)


def test_only_builds_what_matches(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    result = build_bundle(HEADER, SPECS, tmp_path / "out", dataclasses.replace(options, only="*-causal-*"))
    assert len(result.kernels) == 1 and "causal" in result.kernels[0].id
    with pytest.raises(SpecError, match=r"--only \*d512\*: matches none of the 3 kernels:\n  fmha_fwd"):
        build_bundle(HEADER, SPECS, tmp_path / "out", dataclasses.replace(options, only="*d512*"))


def ids_of(root: Path) -> set[str]:
    return {k.id for k in check_bundle(root).manifest.kernels}


def test_only_keeps_the_bundles_other_kernels_of_this_very_build(compiler, options, tmp_path: Path):
    """Somebody rebuilds one kernel of a bundle that ships: the others must not be gone."""
    whole = build_bundle(HEADER, SPECS, tmp_path / "out", options)
    before = tree(whole.root)
    compiler.compiled.clear()
    part = dataclasses.replace(options, only="*-fp16-*")
    result = build_bundle(HEADER, SPECS, tmp_path / "out", part)
    assert (result.count("cached"), result.count("kept"), result.dropped) == (1, 2, ())
    assert tree(whole.root) == before and compiler.compiled == [] and result.files_written == 0
    assert {k.id for k in result.kernels} == ids_of(whole.root) and result.cubin_bytes == whole.cubin_bytes


def test_only_adds_to_a_bundle_that_holds_a_part(compiler, options, tmp_path: Path):
    for pattern in ("*-fp16-*", "*-causal-*", "*-bf16-d64-*"):
        result = build_bundle(HEADER, SPECS, tmp_path / "out", dataclasses.replace(options, only=pattern))
    other = build_bundle(HEADER, SPECS, tmp_path / "other", options)
    assert tree(result.root) == tree(other.root) and len(compiler.compiled) == 3


def test_kernels_of_another_build_or_spec_are_left_out_by_name(compiler, options, tmp_path: Path, monkeypatch):
    """Two builds never mix: what changed is left out, and what the spec no longer asks for too; both are said."""
    root = build_bundle(HEADER, SPECS, tmp_path / "out", options).root
    fp16, causal = (next(i for i in ids_of(root) if part in i) for part in ("-fp16-", "-causal-"))
    monkeypatch.setattr(identity, "identity", lambda: {**TOOLCHAIN, "files": "e" * 64})
    result = build_bundle(HEADER, SPECS[:2], tmp_path / "out", dataclasses.replace(options, only="*-bf16-d64-*"))
    assert {d.id: d.why for d in result.dropped} == {
        fp16: "it is of another build: its templates or the toolchain changed",
        causal: "the spec does not ask for it",
    }
    assert ids_of(root) == {k.id for k in result.kernels} and result.count("kept") == 0
    assert len(ids_of(root)) == 1


def test_a_build_of_the_whole_spec_says_what_it_leaves_out(compiler, options, tmp_path: Path):
    root = build_bundle(HEADER, SPECS, tmp_path / "out", options).root
    gone = next(i for i in ids_of(root) if "-causal-" in i)
    result = build_bundle(HEADER, SPECS[:2], tmp_path / "out", options)
    assert [d.id for d in result.dropped] == [gone] and gone not in ids_of(root)


def test_damaged_kernels_and_bundles_are_not_kept(compiler, options, tmp_path: Path):
    root = build_bundle(HEADER, SPECS, tmp_path / "out", options).root
    cubin = next(p for p in (root / "cubin").iterdir() if "-causal-" in p.name)
    cubin.write_bytes(b"")
    part = dataclasses.replace(options, only="*-fp16-*")
    (dropped,) = build_bundle(HEADER, SPECS, tmp_path / "out", part).dropped
    assert "-causal-" in dropped.id and f"{cubin.name}: 0 bytes, expected" in dropped.why
    (root / "manifest.json").write_text("{")
    (dropped,) = build_bundle(HEADER, SPECS, tmp_path / "out", part).dropped
    assert dropped.id == "" and "cannot be read" in dropped.why and len(ids_of(root)) == 1


def test_arch_keeps_the_kernels_of_the_others(compiler, options, tmp_path: Path):
    """`--arch` is `--only` by architecture; what another one cannot fit is no problem of this build."""
    hopper = [dataclasses.replace(s, arch="sm_90a", q_stage=None) for s in SPECS]
    whole = build_bundle(HEADER, [*SPECS, *hopper], tmp_path / "out", options)
    assert whole.archs == ("sm_100a", "sm_90a")
    misfit = dataclasses.replace(SPECS[0], arch="sm_90a", exp2_emulation=2)
    here = dataclasses.replace(options, arch="sm_100a")
    result = build_bundle(HEADER, [*SPECS, *hopper, misfit], tmp_path / "out", here)
    assert (result.count("cached"), result.count("kept"), result.dropped) == (3, 3, ())
    assert ids_of(whole.root) == {k.id for k in whole.kernels}


def test_every_variant_that_does_not_fit_is_reported(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    """H05: refused before anything compiles, all of them at once."""
    bad = [dataclasses.replace(s, kv_stage=40) for s in SPECS]
    with pytest.raises(PlanError) as e:
        build_bundle(HEADER, bad, tmp_path / "out", options)
    assert all(f"demo.yaml:{n}" in str(e.value) for n in (3, 4, 5))
    assert compiler.compiled == []


def test_nothing_to_build_is_an_error(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    with pytest.raises(SpecError, match="no kernel to build"):
        build_bundle(HEADER, [], tmp_path / "out", options)


def test_keys_differ_in_every_part(monkeypatch: pytest.MonkeyPatch):
    """A04, A06: whatever a kernel depends on is in its key, and no two sets of strings share an encoding."""
    monkeypatch.setattr(identity, "identity", lambda: dict(TOOLCHAIN))
    changes = [
        {"id": "other"},
        {"source": "print(2)\n"},
        {"arch": "sm_90a"},
        {"symbol": "k_1"},
        {"params": (("tma_q", 0, 128),)},
        {"params": (("tma_q", 0, 128), ("lse", 136, 8))},
        {"threads": 384},
        {"registers": 168},
        {"tmem_cols": 256},
        {"code": "d" * 64},
        {"params": (("a|b", 0, 8), ("c", 8, 8))},
        {"params": (("a", 0, 8), ("b|c", 8, 8))},
    ]
    keys = [build_digest(job())] + [build_digest(job(**c)) for c in changes]
    for part in TOOLCHAIN:
        monkeypatch.setattr(identity, "identity", lambda part=part: TOOLCHAIN | {part: "other"})
        keys.append(build_digest(job()))
    assert len(set(keys)) == len(keys)
    assert all(len(k) == 64 for k in keys)


def test_keys_leave_out_what_does_not_matter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "identity", lambda: dict(TOOLCHAIN))
    assert build_digest(job(log_dir="/elsewhere", time_limit_s=1.0)) == build_digest(job())


def test_every_spec_field_changes_id_and_key(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    """A04: two specs that differ in one field share neither id nor build digest."""
    base = SPECS[2]
    variants = [base]
    for field, value in [
        ("dtype", "fp16"),
        ("head_dim_qk", 192),
        ("mask", "full"),
        ("q_stage", 1),
        ("kv_stage", 2),
        ("schedule", "static_persistent"),
        ("exp2_emulation", 0),
        ("rescale_threshold", 0.0),
    ]:
        variants.append(dataclasses.replace(base, **{field: value}))
    result = build_bundle(HEADER, variants, tmp_path / "out", options)
    records = check_bundle(result.root).records
    assert len(records) == len(variants)
    for values in ([r.id for r in records], [r.build_digest for r in records], [json.dumps(r.spec) for r in records]):
        assert len(set(values)) == len(variants)


def test_damaged_cache_entries_are_built_again(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    """A08: truncated to nothing, cut, one byte flipped, replaced by another entry: never used, always repaired."""
    build_bundle(HEADER, SPECS, tmp_path / "out", options)
    entries = sorted(p for p in (tmp_path / "cache" / "kernels").rglob("*") if p.is_file())
    whole = [p.read_bytes() for p in entries]
    assert len(entries) == 3
    flipped = bytearray(whole[0])
    flipped[-5] ^= 1
    for bad in (b"", whole[0][:100], bytes(flipped), whole[1]):
        entries[0].write_bytes(bad)
        compiler.compiled.clear()
        build_bundle(HEADER, SPECS, tmp_path / "out", options)
        assert len(compiler.compiled) == 1
        assert len(entries[0].read_bytes()) == len(whole[0])


def test_cache_entries_of_others_are_not_trusted(compiler: FakeCompiler, options: BuildOptions, tmp_path: Path):
    """A23: a native cache entry that others can write, or that is a link, is built again."""
    build_bundle(HEADER, SPECS, tmp_path / "out", options)
    entry = next(p for p in (tmp_path / "cache" / "kernels").rglob("*") if p.is_file())
    os.chmod(entry, 0o666)
    compiler.compiled.clear()
    build_bundle(HEADER, SPECS, tmp_path / "out", options)
    assert len(compiler.compiled) == 1 and entry.stat().st_mode & 0o022 == 0
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    build_bundle(HEADER, SPECS, tmp_path / "out", options)
    assert len(compiler.compiled) == 2 and not entry.is_symlink()


def test_concurrent_builders_share_a_cache_and_an_output(compiler: FakeCompiler, options, tmp_path: Path):
    """A11: builders side by side on one cache and one bundle folder; the result is whole."""
    errors = []

    def run() -> None:
        try:
            for _ in range(3):
                check_bundle(build_bundle(HEADER, SPECS, tmp_path / "out", options).root)
        except Exception as e:  # reported below
            errors.append(e)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert check_bundle(tmp_path / "out" / "demo-1.2.0").unreferenced == ()


def test_cache_that_cannot_be_written_is_named(tmp_path: Path):
    """C08: an unusable cache folder says so, with the variable to set."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolchainError, match=r"file/cache: the build cache cannot be made .*FMHA_GEN_CACHE_DIR"):
        BuildCache(tmp_path / "file" / "cache")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/u")
    for name in ("FMHA_GEN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_cache_dir() == Path("/home/u/.cache/fmha-gen")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification: to be ignored
    assert default_cache_dir() == Path("/home/u/.cache/fmha-gen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/fmha-gen")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(ToolchainError, match="no home folder .*set FMHA_GEN_CACHE_DIR"):
        default_cache_dir()
    monkeypatch.setenv("FMHA_GEN_CACHE_DIR", "/y")
    assert default_cache_dir() == Path("/y")


def test_jobs_respect_memory_and_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs, "available_memory_bytes", lambda: 5 * jobs.MEMORY_PER_JOB_BYTES + 1)
    assert jobs.choose_jobs(64, 100) == 5
    assert jobs.choose_jobs(64, 3) == 3
    assert jobs.choose_jobs(2, 100) == 2
    monkeypatch.setattr(jobs, "available_memory_bytes", lambda: 0)
    assert jobs.choose_jobs(8, 100) == 1
    monkeypatch.undo()
    assert 0 < jobs.available_memory_bytes() < 1 << 50


def _repository(root: Path) -> None:
    (root / "fmha_gen").mkdir(parents=True)
    (root / "fmha_gen" / "x.py").write_text("1\n")
    for args in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "m"]):
        subprocess.run(["git", "-C", str(root), *args], check=True)


def test_a_dirty_generator_is_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A17: a bundle says when it was made by code that no commit holds; what cannot shape a kernel does not count."""
    _repository(tmp_path)
    monkeypatch.setattr(identity, "checkout_root", lambda: tmp_path)
    clean = build.generator()
    assert clean.commit is not None and len(clean.commit) == 40 and not clean.dirty
    (tmp_path / "notes.txt").write_text("x")
    assert not build.generator().dirty
    (tmp_path / "fmha_gen" / "new.py").write_text("2\n")
    assert build.generator().dirty
    (tmp_path / "fmha_gen" / "new.py").unlink()
    (tmp_path / "fmha_gen" / "x.py").write_text("3\n")
    assert build.generator() == dataclasses.replace(clean, dirty=True)


def test_without_a_checkout_there_is_no_commit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "checkout_root", lambda: None)
    assert (build.generator().commit, build.generator().dirty) == (None, False)


def test_a_checkout_without_git_counts_as_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A17: nobody can say what made the bundle."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(identity, "checkout_root", lambda: tmp_path)
    assert (build.generator().commit, build.generator().dirty) == (None, True)
