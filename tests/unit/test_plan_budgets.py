"""SMEM, TMEM and register budgets against numbers derived by hand, and the refusals with their arithmetic."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fmha_gen.arch import ALIASES, ARCHS, arch_of_device, get_arch
from fmha_gen.errors import PlanError, SpecError
from fmha_gen.plan import make_plan, registers, smem, tmem
from fmha_gen.plan.tiles import Shape
from fmha_gen.spec import KernelSpec, Registers

ARCH = get_arch("sm_100a")
KIB = 1024
SPEC = KernelSpec("fmha_fwd", "sm_100a", "bf16", 128, 128, "full", q_stage=2, source="specs/x.yaml:14")
MLA = dataclasses.replace(SPEC, head_dim_qk=192)

# (shape, KiB of Q and O together, KiB of a stage, stages): the published budget table, also of kernels that come later.
TABLE = [
    (Shape(64, 64, 2), 64, 16, 10),
    (Shape(96, 96, 2), 96, 24, 5),
    (Shape(128, 128, 2), 128, 32, 3),
    (Shape(128, 128, 2, num_ctas=2), 128, 16, 6),
    (Shape(128, 128, 1), 64, 32, 5),
    (Shape(128, 128, 2, split=True), 128, 32, 3),
    (Shape(192, 128, 2), 96, None, 3),
    (Shape(192, 128, 2, num_ctas=2), 96, 24, 5),
    (Shape(192, 128, 1), 48, 48, 3),
    (Shape(256, 256, 1, num_ctas=2), 64, 32, 5),
    (Shape(256, 256, 1), 64, 64, 2),
    (Shape(128, 128, 2, element_bytes=1), 96, 16, 8),
]


@pytest.mark.parametrize(("shape", "qo", "stage", "stages"), TABLE, ids=lambda v: str(getattr(v, "dims", v)))
def test_the_published_smem_table(shape: Shape, qo: int, stage: int | None, stages: int) -> None:
    budget = smem.solve_budget(shape, None, ARCH, "x")
    assert budget.qo_bytes == qo * KIB
    assert budget.ring.stages == stages
    assert budget.payload_bytes <= 224 * KIB
    if stage is not None:
        assert (budget.ring.kind, budget.ring.stage_stride_bytes) == ("even", stage * KIB)


def test_mla_has_an_uneven_ring_and_fills_224_kib() -> None:
    budget = smem.solve_budget(Shape(192, 128, 2), None, ARCH, "x")
    ring = budget.ring
    assert (ring.kind, ring.stages, ring.size_bytes) == ("uneven", 3, (48 + 32 + 48) * KIB)
    assert budget.payload_bytes == 224 * KIB == ARCH.smem_bytes - smem.REST_BYTES
    assert ring.k_offset_bytes == (0, 32768, 81920)
    assert ring.v_offset_bytes == (0, 49152, 81920)
    assert (ring.stage_stride_bytes, ring.odd_shift_bytes) == (128 * 160 * 2, 128 * 32 * 2)


def test_a_k_in_stage_0_waits_for_the_k_of_the_round_before_in_stage_1() -> None:
    ring = smem.make_ring(Shape(192, 128, 2), 3)
    assert ring.k_waits == ((1, 0), (1,), (2,))
    assert ring.v_waits == ((0,), (1,), (2,))


@pytest.mark.parametrize("shape", [row[0] for row in TABLE if row[0].q_stage == 2])
def test_no_two_tiles_that_may_be_live_together_overlap_unguarded(shape: Shape) -> None:
    """By brute force over four turns: what a load overwrites must have been waited for by it or by a load before it."""
    ring = smem.make_ring(shape, smem.auto_kv_stages(shape))
    seen: list[tuple[int, int, int]] = []  # (stage, from, to) of each load
    freed = [-1] * ring.stages  # newest load of each stage whose release has been waited for
    for i in range(4 * ring.stages):
        s, is_v = i % ring.stages, i % 2
        start = (ring.v_offset_bytes if is_v else ring.k_offset_bytes)[s]
        end = start + (ring.v_bytes if is_v else ring.k_bytes)
        for w in (ring.v_waits if is_v else ring.k_waits)[s]:
            freed[w] = max((j for j, old in enumerate(seen) if old[0] == w), default=-1)
        for j, (old_stage, lo, hi) in enumerate(seen):
            assert not (lo < end and start < hi) or freed[old_stage] >= j, f"load {i} overwrites load {j}"
        assert 0 <= start and end <= ring.size_bytes
        seen.append((s, start, end))


def load_order(q_stage: int, blocks: int) -> str:
    """K and V of one tile in the order of the load warp: with one Q tile, K runs a block ahead."""
    return "kv" * blocks if q_stage == 2 else "k" + "kv" * (blocks - 1) + "v"


@pytest.mark.parametrize("q_stage", [1, 2])
@pytest.mark.parametrize("tile_n", [64, 96, 128])
@pytest.mark.parametrize("dims", [(192, 128), (128, 64), (64, 128), (128, 128)])
def test_every_load_ends_within_the_ring_whatever_the_tiles_lengths(
    dims: tuple[int, int], tile_n: int, q_stage: int
) -> None:
    shape = Shape(*dims, q_stage, tile_n=tile_n)
    for stages in range(2, 8):
        ring = smem.make_ring(shape, stages)
        ends = {
            "k": [start + ring.k_bytes for start in ring.k_offset_bytes],
            "v": [start + ring.v_bytes for start in ring.v_offset_bytes],
        }
        for blocks in range(1, 2 * stages + 2):
            loads = load_order(q_stage, blocks) * stages
            assert max(ends[op][i % stages] for i, op in enumerate(loads)) <= ring.size_bytes, (stages, blocks)


def test_a_paired_ring_keeps_k_in_large_and_v_in_small_stages() -> None:
    ring = smem.make_ring(Shape(192, 128, 2), 4)
    assert (ring.kind, ring.size_bytes) == ("paired", 2 * (48 + 32) * KIB)
    assert (ring.k_offset_bytes[0], ring.v_offset_bytes[1], ring.k_offset_bytes[2]) == (0, 48 * KIB, 80 * KIB)
    assert ring.k_waits == tuple((s,) for s in range(4))


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128)])
@pytest.mark.parametrize("q_stage", [1, 2])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_smem_layout(d: int, dv: int, q_stage: int, mask: str) -> None:
    plan = make_plan(dataclasses.replace(SPEC, head_dim_qk=d, head_dim_v=dv, q_stage=q_stage, mask=mask))
    own = sorted((b for b in plan.smem if b.alias_of is None), key=lambda b: b.offset_bytes)
    for a, b in zip(own, own[1:], strict=False):
        assert a.offset_bytes + a.size_bytes <= b.offset_bytes, (a, b)
    assert plan.smem_bytes == own[-1].offset_bytes + own[-1].size_bytes <= 232448
    for name in ("sQ", "sKV", "sO"):
        assert plan.buffer(name).offset_bytes % 1024 == 0
    for off in (*plan.kv_ring.k_offset_bytes, *plan.kv_ring.v_offset_bytes):
        assert off % 1024 == 0
    assert plan.smem_bytes - (own[2] if plan.o_aliases_q else own[3]).offset_bytes <= 3072
    assert plan.buffer("sScale").size_bytes == q_stage * 128 * 2 * 4
    o, q = plan.buffer("sO"), plan.buffer("sQ")
    assert plan.o_aliases_q == (d == 192)
    if plan.o_aliases_q:
        assert q.offset_bytes <= o.offset_bytes
        assert o.offset_bytes + o.size_bytes <= q.offset_bytes + q.size_bytes


def test_tmem_maps() -> None:
    plan = make_plan(MLA)
    cols = {r.name: (r.col, r.num_cols, r.inside) for r in plan.tmem}
    assert cols == {
        "s0": (0, 128, None),
        "s1": (128, 128, None),
        "p0": (64, 64, "s0"),
        "p1": (192, 64, "s1"),
        "o0": (256, 128, None),
        "o1": (384, 128, None),
    }
    assert plan.tmem_alloc_cols == 512
    d64 = make_plan(dataclasses.replace(SPEC, head_dim_qk=64, head_dim_v=64))
    assert (d64.region("o0").col, d64.region("o1").col) == (256, 320)
    assert tmem.free_ranges(d64.tmem, 512) == ((384, 128),)
    one = make_plan(dataclasses.replace(SPEC, q_stage=1))
    assert [r.name for r in one.tmem] == ["s0", "s1", "p0", "p1", "o0"]
    fp8 = tmem.solve_tmem(Shape(128, 128, 2, element_bytes=1), ARCH, "x")
    assert next(r for r in fp8 if r.name == "p0").num_cols == 32


def test_the_auto_register_splits() -> None:
    """192/72/56 everywhere up to (192, 128); with one Q tile the empty warpgroup's share goes to the others."""
    want = {(2, 64): (192, 72, 56), (2, 128): (192, 72, 56), (2, 192): (192, 72, 56), (1, 64): (192, 72, 120)}
    for (q_stage, d), split in want.items():
        for mask in ("full", "causal"):
            spec = dataclasses.replace(SPEC, head_dim_qk=d, head_dim_v=min(d, 128), mask=mask, q_stage=q_stage)
            plan = make_plan(spec)
            assert plan.spec.registers == split, (d, mask, q_stage)
            assert sum(r.num_threads * r.num_regs for r in plan.roles) <= 65536
    d256 = make_plan(dataclasses.replace(SPEC, head_dim_qk=256, head_dim_v=256, q_stage=1))
    assert d256.spec.registers == (256, 160, 48)


