"""What `fmha-gen run` calls: files, options, the choice of where to run. Kernels run in tests/sim and tests/device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fmha_gen import run
from fmha_gen.built import BUILT
from fmha_gen.errors import BundleError, DriverError, FileError, ProblemError, SelectionError
from fmha_gen.run import RunOptions, check_features, gives_lse, read_npz, run_npz, with_outputs, write_npz
from fmha_gen.runtime.cuda import CudaDriver
from tests.launcher_fixtures import FakeCuda, make_record, small_manifest, write_bundle


def save(path: Path, **changes: Any) -> str:
    shape = (1, 4, 2, 128)
    arrays = {name: np.zeros(shape, np.float32) for name in "qkv"} | changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": None}, "in.npz: k: not in the file, which holds q, v"),
        ({"mask": np.zeros(3)}, "mask: unknown array; known are q, k, v, cu_seqlens_q"),
        ({"v": np.zeros((1, 4, 2, 128), np.int32)}, "v: dtype int32; wanted float16, float32 or float64"),
        ({"q": np.zeros((4, 2, 128), np.float32)}, r"q: shape \(4, 2, 128\)"),
    ],
)
def test_bad_inputs_are_named_with_their_file(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        read_npz(save(tmp_path / "in.npz", **changes))


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nowhere.npz: cannot be read"):
        read_npz(str(tmp_path / "nowhere.npz"))
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ProblemError, match="text.npz: cannot be read"):
        read_npz(str(tmp_path / "text.npz"))
    np.savez(tmp_path / "objects.npz", q=np.array([{}], dtype=object))
    with pytest.raises(ProblemError, match="objects.npz"):
        read_npz(str(tmp_path / "objects.npz"))
    np.save(tmp_path / "plain.npy", np.zeros(3))
    with pytest.raises(ProblemError, match="plain.npy: cannot be read"):
        read_npz(str(tmp_path / "plain.npy"))


def test_outputs_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out dir (1)" / "out.npz"
    with pytest.raises(FileError, match="cannot be written"):
        write_npz(str(target), {"out": np.ones(3)})
    target.parent.mkdir()
    write_npz(str(target), {"out": np.ones(3)})

    def fail(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.np, "savez", fail)
    with pytest.raises(FileError, match="No space left on device"):
        write_npz(str(target), {"out": np.zeros(3)})
    with np.load(target) as kept:
        assert (kept["out"] == 1).all()
    assert [p.name for p in target.parent.iterdir()] == ["out.npz"]


def test_features_that_the_bundle_lacks_name_the_spec_field(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = small_manifest(make_record()[0])
    q = np.zeros((1, 1, 1, 64), np.float32)
    for name, field in (("cu_seqlens_q", "varlen"), ("page_table", "paged_kv"), ("sink", "sink")):
        with pytest.raises(SelectionError, match=f"{name}: no kernel .* with {field}; this fmha-gen builds no such"):
            check_features(manifest, {"q": q, name: q}, RunOptions())
    key = ("fmha_fwd", "sm_100a")
    monkeypatch.setitem(BUILT, key, dataclasses.replace(BUILT[key], features=("varlen", "split_kv")))
    with pytest.raises(SelectionError, match="cu_seqlens_q: no kernel .* add `varlen: true`"):
        check_features(manifest, {"q": q, "cu_seqlens_q": q}, RunOptions())
    with pytest.raises(SelectionError, match="`split_kv: true`"):
        check_features(manifest, {"q": q}, RunOptions(num_splits=4))
    with pytest.raises(ProblemError, match="num_splits: 0"):
        check_features(manifest, {"q": q}, RunOptions(num_splits=0))
    check_features(manifest, {"q": q}, RunOptions(num_splits=1))


def test_inputs_are_rounded_to_the_kernels_dtype_and_outputs_start_as_nan() -> None:
    q = np.full((1, 2, 1, 8), 1 + 2**-9, np.float32)
    host = with_outputs({"q": q, "k": q, "v": q[..., :4]}, "bf16")
    assert (host["q"] == 0x3F80).all(), "1 + 2^-9 rounds to 1 in bf16"
    assert host["out"].shape == (1, 2, 1, 4) and host["lse"].shape == (1, 1, 2)
    assert np.isnan((host["out"].astype(np.uint32) << 16).view(np.float32)).all() and np.isnan(host["lse"]).all()


def test_the_lse_is_asked_for_unless_no_kernel_that_may_be_taken_has_it() -> None:
    with_lse, bare = make_record()[0], make_record(q_stage=1)[0]
    bare = dataclasses.replace(bare, serves=dataclasses.replace(bare.serves, lse=False))
    manifest = small_manifest(with_lse, bare)
    assert gives_lse(manifest, None) and gives_lse(manifest, "*-q2-*") and not gives_lse(manifest, "*-q1-*")
    assert not gives_lse(small_manifest(bare), None)
    assert gives_lse(manifest, "nothing"), "the launcher says that it matches no kernel"
    q = np.zeros((1, 1, 1, 64), np.float32)
    assert "lse" not in with_outputs({"q": q, "k": q, "v": q}, "bf16", lse=False)


def test_a_kernel_without_lse_gives_an_output_without_it_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, cubin, ptx = make_record()
    serves = dataclasses.replace(record.serves, lse=False)
    write_bundle(tmp_path / "b", [make_record(q_stage=1), (dataclasses.replace(record, serves=serves), cubin, ptx)])
    save(tmp_path / "in.npz")

    def kernel(executor: Any, arrays: dict[str, Any], dtype: str, options: RunOptions) -> Any:
        host = with_outputs(arrays, dtype, gives_lse(executor.bundle.manifest, options.variant))
        prepared = SimpleNamespace(kernel=record.id, device=SimpleNamespace(name="sim"), packed=None)
        return run._result(executor, host, prepared, dtype, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(run.SimExecutor, "run", kernel)
    for variant, names in (("*-q2-*", ["out"]), ("*-q1-*", ["out", "lse"])):
        options = RunOptions(driver="sim", variant=variant)
        result = run_npz(tmp_path / "b", str(tmp_path / "in.npz"), str(tmp_path / "o.npz"), options)
        with np.load(tmp_path / "o.npz") as written:
            assert written.files == names
        assert (result.report()["lse_shape"] is None) == ("lse" not in names)
        said = [f"lse: {record.id} was built without it; the output has no array lse"]
        assert result.warnings == ([] if "lse" in names else said)


def test_auto_takes_a_gpu_that_runs_the_bundle_else_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path, [make_record()])

    class NoDriver(FakeCuda):
        def cuInit(self, flags: int) -> Any:
            raise RuntimeError("libcuda.so.1")

    cases: list[tuple[FakeCuda, str]] = [
        (FakeCuda(), "cuda"), (FakeCuda(capabilities=((9, 0),)), "sim"), (NoDriver(), "sim"),
    ]  # fmt: skip
    for api, expected in cases:
        monkeypatch.setattr(run, "CudaDriver", lambda api=api: CudaDriver(api))
        assert run.open_executor(tmp_path, RunOptions()).name == expected
        assert run.open_executor(tmp_path, RunOptions(driver="cuda")).name == "cuda"
        assert run.open_executor(tmp_path, RunOptions(driver="sim")).name == "sim"
    monkeypatch.setattr(run, "CudaDriver", lambda: CudaDriver(FakeCuda()))
    assert run.open_executor(tmp_path, RunOptions(variant="nothing")).name == "sim"
    with pytest.raises(ProblemError, match="driver: 'gpu'"):
        run.open_executor(tmp_path, RunOptions(driver="gpu"))
    with pytest.raises(BundleError):
        run.open_executor(tmp_path / "nowhere", RunOptions())


def test_cuda_without_a_driver_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "bundle", [make_record()])
    save(tmp_path / "in.npz")

    class NoDriver(FakeCuda):
        def cuInit(self, flags: int) -> Any:
            raise RuntimeError("libcuda.so.1")

    monkeypatch.setattr(run, "CudaDriver", lambda: CudaDriver(NoDriver()))
    with pytest.raises(DriverError, match="no NVIDIA driver"):
        run_npz(tmp_path / "bundle", str(tmp_path / "in.npz"), str(tmp_path / "o.npz"), RunOptions(driver="cuda"))
    assert not (tmp_path / "o.npz").exists()
