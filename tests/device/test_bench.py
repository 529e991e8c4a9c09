"""`fmha-gen bench` on a real GPU, a small problem: FMHA_GEN_BUNDLE names a bundle that was built elsewhere."""

from __future__ import annotations

import os

import pytest

from fmha_gen.bench import BenchOptions, bench_bundle
from fmha_gen.bench.report import markdown
from fmha_gen.errors import FmhaGenError
from fmha_gen.runtime.cuda import CudaDriver

pytestmark = pytest.mark.device


def test_bench_times_ours_and_the_peers() -> None:
    given = os.environ.get("FMHA_GEN_BUNDLE")
    if not given:
        pytest.skip("FMHA_GEN_BUNDLE names no bundle")
    try:
        CudaDriver().device(0)
    except FmhaGenError as e:
        pytest.skip(f"needs a GPU: {e}")
    report = bench_bundle(given, BenchOptions(seqlens=(1024,), tokens=4096, rounds=3))
    limit = report["device"]["limit_tflops"]
    for case in report["results"]:
        assert 0 < case["tflops"]["fmha_gen"] < limit, case
        for peer in report["peers"]:
            assert peer in case["tflops"] or case["refused"][peer], case
        if case["best_peer"]:
            assert case["difference"] < 0.02
    assert "fmha_gen" in report["versions"] and markdown(report)
