"""The command line: exit codes, errors as text and JSON, and the commands that need no compiler."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fmha_gen import __version__
from fmha_gen.cli import COMMANDS, cli
from fmha_gen.cli.output import table
from fmha_gen.manifest import KernelEntry, Manifest
from fmha_gen.manifest_io import manifest_text
from fmha_gen.resources import data_dir
from fmha_gen.spec import schema
from tests.fake_bundle import GENERATOR, TOOLCHAIN, make_bundle, make_kernel

CORE = str(data_dir("specs") / "core.yaml")
CORE_KERNELS = 32 + 24  # sm_100a and sm_90a


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])


def error_of(result: Result) -> dict:
    return json.loads(result.stdout)["error"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_and_json(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_version():
    assert run("--version").stdout == f"fmha-gen, version {__version__}\n"


@pytest.mark.parametrize("args", [("buidl",), ("build",), ("build", CORE, "-j", "0"), ("list",), ("doctor", "--nope")])
def test_wrong_usage_is_exit_code_2(args):
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == "" and "Error: " in result.stderr
    result = run(*args, "--json")
    assert result.exit_code == 2 and error_of(result)["code"] == "usage"


RUN = ("run", "BUNDLE", "--input", "in.npz", "--output", "out.npz")
EXPLAIN = ("explain", "BUNDLE", "--arch", "sm_100a", "--head-dim", "64")
USAGE: dict[tuple[str, ...], tuple[str, ...]] = {
    ("build", CORE): (
        "--executor nonsense", "--executor dask://x", "--executor dask://x:99999", "--executor dask://x:0",
        "--executor tcp://x:80", "--arch nonsense", "--arch SM_100A", "--arch=", "--only=", "--out=", "-j -1", "-j x",
    ),
    ("plan", CORE): ("--arch sm_120a", "--only="),
    ("render", CORE): ("--arch 10.0", "--out="),
    ("list",): ("",),
    ("inspect", "BUNDLE"): ("--only=",),
    ("analyze", "BUNDLE"): (
        "--head-dim-qk 64", "--head-dim-v 64", "--head-dim-qk 0", "--head-dim-qk 99999999999999999999", "--tile-n 8",
        "--tile-n 99999999999999999999",
    ),
    ("verify", "BUNDLE"): (
        "--seeds 0", "--seeds 99999999999999999999", "--time-limit nan", "--time-limit inf", "--time-limit 0",
        "--time-limit 1e300", "--driver gpu", "--proof=", "-j 0",
    ),
    RUN: (
        "--scale nan", "--scale inf", "--scale=-1", "--scale 1e300", "--scale x", "--softcap nan", "--softcap=-1",
        "--num-splits 0", "--num-splits -3", "--sms 0", "--sms 99999999999999999999", "--seed -1", "--window 1 x",
        "--window -1 0", "--window 3 4 --causal", "--variant=", "--dtype fp32", "--driver x",
    ),
    ("bench", "BUNDLE"): (
        "--peer foo", "--peer none --peer cudnn", "--seqlen 0", "--seqlen -5", "--head-dim 0", "--tokens 0",
        "--tokens -1", "--rounds 0", "--heads 0", "--heads-kv 0", "--heads 3 --heads-kv 2", "--mask window",
    ),
    EXPLAIN: (
        "--head-dim 0", "--head-dim-v -5", "--batch -1", "--seqlen-q -1", "--seqlen-k 99999999999999", "--heads 0",
        "--heads 3 --heads-kv 2", "--arch foo", "--variant=", "--window 3 4 --causal", "--dtype fp8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("command", "more"), [(c, m) for c, options in USAGE.items() for m in options])
def test_a_value_that_nothing_could_make_right_is_wrong_usage(command, more, tmp_path):
    """Whatever the spec, bundle or input: said before any of them is worked on, and on a machine without a GPU too."""
    make_bundle(tmp_path / "b")
    args = [str(tmp_path / "b") if a == "BUNDLE" else a for a in (*command, *more.split())]
    result = run(*args, "--json")
    error = error_of(result)
    assert result.exit_code == 2 and error["code"] == "usage", error
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == "" and "Error: " in result.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("build", CORE, "--dry-run", "--arch", "sm_103a"), "spec"),  # another spec may list it
        (("plan", CORE, "--only", "nothing"), "spec"),
        (("inspect", "BUNDLE", "--only", "nothing"), "no_kernel"),
        ((*EXPLAIN, "--variant", "nothing"), "no_kernel"),
        ((*RUN, "--scale", "0"), "file"),  # the input is missing
    ],
)
def test_what_other_files_could_make_right_is_a_failure(args, code, tmp_path):
    make_bundle(tmp_path / "b")
    result = run(*[str(tmp_path / "b") if a == "BUNDLE" else a for a in args], "--json")
    assert result.exit_code == 1 and error_of(result)["code"] == code


@pytest.mark.parametrize("spelling", ["sm_100a", "sm100a", "10.0a", "100a"])
def test_every_spelling_of_an_architecture_is_taken_by_every_command(spelling, tmp_path):
    make_bundle(tmp_path / "b")
    assert run("build", CORE, "--dry-run", "--arch", spelling).exit_code == 0
    result = run("explain", tmp_path / "b", "--head-dim", "128", "--seqlen-q", "200", "--arch", spelling, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["device"].startswith("device 0 (any sm_100a device")


def test_a_failure_is_exit_code_1_with_its_code(tmp_path):
    result = run("list", tmp_path / "none")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and "none: not a folder" in result.stderr
    result = run("list", tmp_path / "none", "--json")
    assert result.exit_code == 1 and error_of(result)["code"] == "bundle"


def test_spec_problems_come_as_a_list(tmp_path):
    spec = tmp_path / "my spec.yaml"
    spec.write_text("edition: 2026\nbundle: {name: t, version: 1.0}\nkernels: []\n")
    result = run("build", spec, "--dry-run")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert [line.split(":")[1] for line in lines[:2]] == ["2", "3"]
    assert lines[-1] == "error: 2 problems"
    error = error_of(run("build", spec, "--dry-run", "--json"))
    assert error["code"] == "spec" and error["problems"] == lines[:2]


def test_a_bug_is_reported_as_such(monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("fmha_gen.doctor.examine", broken)
    error = error_of(run("doctor", "--json"))
    assert error["code"] == "internal" and "ZeroDivisionError: division by zero" in error["message"]
    result = run("doctor")
    assert result.exit_code == 1 and isinstance(result.exception, ZeroDivisionError)


def test_without_the_build_extra_the_script_says_what_to_install(tmp_path):
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError(\"No module named 'click'\", name='click')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    result = subprocess.run([sys.executable, "-m", "fmha_gen"], capture_output=True, text=True, env=env)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == (
        "fmha-gen: click is not installed; this installation holds the run time alone; pip install 'fmha-gen[build]'\n"
    )


def runtime_only(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A command where only the run time's packages can be found, without this test's site-packages."""
    hide = "import importlib.metadata as m, sys\nfrom importlib.abc import MetaPathFinder\n"
    hide += "HIDDEN = 'click rich yaml jinja2 numpy numba llvmlite cutlass'.split()\n"
    hide += "class Hide(MetaPathFinder):\n def find_spec(self, name, path=None, target=None):\n"
    hide += "  if name.partition('.')[0] in HIDDEN: raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    hide += "sys.meta_path.insert(0, Hide())\nfound = m.version\ndef version(name):\n"
    hide += " if name.lower() in (*HIDDEN, 'pyyaml') or 'cutlass' in name: raise m.PackageNotFoundError(name)\n"
    hide += " return found(name)\nm.version = version\nfrom fmha_gen.__main__ import main\n"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    code = f"{hide}sys.argv[1:] = {list(args)!r}\nmain()\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)


