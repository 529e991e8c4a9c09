"""`fmha-gen explain`: the launcher's decision in words. Whatever it says must be what `select` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fmha_gen import explain as module
from fmha_gen.cli import cli
from fmha_gen.errors import DriverError, ProblemError, SelectionError
from fmha_gen.explain import device_for, explain, make_problem
from fmha_gen.runtime import Bundle, select
from fmha_gen.runtime.cuda import CudaDriver
from tests.launcher_fixtures import B200, FakeCuda, make_record, small_manifest, write_bundle

RECORDS = [
    make_record(), make_record(q_stage=1), make_record(mask="causal"), make_record(dtype="fp16"),
    make_record(dims=(192, 128), rank=1), make_record(arch="sm_90a"),
]  # fmt: skip
MANIFEST = small_manifest(*(r for r, _, _ in RECORDS))
FULL_Q2, FULL_Q1, CAUSAL, FP16, MLA, HOPPER = (r.id for r, _, _ in RECORDS)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests decides nothing."""

    class NoDriver(CudaDriver):
        def device(self, ordinal: int) -> Any:
            raise DriverError("cuda: no NVIDIA driver")

    monkeypatch.setattr(module, "CudaDriver", NoDriver)


def states(found: module.Explanation) -> dict[str, str]:
    return {v.kernel: v.state for v in found.verdicts}


@pytest.mark.parametrize("changes", [{}, {"seqlen_q": 5}, {"causal": True}, {"dtype": "fp16"}, {"head_dim": 192}])
def test_the_chosen_kernel_is_the_launchers(changes: dict[str, Any]) -> None:
    problem = make_problem(MANIFEST, **{"head_dim": 128, "head_dim_v": 128} | changes)
    found = explain(MANIFEST, problem, B200)
    assert found.kernel == select(MANIFEST, problem, B200).id == found.verdicts[0].kernel
    assert len(found.verdicts) == len(RECORDS) and found.reasons == () and found.spec_lines == ()


def test_every_other_kernel_has_its_reason() -> None:
    found = explain(MANIFEST, make_problem(MANIFEST, head_dim=128), B200)
    why = {v.kernel: (v.state, *v.why) for v in found.verdicts}
    assert why == {
        FULL_Q2: ("chosen", "for 129 and more query rows; the problem has 4096"),
        FULL_Q1: ("serves", "for 0 to 128 query rows; the problem has 4096"),
        CAUSAL: ("rejected", "mask causal, wanted full"),
        FP16: ("rejected", "dtype fp16, wanted bf16"),
        MLA: ("rejected", "head_dim (192, 128), wanted (128, 128)"),
        HOPPER: ("rejected", "arch sm_90a runs on compute capability 9.0 only"),
    }


def test_rank_and_id_decide_between_equals() -> None:
    import dataclasses

    twin = dataclasses.replace(RECORDS[0][0], id="fmha_fwd-z", rank=0)
    slow = dataclasses.replace(RECORDS[0][0], id="fmha_fwd-a", rank=3)
    found = explain(small_manifest(RECORDS[0][0], twin, slow), make_problem(MANIFEST, head_dim=128), B200)
    assert {v.kernel: v.why for v in found.verdicts[1:]} == {
        "fmha_fwd-a": ("rank 3 comes after rank 0",), "fmha_fwd-z": ("same rank, later id",)
    }  # fmt: skip


def test_a_problem_without_a_kernel_has_reasons_and_the_spec_line_to_add() -> None:
    found = explain(MANIFEST, make_problem(MANIFEST, head_dim=128, sink=True), B200)
    assert found.kernel is None and found.reasons == ("built without sink",)
    assert found.spec_lines == () and found.not_built == ("sink is not built yet for sm_100a",)
    found = explain(MANIFEST, make_problem(MANIFEST, head_dim=96), B200)
    assert found.spec_lines[-1].endswith("head_dim: 96, mask: full}") and found.not_built == ()
    assert set(states(found).values()) == {"rejected"}


