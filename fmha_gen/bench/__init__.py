"""Times a bundle's kernels on this machine's GPU, beside what users would otherwise run: ``fmha-gen bench``.

Every contender reads the same memory on the same stream; samples are interleaved, timed by device events, over input
sets that rotate past the L2; the median counts. A kernel whose numbers differ from a peer's is not timed: it is an
error. `docs/cli.md` says what comes out.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from typing import Any

from .. import __version__
from ..errors import DriverError, ProblemError, VerifyError
from ..runtime import Bundle
from ..runtime.cuda import CudaDriver
from .cases import BenchOptions, Case, cases_of, total_bytes
from .gpu import STREAM, Gpu
from .peers import PEERS, Peers, available
from .report import FORMAT_VERSION, OURS, result
from .timing import SAMPLE_MS, Contender, measure

MAX_DIFFERENCE = 0.02  # relative RMS against a peer that rounds as we do; a wrong kernel is off by far more
Progress = Callable[[str, int, int], None]


def bench_bundle(
    path: str | os.PathLike[str], options: BenchOptions, progress: Progress = lambda label, done, total: None
) -> dict[str, Any]:
    """Time the bundle in folder `path`; returns the report that ``fmha-gen bench`` writes as JSON.

    progress: called before each case with its label, the number of cases done, and of all.
    Raises DriverError: no GPU, or it failed; SelectionError: nothing to time; ProblemError: wrong options; VerifyError:
    wrong numbers.
    """
    driver = CudaDriver()
    try:
        device = driver.device(0)
    except DriverError as e:
        raise DriverError(f"bench: needs a GPU to measure, and this machine has none that works: {e}") from e
    bundle = Bundle.open(path, driver)
    cases = cases_of(bundle.manifest, device, options)
    names = _peers(options)
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(Gpu(driver))
        peers = stack.enter_context(Peers(names, device.ordinal).session()) if names else None
        gpu.fill(total_bytes(cases, gpu.l2_bytes), cases[0].problem.dtype)
        product = peers.matrix_product_tflops() if peers else None
        results = []
        for i, case in enumerate(cases):
            progress(f"{case.shape} {case.problem.mask} {case.problem.seqlen_q}", i, len(cases))
            results.append(_time_case(bundle, gpu, peers, case, options))
        return _report(bundle, gpu, peers, options, cases, results, product)


def _peers(options: BenchOptions) -> tuple[str, ...]:
    """Peers to run. Raises ProblemError for one that is asked for by name and unknown or not installed."""
    found = available()
    for name in options.peers or ():
        if name not in PEERS:
            raise ProblemError(f"bench: peer {name!r}: unknown; it is one of {', '.join(PEERS)}")
        if name not in found:
            raise ProblemError(
                f"bench: peer {name}: it needs torch with a GPU{' and fa3-fwd' if name == 'fa3' else ''}, which this "
                f"Python lacks; install it, or leave it out"
            )
    return found if options.peers is None else options.peers


def _time_case(bundle: Bundle, gpu: Gpu, peers: Peers | None, case: Case, options: BenchOptions) -> dict[str, Any]:
    num_sets = case.num_sets(gpu.l2_bytes)
    sets = [gpu.tensors(case, i) for i in range(num_sets)]
    causal = case.problem.mask == "causal"
    launches = [bundle.prepare(s["q"], s["k"], s["v"], s["out"], causal=causal, variant=case.kernel) for s in sets]
    contenders = [Contender(OURS, lambda i: launches[i](STREAM))]
    gpu.poison(case)
    contenders[0].launch(0)
    refused: dict[str, str] = {}
    difference = None
    for name in peers.names if peers else ():
        assert peers is not None
        contender = peers.contender(name, case, sets)
        try:
            theirs = contender.launch(0)
        except (RuntimeError, NotImplementedError, ValueError, AssertionError) as e:
            refused[name] = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            continue
        if difference is None:
            difference = _check(case, name, peers.difference(sets[0]["out"], theirs))
        contenders.append(contender)
    timings = measure(contenders, gpu, num_sets, options.rounds)
    gpu.drop_events()
    return result(case, timings, refused, difference)


def _check(case: Case, peer: str, difference: float) -> float:
    if not difference <= MAX_DIFFERENCE:  # NaN too
        raise VerifyError(
            f"{case.kernel}: {case.problem.describe()}: output differs from {peer}'s by {difference:.3g} (relative "
            f"RMS; at most {MAX_DIFFERENCE}); wrong numbers are not timed; run fmha-gen verify --driver cuda"
        )
    return round(difference, 6)


def _report(
    bundle: Bundle, gpu: Gpu, peers: Peers | None, options: BenchOptions, cases: list[Case],
    results: list[dict[str, Any]], product: float | None,
) -> dict[str, Any]:  # fmt: skip
    manifest = bundle.manifest
    return {
        "format_version": FORMAT_VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "bundle": {
            "name": manifest.name, "version": manifest.version, "generator": manifest.generator.version,
            "commit": manifest.generator.commit, "dirty": manifest.generator.dirty,
        },
        "device": gpu.describe(),
        "versions": {"fmha_gen": __version__} | (peers.versions() if peers else {}),
        "dtype": cases[0].problem.dtype,
        "peers": list(peers.names) if peers else [],
        "matrix_product_tflops": None if product is None else round(product, 1),
        "method": {
            "rounds": options.rounds, "sample_ms": SAMPLE_MS, "tokens": options.tokens,
            "sets": {f"{c.shape} {c.problem.mask} {c.problem.seqlen_q}": c.num_sets(gpu.l2_bytes) for c in cases},
        },
        "results": results,
    }  # fmt: skip


__all__ = ["BenchOptions", "bench_bundle"]
