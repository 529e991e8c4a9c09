"""flash-attn-4's compiled forward kernels, executed: right O and LSE, and the same bits under every schedule.

Nobody here wrote these kernels, so they validate the simulator: its TMA, tcgen05, mbarrier and warp semantics, and that
its checks do not cry wolf. They lean on the register scoreboard where the PTX ISA asks for waits, hence the profile.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from fmha_gen.reference import attention_fp64, check, reference
from fmha_gen.sim import GlobalMemory, Launch, TensorMap, run
from tests.third_party.fa4_launch import (
    ADDRESSES,
    DYNAMIC_SMEM_BYTES,
    Build,
    Shape,
    divisor,
    launch_parameters,
    make_problem,
)

pytestmark = pytest.mark.sim

BUILDS = {
    "d128_full": Build(128, 128, False),
    "d128_causal": Build(128, 128, True),
    "d64_full": Build(64, 64, False),
    "d96_full": Build(96, 96, False),
    "d192_128_full": Build(192, 128, False),
    "d192_128_causal": Build(192, 128, True),
    "d128_one_query_tile": Build(128, 128, False, seqlen=128),
    "d128_causal_packed4": Build(128, 128, True, num_heads_q=4, num_heads_kv=1),
    "d128_window": Build(128, 128, False, window=True),
    "d128_causal_sink": Build(128, 128, True, sink=True),
    "d128_causal_softcap": Build(128, 128, True, softcap=2.0),
    "d128_causal_packed3": Build(128, 128, True, num_heads_q=6, num_heads_kv=2),
    "d128_e4m3": Build(128, 128, False, dtype="e4m3"),
    "d256_full_pair": Build(256, 256, False),
    "d128_full_pair": Build(128, 128, False, seqlen=4096),
    "d192_128_full_pair": Build(192, 128, False, seqlen=4096),
}
# (build, problem, scheduler seeds): lengths that do and do not fill tiles, ratios, several tiles of one CTA.
CASES = [
    ("d128_full", Shape(1, 128, 128), 3),
    ("d128_full", Shape(1, 257, 384), 3),
    ("d128_full", Shape(2, 300, 257, num_heads_kv=2, num_sms=2), 2),
    ("d128_causal", Shape(1, 128, 128), 3),
    ("d128_causal", Shape(2, 257, 257), 3),
    ("d128_causal", Shape(1, 384, 200), 2),
    ("d128_causal", Shape(1, 129, 511, num_heads_kv=2), 2),
    ("d64_full", Shape(2, 257, 384, num_sms=1), 3),
    ("d64_full", Shape(1, 1, 1), 2),
    ("d96_full", Shape(1, 200, 257), 2),
    ("d192_128_full", Shape(1, 257, 513, num_sms=1), 3),
    ("d192_128_causal", Shape(1, 384, 384), 3),
    ("d128_one_query_tile", Shape(2, 100, 384, num_sms=1), 2),
    ("d128_causal_packed4", Shape(2, 100, 257), 3),
    ("d128_window", Shape(1, 384, 384), 2),
    ("d128_window", Shape(1, 257, 100, window=(20, 30)), 2),  # rows without keys on both sides of the band
    ("d128_causal_sink", Shape(1, 384, 257, num_heads_kv=2), 2),
    ("d128_causal_softcap", Shape(1, 257, 257), 2),
    ("d128_full_pair", Shape(1, 700, 257, num_sms=2), 3),
    ("d256_full_pair", Shape(1, 384, 300), 2),
    ("d192_128_full_pair", Shape(1, 512, 384), 2),
]
IDS = [f"{name}-b{s.batch}-q{s.seqlen_q}-k{s.seqlen_k}-h{s.num_heads_kv}-sm{s.num_sms}" for name, s, _ in CASES]


def execute(ptx, build, shape, problem, seed):
    """Run once. The result, and the bits of out and lse."""
    memory = GlobalMemory()
    for name in problem.memory.keys() - {"out", "lse"}:
        memory.map(name, problem.memory[name], ADDRESSES[name], writable=False)
    outputs = {name: problem.memory[name].copy() for name in ("out", "lse")}
    for name, array in outputs.items():
        memory.map(name, array, ADDRESSES[name])
    params, grid = launch_parameters(build, shape)
    launch = Launch(ptx, grid=(grid, 1, 1), block=(512, 1, 1), cluster=(build.cluster, 1, 1),
                    dynamic_smem_bytes=DYNAMIC_SMEM_BYTES, params=params)  # fmt: skip
    return run(launch, memory, seed=seed, profile="scoreboard"), outputs


@pytest.mark.parametrize("name", BUILDS)
def test_parameters_fit_the_declared_table(fa4_ptx, name):
    declared = re.findall(r"\.param(?: \.align \d+)? \.(\w+) \S+?_param_\d+(?:\[(\d+)\])?,?\n", fa4_ptx(BUILDS[name]))
    sizes = [int(size) if size else {"u32": 4, "f32": 4, "u64": 8}[kind] for kind, size in declared]
    params, _ = launch_parameters(BUILDS[name], Shape(1, 256, 256))
    packed = [128 if isinstance(p, TensorMap) else len(p) if isinstance(p, bytes) else 4 for p in params]
    assert packed == sizes


def test_divisors_divide():
    for d in (1, 2, 3, 7, 64, 100, 12345, 2**31 - 1):
        raw = np.frombuffer(divisor(d)[:8], np.uint32)
        shift1, shift2 = divisor(d)[8:10]
        for n in (0, 1, d - 1, d, d + 1, 2 * d, 2**31 - 1, 2**32 - 1):
            high = int(raw[1]) * n >> 32
            assert ((n - high >> shift1) + high) >> shift2 == n // d, (n, d)


@pytest.mark.parametrize(("name", "shape", "seeds"), CASES, ids=IDS)
def test_output_is_attention_under_every_schedule(fa4_ptx, name, shape, seeds):
    build = BUILDS[name]
    ptx = fa4_ptx(build)
    problem = make_problem(build, shape, seed=shape.seqlen_q)
    first = None
    for seed in range(seeds):
        result, outputs = execute(ptx, build, shape, problem, seed)
        assert result.errors == [], "\n".join(map(str, result.errors))
        first = first or outputs
        for array in ("out", "lse"):
            assert np.array_equal(outputs[array].view(np.uint8), first[array].view(np.uint8)), f"{array} of seed {seed}"
    problem.memory.update(first)
    ref = reference(problem.q, problem.k, problem.v, "bf16", **problem.options(build, shape))
    assert check(problem.out, problem.lse, ref, "bf16") == []


def test_queries_by_cp_async(fa4_ptx):
    """Ratio 3 loads Q by cp.async: right numbers, and the one fault that this kernel is known to have is reported.

    It has no fence.proxy.async between the cp.async writes of Q and the tensor core's reads.
    """
    build, shape = BUILDS["d128_causal_packed3"], Shape(1, 256, 257)  # 3 * 256 rows fill every tile
    ptx, problem = fa4_ptx(build), make_problem(build, shape, seed=3)
    result, outputs = execute(ptx, build, shape, problem, seed=2)
    assert result.fault is None
    kinds = {f.kind for f in result.errors}
    assert kinds == {"proxy"} and all("cp.async" in f.message for f in result.errors), "\n".join(
        map(str, result.errors)
    )
    problem.memory.update(outputs)
    ref = reference(problem.q, problem.k, problem.v, "bf16", causal=True)
    assert check(problem.out, problem.lse, ref, "bf16") == []


def test_eight_bit_inputs(fa4_ptx):
    """e4m3 operands, P in e4m3 (half an ulp: 2^-4), bf16 output."""
    build, shape = BUILDS["d128_e4m3"], Shape(1, 300, 257)
    ptx, problem = fa4_ptx(build), make_problem(build, shape, seed=4)
    result, outputs = execute(ptx, build, shape, problem, seed=3)
    assert result.errors == []
    problem.memory.update(outputs)
    ref = attention_fp64(problem.q, problem.k, problem.v)
    assert (np.abs(problem.out - ref.out) <= 2**-8 * np.abs(ref.out) + 2**-4 * ref.abs_pv).all()
    assert np.abs(problem.lse - ref.lse).max() < 2e-4


def test_large_and_lopsided_logits(fa4_ptx):
    """Scores of the order of hundreds: the lazy rescale has to act, and most weights underflow."""
    build, shape = BUILDS["d128_full"], Shape(1, 256, 384)
    problem = make_problem(build, shape, seed=5, scale=30.0)
    result, outputs = execute(fa4_ptx(build), build, shape, problem, seed=1)
    assert result.errors == []
    problem.memory.update(outputs)
    assert check(problem.out, problem.lse, reference(problem.q, problem.k, problem.v, "bf16"), "bf16") == []


def test_a_shifted_operand_gives_wrong_numbers(fa4_ptx):
    """The comparison has teeth: a tensor map one key off must fail it."""
    build, shape = BUILDS["d64_full"], Shape(1, 128, 129)
    problem = make_problem(build, shape, seed=6)
    problem.memory["v"] = np.roll(problem.memory["v"], 1, axis=1)
    result, outputs = execute(fa4_ptx(build), build, shape, problem, seed=0)
    assert result.errors == []
    problem.memory.update(outputs)
    assert "out:" in check(problem.out, problem.lse, reference(problem.q, problem.k, problem.v, "bf16"), "bf16")[0]