def test_a_variant_that_does_not_match_is_a_reason_and_one_that_matches_nothing_an_error() -> None:
    problem = make_problem(MANIFEST, head_dim=128)
    found = explain(MANIFEST, problem, B200, "*-q1-*")
    assert found.kernel == FULL_Q1 and states(found)[FULL_Q2] == "rejected"
    found = explain(MANIFEST, problem, B200, "*-causal-*")
    assert found.kernel is None and found.spec_lines == found.not_built == ()
    assert found.reasons == (f"{FULL_Q2} serves it, but variant '*-causal-*' leaves it out",)
    with pytest.raises(SelectionError, match="matches no kernel"):
        explain(MANIFEST, problem, B200, "nope")


def test_the_device_is_the_machines_or_the_named_or_the_bundles_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    only = small_manifest(RECORDS[0][0])
    assert device_for(only, None).compute_capability == (10, 0)
    assert (
        device_for(MANIFEST, "sm90a").compute_capability == device_for(MANIFEST, "sm_90a").compute_capability == (9, 0)
    )
    with pytest.raises(ProblemError, match="the bundle holds sm_100a, sm_90a; say which with --arch"):
        device_for(MANIFEST, None)
    with pytest.raises(ProblemError, match="arch: 'sm_42'"):
        device_for(MANIFEST, "sm_42")
    monkeypatch.setattr(module, "CudaDriver", lambda: CudaDriver(FakeCuda(capabilities=((10, 3),))))
    assert device_for(MANIFEST, None).compute_capability == (10, 3)


def test_problems_are_checked_as_the_launcher_checks_them() -> None:
    assert make_problem(MANIFEST, head_dim=128, window=(None, 0)).mask == "causal"
    assert make_problem(MANIFEST, head_dim=128, heads=8, heads_kv=2, seqlen_k=9).ratio == 4
    for wrong in ({"heads": 8, "heads_kv": 3}, {"seqlen_q": -1}, {"causal": True, "window": (None, 3)}):
        with pytest.raises(ProblemError):
            make_problem(MANIFEST, head_dim=128, **wrong)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle"), RECORDS)[0]


def run(*args: object) -> Any:
    return CliRunner().invoke(cli, ["explain", *map(str, args)])


def test_command_line(path: Path) -> None:
    result = run(path, "--head-dim", 128, "--arch", "sm_100a", "--seqlen-q", 64)
    assert result.exit_code == 0, result.output
    assert f"kernel   {FULL_Q1}" in result.stdout and "seqlen 64 x 64" in result.stdout
    result = run(path, "--head-dim", 128, "--arch", "sm_100a", "--window", 128, 0)
    assert result.exit_code == 1
    assert "kernel   none serves it\nbecause  mask full, wanted window\n" in result.stdout
    assert "no spec  mask window is not built for sm_100a; built are full, causal\n" in result.stdout
    result = run(path, "--head-dim", 128)
    assert result.exit_code == 1 and "say which with --arch" in result.stderr


def test_json(path: Path) -> None:
    report = json.loads(run(path, "--head-dim", 128, "--arch", "sm_90a", "--causal", "--json").stdout)
    assert list(report) == ["problem", "device", "kernel", "reasons", "spec_lines", "not_built", "kernels"]
    assert report["kernel"] is None and report["spec_lines"][0] == "archs: [sm_90a]"
    assert report["reasons"] == ["arch sm_100a runs on compute capability 10.0 only", "mask full, wanted causal"]
    assert {tuple(k) for k in report["kernels"]} == {("id", "state", "why")}
    report = json.loads(run(path, "--head-dim", 128, "--arch", "sm_90a", "--json").stdout)
    assert report["kernel"] == HOPPER == report["kernels"][0]["id"]


def test_bundle_covers_is_the_same_decision(path: Path) -> None:
    bundle = Bundle.open(path, CudaDriver(FakeCuda()))
    assert bundle.covers(make_problem(MANIFEST, head_dim=128)) == ()
    assert bundle.covers(make_problem(MANIFEST, head_dim=128, causal=True), B200) == ()
    assert bundle.covers(make_problem(MANIFEST, head_dim=80, dtype="bf16")) != ()