def test_doctor_answers_where_only_the_run_time_is_installed(tmp_path):
    result = runtime_only(tmp_path, "doctor", "--json")
    assert result.stderr == "" and result.returncode == 1
    data = json.loads(result.stdout)
    assert data["version"] == __version__ and data["can"]["build"] is data["can"]["simulate"] is False
    missing = {c["part"] for c in data["checks"] if not c["ok"]}
    assert {"click", "rich", "PyYAML", "jinja2", "compiler", "numpy", "numba"} <= missing
    text = runtime_only(tmp_path, "doctor")
    assert text.stderr == "" and text.returncode == 1
    lines = text.stdout.splitlines()
    assert lines[0] == f"fmha-gen {__version__}" and "can compile bundles: no" in lines
    assert any(line.split()[:3] == ["click", "missing", "not"] for line in lines)
    other = runtime_only(tmp_path, "list", "b", "--json")
    error = json.loads(other.stdout)["error"]
    assert other.returncode == 1 and other.stderr == ""
    assert error["code"] == "toolchain" and error["message"].startswith("click is not installed; ")


def test_a_missing_package_of_a_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    for name in [m for m in sys.modules if m.startswith("fmha_gen.spec")]:
        monkeypatch.delitem(sys.modules, name)
    error = error_of(run("schema", "--json"))
    assert error["code"] == "toolchain" and "yaml" in error["message"] and "fmha-gen[build]" in error["message"]


