"""Faults planted in flash-attn-4's d128 kernel, one at a time: the simulator must report each, or the result be wrong.

The unchanged kernel runs without an error on the same inputs (first test), so a report here is due to the fault.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from fmha_gen.reference import check, reference
from tests.third_party.fa4_launch import Build, Shape, make_problem
from tests.third_party.test_fa4 import execute

pytestmark = pytest.mark.sim

BUILD = Build(128, 128, False)
# Two tiles a CTA, four key blocks each, last rows of a tile missing. Large logits, so that O is rescaled.
SHAPE, LOGIT_SCALE = Shape(1, 300, 512, num_heads_kv=2, num_sms=2), 30.0

# name: (pattern, replacement, which occurrence, kinds that must report it; "numbers" is a wrong result)
MUTANTS = {
    "no fence before the output's TMA store": (r"fence\.proxy\.async\.shared::cta;", "", 0, {"proxy"}),
    "no wait for stores into tensor memory (P)": (r"tcgen05\.wait::st\.sync\.aligned;", "", 0, {"race"}),
    "no wait for stores into tensor memory (O)": (r"tcgen05\.wait::st\.sync\.aligned;", "", 4, {"race"}),
    "one arrival more expected": (r"(mbarrier\.init\S+\s+\[%r4\]), %r365;", r"\1, 2;", 0, {"deadlock"}),
    "transaction bytes too low": (
        r"mbarrier\.arrive\.expect_tx\.shared\.b64 %rd144, \[%r2\], %r534;",
        "mbarrier.arrive.expect_tx.shared.b64 %rd144, [%r2], 32752;",
        0,
        {"deadlock"},
    ),
    "a commit left out": (r"tcgen05\.commit[^;]*;", "", 0, {"deadlock"}),
    "tensor memory not freed": (r"tcgen05\.dealloc[^;]*;", "", 0, {"tmem-leak"}),
    "half of tensor memory allocated": (r"(tcgen05\.alloc\S+\s+\S+), %r412;", r"\1, 256;", 0, {"tmem-unallocated"}),
    "registers beyond the pool": (r"(setmaxnreg\.inc\.sync\.aligned\.u32)\s+192;", r"\1 208;", 0, {"deadlock"}),
    "operand stride halved": (r"(mov\.b32 smem_desc_b_hi), 0x40004040;", r"\1, 0x40004020;", 0, {"numbers"}),
    "operand major flipped": (r"mov\.b32 idesc, 0x8210490;", "mov.b32 idesc, 0x8200490;", 0, {"numbers"}),
    "P read one column too far": (r"\[tmem_a \+ 0x8\]", "[tmem_a + 0x9]", 0, {"numbers"}),
    "store's reads not awaited": (r"cp\.async\.bulk\.wait_group\.read\s+0;", "", 0, {"race", "bulk-exit"}),
    "a named barrier with more threads": (r"bar\.sync\s+(%r\d+), 64;", r"bar.sync \1, 96;", 0, {"bar-count"}),
}  # fmt: skip


def mutate(ptx: str, pattern: str, replacement: str, which: int) -> str:
    found = list(re.finditer(pattern, ptx))
    assert len(found) > which, f"{pattern!r} occurs {len(found)} times: the kernel is not the one described here"
    at = found[which]
    return ptx[: at.start()] + at.expand(replacement) + ptx[at.end() :]


@pytest.fixture(scope="module")
def case():
    problem = make_problem(BUILD, SHAPE, seed=1, scale=LOGIT_SCALE)
    return problem, reference(problem.q, problem.k, problem.v, "bf16")


def reports(ptx, case, seed):
    """Kinds of error reported, with "numbers" for a wrong result of a run that finished."""
    problem, ref = case
    result, outputs = execute(ptx, BUILD, SHAPE, problem, seed)
    kinds = {f.kind for f in result.errors}
    if result.fault is None:
        problem.memory.update({name: outputs[name] for name in ("out", "lse")})
        if check(problem.out, problem.lse, ref, "bf16"):
            kinds.add("numbers")
    problem.memory["out"] = np.full_like(problem.memory["out"], 0x7FFF)
    problem.memory["lse"] = np.full_like(problem.memory["lse"], np.nan)
    return kinds


def test_the_unchanged_kernel_is_clean(fa4_ptx, case):
    assert reports(fa4_ptx(BUILD), case, seed=0) == set()


@pytest.mark.parametrize("name", MUTANTS)
def test_fault_is_caught(fa4_ptx, case, name):
    pattern, replacement, which, expected = MUTANTS[name]
    found = reports(mutate(fa4_ptx(BUILD), pattern, replacement, which), case, seed=0)
    assert found >= expected, f"reported {found or 'nothing'}, expected {expected}"