def test_wider_blocks_take_more_softmax_registers() -> None:
    wide = dataclasses.replace(SPEC, head_dim_qk=64, head_dim_v=64, q_stage=1)
    assert make_plan(dataclasses.replace(wide, tile_n=160)).spec.registers == (224, 72, 104)
    plan = make_plan(dataclasses.replace(wide, tile_n=192))
    assert plan.spec.registers == (256, 72, 88)
    assert "a row of S and 64 more" in dict(plan.reasons)["registers"]
    assert make_plan(dataclasses.replace(wide, tile_n=96)).spec.registers == (192, 72, 120)


def test_every_warp_has_one_role_and_every_warpgroup_one_count() -> None:
    for q_stage in (1, 2):
        roles = make_plan(dataclasses.replace(SPEC, q_stage=q_stage)).roles
        by_warp = {w: r for r in roles for w in r.warp_ids}
        assert sorted(by_warp) == list(range(16))
        assert sum(len(r.warp_ids) for r in roles) == 16
        for group in range(4):
            assert len({by_warp[w].num_regs for w in range(4 * group, 4 * group + 4)}) == 1
        assert {r.name: r.setmaxnreg for r in roles}["softmax0"] == "inc"
        assert {r.name: r.setmaxnreg for r in roles}["mma"] == "dec"