def test_schema_prints_the_schema():
    assert json.loads(run("schema").stdout) == schema()


def test_doctor_judges_each_ability():
    result = run("doctor", "--json")
    data = json.loads(result.stdout)
    assert set(data) == {"version", "can", "checks"} and set(data["can"]) == {"build", "simulate", "launch"}
    parts = {c["part"] for c in data["checks"]}
    assert {"Python", "compiler", "nvdisasm", "templates", "cuda-bindings", "driver"} <= parts
    lacking = [c for c in data["checks"] if not c["ok"] and {"build", "simulate"} & set(c["needed_for"])]
    assert (result.exit_code == 0) == (not lacking)
    assert "can compile bundles: " in run("doctor").stdout


def test_doctor_names_what_is_missing_and_exits_1(monkeypatch):
    from importlib.metadata import PackageNotFoundError, version

    def lacks_jinja(name: str) -> str:
        if name == "jinja2":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("fmha_gen.doctor.importlib.metadata.version", lacks_jinja)
    result = run("doctor")
    assert result.exit_code == 1
    assert "not installed; pip install 'fmha-gen[build]'" in result.stdout
    assert "can compile bundles: no" in result.stdout and "can run bundles in the simulator: " in result.stdout


def test_list_shows_the_coverage_matrix(tmp_path):
    make_bundle(tmp_path / "b")
    result = run("list", tmp_path / "b", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and "spec" not in data
    assert [k["id"] for k in data["kernels"]] == [
        "fmha_fwd-sm100a-bf16-d128-full-q2-01234567",
        "fmha_fwd-sm100a-bf16-d64-causal-q1-89abcdef",
    ]
    text = run("list", tmp_path / "b").stdout
    assert "demo 1.0.0: 2 kernels" in text and "rows >= 129" in text


def test_brackets_in_a_table_are_no_markup(tmp_path):
    """They neither fail nor colour, in a title, a column's name or a cell."""
    serves = dataclasses.replace(make_kernel().record.serves, masks=("[/x]", "[red]full"), dtype="[/x]")
    entry = KernelEntry("k", "fmha_fwd", "sm_100a", serves, 0, "a" * 64, 1)
    manifest = Manifest("demo", "1.0.0", GENERATOR, TOOLCHAIN, 580, (entry,))
    (tmp_path / "manifest.json").write_text(manifest_text(manifest))
    result = run("list", tmp_path)
    assert result.exit_code == 0 and result.stdout.count("[/x]") == 2 and "[red]full" in result.stdout
    assert table("[/x]").title.plain == "[/x]"


def test_c02_a_hole_against_the_spec_is_an_error(tmp_path):
    """C02 (NVIDIA/TensorRT-LLM#17911): a missing kernel is shown, never papered over."""
    make_bundle(tmp_path / "b")
    result = run("list", tmp_path / "b", CORE, "--json")
    data = json.loads(result.stdout)["spec"]
    assert result.exit_code == 1
    assert data["kernels"] == len(data["holes"]) == CORE_KERNELS
    assert len(data["not_in_spec"]) == 2
    result = run("list", tmp_path / "b", CORE)
    assert result.exit_code == 1
    assert f"the spec asks for {CORE_KERNELS} kernels; the bundle lacks {CORE_KERNELS} of them" in result.stdout
    assert result.stdout.count("missing: fmha_fwd-") == CORE_KERNELS


def test_inspect_checks_every_file(tmp_path):
    written = make_bundle(tmp_path / "b")
    result = run("inspect", tmp_path / "b", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and len(data["kernels"]) == 2
    assert data["toolchain"]["dsl"] == "4.8.1" and data["unreferenced"] == []
    assert [p["name"] for p in data["kernels"][0]["params"]] == ["tma_q", "lse", "seqlen_q"]
    text = run("inspect", tmp_path / "b", "--only", "*-d64-*").stdout
    assert "every file checked" in text and "tma_q" in text and "d128" not in text
    assert written.root == tmp_path / "b"


def test_analyze_refuses_a_glob_for_one_cubin(tmp_path):
    (tmp_path / "k.cubin").write_bytes(b"")
    result = run("analyze", tmp_path / "k.cubin", "--only", "*x*")
    assert result.exit_code == 2 and "--only chooses among a bundle's kernels" in result.stderr


def test_inspect_names_a_damaged_file(tmp_path):
    make_bundle(tmp_path / "b")
    cubin = next((tmp_path / "b" / "cubin").iterdir())
    data = bytearray(cubin.read_bytes())
    data[200] ^= 1
    cubin.write_bytes(data)
    error = error_of(run("inspect", tmp_path / "b", "--json"))
    assert error["code"] == "bundle" and cubin.name in error["message"] and "sha256" in error["message"]


def test_only_that_matches_nothing_lists_what_there_is(tmp_path):
    make_bundle(tmp_path / "b")
    error = error_of(run("inspect", tmp_path / "b", "--only", "*-d256-*", "--json"))
    assert error["code"] == "no_kernel" and "fmha_fwd-sm100a-bf16-d64-causal-q1-89abcdef" in error["message"]


def test_plan_names_every_variant_that_does_not_fit(tmp_path):
    spec = tmp_path / "s.yaml"
    spec.write_text(Path(CORE).read_text().replace("q_stage: [2, 1]", "q_stage: 2\n    kv_stage: [11, 12]"))
    error = error_of(run("plan", spec, "--arch", "sm_100a", "--json"))
    lines = error["message"].splitlines()
    assert error["code"] == "plan" and len(lines) == 32
    assert all("sm_100a allows 232448" in line and "s.yaml:13: kv_stage=1" in line for line in lines)


def test_plan_prints_every_kernel_and_its_reasons():
    data = json.loads(run("plan", CORE, "--only", "*-bf16-*", "--json").stdout)
    assert len(data["kernels"]) == CORE_KERNELS // 2
    assert all(k["smem_bytes"] <= 232448 and k["reasons"]["kv_stage"] for k in data["kernels"])
    text = run("plan", CORE, "--only", "fmha_fwd-sm100a-bf16-d128-full-q2").stdout
    for title in ("shared memory", "tensor memory", "warps x registers", "pipelines"):
        assert f"\n{title}" in text
    assert run("plan", CORE, "--brief").stdout.count("fmha_fwd-") == CORE_KERNELS


def test_plan_brief_and_inspect_mean_the_same_by_tmem_columns():
    """Those that the kernel allocates, as its record says; (64, 64) uses 384 of the 512."""
    args = ("plan", CORE, "--arch", "sm_100a", "--only", "*-bf16-d64-full-q2")
    (row,) = (r for r in run(*args, "--brief").stdout.splitlines() if "-q2-" in r)
    (plan,) = json.loads(run(*args, "--json").stdout)["kernels"]
    assert row.split()[4] == str(plan["tmem_alloc_cols"]) == "512"


def test_render_prints_one_source_or_writes_many(tmp_path):
    one = run("render", CORE, "--only", "*-sm100a-bf16-d128-full-q2")
    assert one.exit_code == 0
    compile(one.stdout, "kernel", "exec")
    many = run("render", CORE)
    assert many.exit_code == 2 and f"{CORE_KERNELS} kernels, and one can be printed" in many.stderr
    written = run("render", CORE, "--only", "*-sm100a-bf16-d128-*", "-o", tmp_path / "src dir")
    paths = [Path(line) for line in written.stdout.splitlines()]
    assert len(paths) == 4 and one.stdout in {p.read_text() for p in paths}


def test_build_dry_run_lists_variants_and_ends_with_the_path(tmp_path):
    """C09 (flashinfer#1067, #876): what would be built is visible without building."""
    result = run("build", CORE, "-o", tmp_path / "out dir (1)", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(tmp_path / "out dir (1)" / "core-0.1.0")
    assert f"{CORE_KERNELS} kernels for sm_100a, sm_90a; nothing was compiled or written" in result.stdout
    assert not (tmp_path / "out dir (1)").exists()
    data = json.loads(run("build", CORE, "-o", tmp_path, "--dry-run", "--only", "*-sm100a-*-d96-*", "--json").stdout)
    assert data["path"] == str(tmp_path / "core-0.1.0") and data["dry_run"] is True
    assert len(data["kernels"]) == 8 and {k["state"] for k in data["kernels"]} == {"planned"}


@pytest.mark.parametrize("bounds", [("-1", "0"), ("one", "0"), ("0", str(2**31))])
def test_run_refuses_window_bounds_by_value(bounds):
    result = run("run", "b", "--input", "i.npz", "--output", "o.npz", "--window", *bounds)
    assert result.exit_code == 2 and "--window" in result.stderr and "none" in result.stderr


@pytest.fixture(params=["a file", "no folder to write"])
def bad_folder(request, tmp_path, monkeypatch):
    """An output path that a file is in the way of, or one that the system refuses (asked as root, it would not)."""
    (tmp_path / "taken").write_text("")
    if request.param == "a file":
        return tmp_path / "taken"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    return tmp_path


def plain_error(args: tuple[object, ...], code: str) -> str:
    """The one-line message of a command that fails, the same as text and as JSON."""
    error = error_of(run(*args, "--json"))
    assert error["code"] == code
    result = run(*args)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.stderr == f"error: {error['message']}\n" and result.stderr.count("\n") == 1
    return error["message"]


def test_render_into_what_is_no_folder_is_a_plain_error(bad_folder):
    message = plain_error(("render", CORE, "--only", "*-bf16-d128-full-q2", "-o", bad_folder), "file")
    assert str(bad_folder) in message and ("File exists" in message or "Permission denied" in message)


def test_bench_into_what_is_no_folder_is_a_plain_error_before_the_work(bad_folder, tmp_path):
    message = plain_error(("bench", tmp_path / "no bundle", "--no-plot", "-o", bad_folder), "file")
    assert str(bad_folder) in message


def test_build_into_what_is_no_folder_is_a_plain_error_before_the_work(bad_folder, monkeypatch, tmp_path):
    def compiles(job):
        raise AssertionError("compiled for a folder that cannot be written")

    monkeypatch.setenv("FMHA_GEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("fmha_gen.build.orchestrate.compile_kernel", compiles)
    message = plain_error(("build", CORE, "--only", "*-bf16-d128-full-q2", "-o", bad_folder), "bundle")
    assert f"{bad_folder}/core-0.1.0: cannot be written (" in message and str(bad_folder) in message


def test_a_working_folder_that_was_deleted_is_named(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    message = plain_error(("build", CORE, "--only", "*-bf16-d128-full-q2"), "bundle")
    assert message.startswith("out/core-0.1.0: cannot be written (") and "the working folder was deleted" in message
    monkeypatch.setattr("fmha_gen.doctor.examine", os.getcwd)
    assert plain_error(("doctor",), "file").startswith("the working folder was deleted: No such file or directory; ")


def test_run_and_verify_into_a_folder_are_plain_errors_before_the_work(tmp_path):
    import numpy as np

    make_bundle(tmp_path / "b")
    np.savez(tmp_path / "in.npz", **{name: np.zeros((1, 1, 1, 64), np.float32) for name in "qkv"})
    for target, reason in ((tmp_path, "Is a directory"), (tmp_path / "no" / "o.npz", "No such file or directory")):
        args = ("run", tmp_path / "no bundle", "--input", tmp_path / "in.npz", "--output", target)
        assert f"{target}: cannot be written ({reason})" in plain_error(args, "file")
    for target in (str(tmp_path), "."):
        message = plain_error(("verify", tmp_path / "b", "--proof", target), "file")
        assert message.startswith(f"{target}: cannot be written (Is a directory)")


@pytest.mark.parametrize("damage", ["a flipped byte", "no file"])
def test_verify_proves_nothing_of_a_damaged_cubin(tmp_path, damage):
    """The proof names the cubin's digest. The simulator, which runs the PTX, would never look at the file."""
    make_bundle(tmp_path / "b")
    (cubin,) = (tmp_path / "b" / "cubin").glob("*d64*")
    data = bytearray(cubin.read_bytes())
    data[-1] ^= 1
    cubin.write_bytes(data) if damage == "a flipped byte" else cubin.unlink()
    message = plain_error(("verify", tmp_path / "b", "--quick"), "bundle")
    assert message == plain_error(("inspect", tmp_path / "b"), "bundle")
    assert f"{cubin}: " in message and ("sha256 is" in message or "no such file" in message)
    assert not (tmp_path / "b" / "proof.json").exists()


def test_any_error_of_the_system_is_a_plain_one(monkeypatch):
    def full():
        raise OSError(28, "No space left on device", "/tmp/x")

    monkeypatch.setattr("fmha_gen.doctor.examine", full)
    assert plain_error(("doctor",), "file").startswith("/tmp/x: No space left on device; ")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_device_behind_standard_output_is_a_plain_error(more, buffered):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fmha_gen", "plan", CORE, "--only", "*-bf16-d64-full-q2", *more],
            stdout=full, stderr=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: No space left on device; ")


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_goes_away_ends_the_command_in_silence(buffered, more):
    """docs/cli.md says so: exit code 1, and nothing on standard error."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [sys.executable, "-m", "fmha_gen", "plan", CORE, "--only", "*-bf16-d64-full-q2", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 1


def test_a_bundle_without_kernels_is_shown_as_such(tmp_path):
    make_bundle(tmp_path / "b", [])
    result = run("inspect", tmp_path / "b")
    assert result.exit_code == 0 and result.stdout.startswith("demo 1.0.0: 0 kernels, 0 B of cubins;")
    for command in ("verify", "analyze"):
        message = plain_error((command, tmp_path / "b"), "no_kernel")
        assert "holds no kernel; there is nothing to" in message and "--only" not in message
    assert "--only *x*" in plain_error(("inspect", tmp_path / "b", "--only", "*x*"), "no_kernel")
    np = pytest.importorskip("numpy")
    np.savez(tmp_path / "in.npz", **{name: np.zeros((1, 1, 1, 64), np.float32) for name in "qkv"})
    target = ("--input", tmp_path / "in.npz", "--output", tmp_path / "o.npz", "--driver", "sim")
    message = plain_error(("run", tmp_path / "b", *target), "no_kernel")
    assert message.startswith("bundle demo 1.0.0 holds no kernels; ")


def test_run_names_a_missing_bundle(tmp_path):
    import numpy as np

    arrays = {name: np.zeros((1, 1, 1, 64), np.float32) for name in "qkv"}
    np.savez(tmp_path / "in.npz", **arrays)
    args = ("run", tmp_path / "none", "--input", tmp_path / "in.npz", "--output", tmp_path / "o.npz", "--json")
    error = error_of(run(*args))
    assert error["code"] == "bundle" and "not a folder" in error["message"]


@pytest.mark.parametrize(("closed", "code"), [(">&-", 1), ("2>&-", 0), ("<&-", 0), (">&- 2>&- <&-", 1)])
def test_closed_standard_streams(closed, code, tmp_path):
    """Without an output the command fails in words; nothing that is opened later takes the stream's number."""
    make_bundle(tmp_path / "b")
    script = f'exec "{sys.executable}" -m fmha_gen list "{tmp_path / "b"}" {closed}'
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=env)
    assert result.returncode == code and "Traceback" not in result.stderr
    assert ("demo 1.0.0: 2 kernels" in result.stdout) == (code == 0)
    if closed == ">&-":
        assert result.stderr == (
            "error: standard output is closed, and results go there; send it to a file or a pipe\n"
        )  # fmt: skip
