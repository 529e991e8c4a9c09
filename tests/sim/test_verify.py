"""`verify` itself: it passes what is right, and fails kernels that are broken on purpose, in ways that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fmha_gen.errors import FileError, SelectionError
from fmha_gen.manifest_io import read_manifest, read_record
from fmha_gen.verify import VerifyOptions, verify_bundle
from fmha_gen.verify.buffers import LAYOUTS, canary_problem, make_input, make_output
from fmha_gen.verify.cases import GENERATORS, full_cases, inputs, quick_cases
from tests.edited_bundle import one_kernel

pytestmark = [pytest.mark.sim, pytest.mark.compile]
KERNEL = "fmha_fwd-sm100a-bf16-d64-causal-q2"


def test_a_right_kernel_passes_and_the_proof_says_what_was_shown(core_bundle: Path, tmp_path: Path) -> None:
    root = one_kernel(core_bundle, tmp_path / "bundle", KERNEL)
    seen = []
    report = verify_bundle(root, VerifyOptions(quick=True, progress=lambda k, done, total: seen.append((done, total))))
    (kernel,) = report.kernels
    assert report.passed and kernel.problems == () and seen == [(1, 1)]
    assert 0.05 < kernel.worst_error <= 1 and kernel.num_seeds == 3 and kernel.num_problems == len(quick_cases())
    proof = json.loads((root / "proof.json").read_text())
    entry = proof["kernels"][kernel.id]
    record = read_record(root, read_manifest(root).kernels[0])
    assert entry["passed"] and entry["mode"] == "quick" and entry["driver"] == "sim"
    assert (entry["ptx_sha256"], entry["cubin_sha256"]) == (record.ptx.sha256, record.cubin.sha256)
    assert [c["name"] for c in entry["cases"]] == [c.name for c in quick_cases()]
    assert entry["cases"][0]["seeds"] == [0, 1, 2]
    assert json.loads(json.dumps(report.to_dict()))["kernels"][0]["passed"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ((r"tcgen05\.wait::st\.sync\.aligned;", ""), r"error|fault"),
        ((r"tcgen05\.wait::ld\.sync\.aligned;", ""), r"error|fault"),
        ((r"fence\.proxy\.async\.shared::cta;", ""), r"error|fault"),
        ((r"tcgen05\.fence::after_thread_sync;", ""), r"error|fault"),
        ((r"ex2\.approx\.ftz\.f32 (%\w+), (%\w+);", r"mov.f32 \1, \2;"), r"outside the tolerance"),
    ],
    ids=[
        "no wait for stores to TMEM",
        "no wait for loads from TMEM",
        "no proxy fence",
        "no fence after sync",
        "no exp2",
    ],
)
def test_a_broken_kernel_is_caught(core_bundle: Path, tmp_path: Path, edit: tuple[str, str], words: str) -> None:
    """A fence or wait taken out is found even where the numbers happen to be right; wrong arithmetic by its numbers."""
    root = one_kernel(core_bundle, tmp_path / "bundle", KERNEL, edit)
    report = verify_bundle(root, VerifyOptions(quick=True, seeds=1))
    assert not report.passed
    assert re.search(words, report.kernels[0].problems[0]), report.kernels[0].problems[0]
    entry = json.loads((root / "proof.json").read_text())["kernels"][report.kernels[0].id]
    assert entry["passed"] is False


def test_a_kernel_that_does_not_walk_on_to_its_next_tile_is_caught(core_bundle: Path, tmp_path: Path) -> None:
    """Right on a grid of one CTA per tile: only a smaller grid shows it."""
    root = one_kernel(
        core_bundle, tmp_path / "bundle", KERNEL, (r"mov\.u32\s+(%r\d+), %nctaid\.x;", r"mov.u32 \1, 1000000;")
    )
    report = verify_bundle(root, VerifyOptions(quick=True, seeds=1))
    assert not report.passed
    assert "many tiles per CTA" in report.kernels[0].problems[0]


def test_proofs_are_kept_for_other_kernels_and_not_downgraded(core_bundle: Path, tmp_path: Path) -> None:
    root = one_kernel(core_bundle, tmp_path / "bundle", KERNEL)
    proof = tmp_path / "proof.json"
    (kernel,) = verify_bundle(root, VerifyOptions(quick=True, seeds=1, proof=str(proof))).kernels
    data = json.loads(proof.read_text())
    data["kernels"][kernel.id]["mode"] = "full"
    data["kernels"]["another"] = {"passed": True}
    proof.write_text(json.dumps(data))
    verify_bundle(root, VerifyOptions(quick=True, seeds=1, proof=str(proof)))
    again = json.loads(proof.read_text())["kernels"]
    assert again["another"] == {"passed": True} and again[kernel.id]["mode"] == "full"
    data["kernels"][kernel.id]["ptx_sha256"] = "0" * 64  # of other files: it proves nothing about these
    proof.write_text(json.dumps(data))
    verify_bundle(root, VerifyOptions(quick=True, seeds=1, proof=str(proof)))
    assert json.loads(proof.read_text())["kernels"][kernel.id]["mode"] == "quick"


def test_misuse_is_refused_before_the_work(core_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="--only nothing: matches no kernel"):
        verify_bundle(core_bundle, VerifyOptions(only="nothing"))
    with pytest.raises(FileError, match="cannot be written .*--proof FILE"):
        verify_bundle(core_bundle, VerifyOptions(proof=str(tmp_path / "no such folder" / "proof.json")))


# ---- its parts


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (1, 1, 1, 96), (2, 0, 3, 64)])
def test_buffers_hold_the_tensor_amid_poison(layout: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float16).astype(np.float32)
    buffer = make_input("q", values, "fp16", layout, "nan")
    assert np.array_equal(buffer.view.view(np.float16).astype(np.float32), values)
    assert np.isnan(buffer.base[buffer.outside()].view(np.float16)).all()
    assert buffer.outside().sum() == buffer.base.size - values.size
    assert all(s % 8 == 0 for s in buffer.strides[:-1]) and buffer.strides[-1] == 1
    out = make_output("out", shape, "bf16", layout)
    out.view[...] = 0
    assert canary_problem(out) is None
    out.base[3] = 0
    assert canary_problem(out) == "out: 1 elements outside the tensor were written, the first at element -509"


def test_cases_are_what_they_say() -> None:
    names = [c.name for c in full_cases()]
    assert len(names) == len(set(names)) and {c.name for c in quick_cases()} <= set(names)
    lengths = {(c.seqlen_q, c.seqlen_k) for c in full_cases()}
    for axis in range(2):
        assert {pair[axis] for pair in lengths} >= {1, 2, 63, 127, 128, 129, 255, 257, 300, 511}
    assert {c.heads_q // c.heads_kv for c in full_cases()} >= {1, 2, 3, 7, 8}
    assert {c.data for c in full_cases()} == set(GENERATORS)
    for case in full_cases():
        if case.same_bits_as:
            same = next(c for c in full_cases() if c.name == case.same_bits_as)
            assert names.index(same.name) < names.index(case.name)
            for a, b in zip(inputs(case, 64, 64), inputs(same, 64, 64), strict=True):
                assert np.array_equal(a, b)
    growing = next(c for c in full_cases() if c.data == "growing")
    q, k, _ = inputs(growing, 64, 64)
    tops = [(q[0, :, 0] @ k[0, b * 128 : (b + 1) * 128, 0].T / 8).max(axis=1).mean() for b in range(4)]
    steps = np.array([tops[2] - tops[3], tops[1] - tops[2], tops[0] - tops[1]]) * np.log2(np.e)
    assert (steps[0] < 8 < steps[1]) and steps[2] < 8, "growth in log2 units on both sides of the threshold"