def test_a_spec_can_say_the_split() -> None:
    plan = make_plan(dataclasses.replace(MLA, registers=Registers(200, 64, 48)))
    assert [r.num_regs for r in plan.roles] == [200, 200, 64, 48, 48, 48, 48]
    assert "registers" not in dict(plan.reasons)
    same = make_plan(dataclasses.replace(MLA, registers=Registers(176, 128, 32)))
    assert same.role("correction").setmaxnreg == "keep"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"kv_stage": 4},
            "specs/x.yaml:14: kv_stage=4: needs 262144 B SMEM (q 65536 + o 65536 + kv 4x32768), sm_100a allows 232448; "
            "use kv_stage 2 to 3",
        ),
        (
            {"kv_stage": 1},
            "kv_stage=1: K and V alternate through one ring, in which a V is still read while the next K must arrive: "
            "2 to 32 stages; use kv_stage 2 to 3",
        ),
        (
            {"head_dim_qk": 192, "kv_stage": 4},
            "needs 262144 B SMEM (q over o 98304 + kv 2x49152+2x32768), sm_100a allows 232448; use kv_stage 2 to 3",
        ),
        (
            {"head_dim_qk": 256, "head_dim_v": 256},
            "q_stage=2, head_dim_v=256, tile.n=128: needs 768 TMEM columns (S 2x128 + O 2x256), sm_100a has 512; use "
            "q_stage 1",
        ),
        (
            {"tile_n": 192},
            "needs 640 TMEM columns (S 2x192 + O 2x128), sm_100a has 512; use q_stage 1 or tile.n <= 128",
        ),
        ({"tile_n": 100}, "tile.n=100: softmax walks 32 keys at a time"),
        ({"tile_n": 32}, "use a multiple of 32 from 64 to 192"),
        ({"tile_m": 64}, "tile.m=64: a softmax thread owns one of 128 TMEM lanes; use tile.m: 128"),
        ({"q_stage": 3}, "q_stage=3: two softmax warpgroups serve at most 2 Q tiles of 128 rows; use q_stage 1 or 2"),
        ({"head_dim_qk": 72}, "head_dim_qk=72: rows are moved in swizzle atoms of 32 or 64 elements"),
        ({"head_dim_v": 512}, "head_dim_v=512"),
        (
            {"registers": Registers(208, 64, 48)},
            "registers={softmax: 208, correction: 64, other: 48}: needs 2x208 + 64 + 1x48 = 528 registers per thread "
            "of the four warpgroups, sm_100a has 512 (65536 / 128); use softmax <= 200",
        ),
        ({"registers": Registers(196, 64, 48)}, "softmax 196 must be a multiple of 8 from 128 to 256"),
        ({"registers": Registers(120, 64, 48), "tile_n": 64}, "softmax 120 must be a multiple of 8 from 128 to 256"),
        (
            {"registers": Registers(152, 64, 48)},
            "tile.n=128, registers={softmax: 152, correction: 64, other: 48}: a softmax thread holds a row of S in 128 "
            "registers and needs 48 more at least, 176; correction and the others need 24 each, setmaxnreg gives at "
            "most 256; use softmax 192",
        ),
        ({"registers": Registers(152, 256, 24)}, "use fewer correction registers or q_stage 1"),
        ({"q_stage": 1, "tile_n": 192, "registers": Registers(232, 72, 88)}, "use softmax 256"),
        ({"q_stage": 1, "tile_n": 224, "head_dim_qk": 64, "head_dim_v": 64}, "use tile.n <= 192"),
        ({"tile_n": 256, "head_dim_qk": 64, "head_dim_v": 64}, "sm_100a has 512; use tile.n <= 128"),
        ({"tile_n": 224, "head_dim_qk": 96, "head_dim_v": 64}, "sm_100a has 512; use tile.n <= 128"),
        (
            {"head_dim_qk": 64, "head_dim_v": 64, "tile_n": 192},
            "a softmax thread holds a row of S in 192 registers and needs 48 more at least, 240; correction and the "
            "others need 24 each, setmaxnreg gives at most 256; use tile.n <= 128 or q_stage 1",
        ),
        (
            {"head_dim_qk": 64, "head_dim_v": 64, "tile_n": 224, "q_stage": 1},
            "use tile.n <= 192",
        ),
        ({"registers": Registers(192, 16, 48)}, "correction 16 must be a multiple of 8 from 24 to 256"),
        ({"registers": Registers(176, 64, 136)}, "other 136 must be a multiple of 8 from 24 to 128"),
        (
            {"exp2_emulation": 7},
            "exp2_emulation=7: an even number of a row's 128 exponentials per block, all outside the",
        ),
        ({"exp2_emulation": 98}, "last 32: 0 to 96; use 96"),
        ({"num_ctas": 2}, "num_ctas=2: CTA pairs are not built yet; use num_ctas: 1"),
        ({"sink": True}, "sink=true: not built yet"),
        ({"mask": "window"}, "mask=window: not built yet; use one of full, causal"),
        ({"schedule": "clc"}, "schedule='clc': not built; use one of static_persistent, longest_first"),
    ],
    ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items()) if isinstance(v, dict) else "",
)
def test_refusals_say_the_arithmetic_and_what_to_do(changes: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as e:
        make_plan(dataclasses.replace(SPEC, **changes))
    assert str(e.value).startswith("specs/x.yaml:14: ")
    assert says in str(e.value)


@pytest.mark.parametrize("q_stage", [1, 2])
@pytest.mark.parametrize("tile_n", range(32, 288, 32))
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128)], ids=str)
def test_what_a_refused_tile_is_advised_to_do_is_a_plan(dims: tuple[int, int], tile_n: int, q_stage: int) -> None:
    spec = dataclasses.replace(SPEC, head_dim_qk=dims[0], head_dim_v=dims[1], tile_n=tile_n, q_stage=q_stage)
    try:
        plan = make_plan(spec)
    except PlanError as e:
        advice = str(e).rpartition("; use ")[2]
    else:
        assert 64 <= tile_n <= (128 if q_stage == 2 else 192)
        assert plan.role("softmax0").num_regs >= tile_n + registers.ROW_STATE
        assert plan.exp2.emulated_elems <= (96 if tile_n <= 128 else 16), "more would spill beside a wide row"
        return
    sizes = [int(n) for n in re.findall(r"tile\.n <= (\d+)", advice) + re.findall(r"from 64 to (\d+)", advice)]
    assert sizes or "q_stage 1" in advice
    for n in sizes:
        make_plan(dataclasses.replace(spec, tile_n=min(n, 128) if q_stage == 2 and "multiple" in advice else n))
    if "q_stage 1" in advice:
        make_plan(dataclasses.replace(spec, q_stage=1))


def test_a_payload_that_only_the_rest_breaks_says_so() -> None:
    """(192, 128) with 224 KiB leaves 3072 B: 1 KiB more of tiles fits 227 KiB alone, but not with the rest."""
    budget = smem.solve_budget(Shape(192, 128, 2), None, ARCH, "x")
    tight = dataclasses.replace(ARCH, smem_bytes=budget.payload_bytes + 1024)
    with pytest.raises(
        PlanError, match=r"needs 232448 B SMEM \(q over o 98304 \+ kv 2x49152\+1x32768 \+ the rest 3072\)"
    ):
        smem.solve_budget(Shape(192, 128, 2), 3, tight, "x")


def test_many_small_stages_are_capped() -> None:
    assert smem.auto_kv_stages(Shape(32, 32, 1, tile_n=64)) == 32


def test_the_register_rule_counts_the_empty_warpgroup() -> None:
    assert registers.total_regs(Registers(192, 80, 120), 1) == 192 + 80 + 2 * 120
    assert registers.total_regs(Registers(192, 80, 48), 2) == 2 * 192 + 80 + 48


def test_arch_table_is_explicit() -> None:
    """Case A02: every accepted spelling is listed, and nothing is derived by comparing numbers."""
    assert set(ARCHS) == {"sm_100a", "sm_103a", "sm_90a"}
    for name in ("100f", "sm_110a", "sm_120a", "99z", "sm_100", "sm_103"):
        with pytest.raises(SpecError, match=r"use one of sm_100a, sm_103a, sm_90a"):
            get_arch(name)
    assert {get_arch(a).name for a in ALIASES} == set(ARCHS)
    b200, b300, h200 = (ARCHS[n] for n in ("sm_100a", "sm_103a", "sm_90a"))
    assert (b200.smem_bytes, b200.tmem_cols, b200.registers) == (227 * KIB, 512, 65536)
    assert (b200.mufu_per_clk, b300.mufu_per_clk, b200.mma_flop_per_clk, h200.mma_flop_per_clk) == (16, 32, 8192, 4096)
    assert arch_of_device((10, 3)) is b300
    assert arch_of_device((12, 0)) is None
