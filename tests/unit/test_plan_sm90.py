"""Plans of sm_90a kernels: budgets by hand, pipelines proven, faults in them found, refusals with arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from fmha_gen.errors import PlanError
from fmha_gen.plan import KernelPlan, describe, make_plan, petri
from fmha_gen.plan.describe import to_text
from fmha_gen.plan.sm90 import barriers
from fmha_gen.plan.sm90.choices import CHOICES
from fmha_gen.render import render
from fmha_gen.spec import KernelSpec, Registers

SPEC = KernelSpec("fmha_fwd", "sm_90a", "bf16", 128, 128, "full", source="s.yaml:7")
SHAPES = sorted(CHOICES)


def findings(plan: KernelPlan, table: tuple | None = None) -> tuple[str, ...]:
    assert plan.wgmma is not None
    return barriers.findings(table or plan.barriers, plan.spec, plan.wgmma.consumers, plan.smem)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_shape_has_a_plan_that_renders(shape, dtype):
    d, dv, mask = shape
    plan = make_plan(SPEC.replace(head_dim_qk=d, head_dim_v=dv, mask=mask, dtype=dtype))
    assert plan.spec.auto_fields == () and plan.smem_bytes <= 232448 and plan.tmem == ()
    assert plan.num_threads * plan.launch_regs <= 65536
    assert plan.serves.min_rows == 0 and plan.serves.max_rows is None
    text = render(plan).text
    assert f"TILE_N = {plan.spec.tile_n}\n" in text and ("first_tile(problem)" in text) == (mask == "causal")
    assert {t.title for t in describe(plan)} >= {"shared memory", "wgmma", "pipelines"}


def test_shared_memory_of_d128_by_hand():
    """Two Q tiles 2 x 32 KiB, K and V rings 2 x 2 x 32 KiB, O 32 KiB, and 12 mbarriers: 224 KiB + 96 B."""
    plan = make_plan(SPEC.replace(tile_m=128, tile_n=128, q_stage=2))
    assert [(b.name, b.offset_bytes, b.size_bytes) for b in plan.smem] == [
        ("sQ", 0, 65536),
        ("sK", 65536, 65536),
        ("sV", 131072, 65536),
        ("sO", 196608, 32768),
        ("mbarriers", 229376, 96),
    ]
    assert plan.smem_bytes == 229472


@pytest.mark.parametrize(
    ("changes", "boxes", "smem"),
    [
        ({"head_dim_qk": 192, "tile_n": 112}, 2, (48 + 84 + 56 + 32) * 1024 + 80),  # Q + K + V leave 39 of 227 KiB
        ({"head_dim_qk": 192, "tile_n": 128}, 1, (48 + 96 + 64 + 16) * 1024 + 80),  # 19 KiB: half of O
        ({"head_dim_qk": 256, "head_dim_v": 256, "tile_n": 64}, 2, (64 + 64 + 64 + 32) * 1024 + 80),  # half of four
        ({"head_dim_qk": 96, "head_dim_v": 96, "tile_n": 192}, 3, (24 + 72 + 72 + 24) * 1024 + 80),
        (
            {"head_dim_qk": 96, "head_dim_v": 96, "tile_n": 128, "kv_stage": 3, "q_stage": 2},
            3,
            (48 + 144 + 24) * 1024 + 128,
        ),
    ],
)
def test_o_leaves_in_pieces_where_it_has_no_room(changes, boxes, smem):
    plan = make_plan(SPEC.replace(tile_m=128, **changes))
    assert plan.wgmma is not None and plan.wgmma.o_piece_boxes == boxes and plan.smem_bytes == smem


def test_descriptors_by_hand():
    """wgmma descriptors: SBO in bits 32-45, LBO in 16-29, swizzle 128B = 1 in bits 62-63; units of 16 bytes."""
    plan = make_plan(SPEC.replace(tile_m=128, tile_n=176))
    qk, pv = plan.umma_qk, plan.umma_pv
    assert qk.b.base == 1 << 62 | (1024 >> 4) << 32 | 1 << 16
    assert pv.b.base == 1 << 62 | (1024 >> 4) << 32 | (176 * 128 >> 4) << 16
    assert qk.a is not None and qk.a.k_step_bytes == (0, 32, 64, 96, 16384, 16416, 16448, 16480)
    assert qk.b.k_step_bytes[4] == 176 * 128 and pv.b.k_step_bytes == tuple(2048 * i for i in range(11))
    narrow = make_plan(SPEC.replace(head_dim_qk=96, head_dim_v=96, tile_m=128, tile_n=128))
    assert narrow.umma_qk.b.base == 2 << 62 | (512 >> 4) << 32 | 1 << 16  # rows of 64 bytes, swizzle 64B


def test_registers_of_two_and_three_consumers():
    two, three = (make_plan(SPEC.replace(tile_m=m, tile_n=96)) for m in (128, 192))
    assert (two.launch_regs, two.num_threads, two.role("consumer1").num_regs) == (168, 384, 240)
    assert (three.launch_regs, three.num_threads, three.role("consumer2").num_regs) == (128, 512, 160)
    assert [r.warp_ids[0] for r in three.roles] == [0, 4, 8, 12, 13]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("q_in_registers", [True, False])
def test_pipelines_are_proven(shape, overlap, q_in_registers):
    d, dv, mask = shape
    for tile_m in (128, 192):
        spec = SPEC.replace(head_dim_qk=d, head_dim_v=dv, mask=mask, tile_m=tile_m, tile_n=48)
        plan = make_plan(spec.replace(overlap=overlap, q_in_registers=q_in_registers))
        assert findings(plan) == ()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("q_stage", "kv_stage"), [(1, 2), (1, 3), (2, 2)])
def test_pipelines_across_tiles_are_proven(shape, q_stage, kv_stage):
    d, dv, mask = shape
    spec = SPEC.replace(head_dim_qk=d, head_dim_v=dv, mask=mask, tile_n=32, q_stage=q_stage, kv_stage=kv_stage)
    for tile_m in (128, 192)[: 3 - q_stage]:  # two Q tiles of 192 rows of 256 do not fit
        plan = make_plan(spec.replace(tile_m=tile_m, across_tiles=True))
        assert findings(plan) == ()


@pytest.mark.parametrize(
    ("changes", "unseen"),
    [
        ({"tile_n": 64}, (1, 0)),  # 64 rows below the first warpgroup's: one block, wherever the diagonal falls
        ({"tile_n": 48}, (2, 0)),  # one or two
        ({"tile_n": 80}, (0, 0)),  # none or one
        ({"tile_n": 64, "tile_m": 192}, (2, 1, 0)),
        ({"tile_n": 48, "tile_m": 192}, (0, 0, 0)),  # up to three, and a ring of two stages
        ({"tile_n": 48, "tile_m": 192, "kv_stage": 3}, (3, 2, 0)),
        ({"tile_n": 64, "across_tiles": False}, (0, 0)),
        ({"tile_n": 64, "mask": "full"}, (0, 0)),
    ],
)
def test_unseen_blocks_are_passed_where_the_geometry_has_them(changes, unseen):
    spec = SPEC.replace(**{"mask": "causal", "across_tiles": True, "tile_m": 128, **changes})
    plan = make_plan(spec)
    assert plan.wgmma is not None and plan.wgmma.unseen_blocks == unseen and findings(plan) == ()
    source, text = render(plan).text, to_text(plan)
    assert ("count_unseen_blocks" in source) == any(unseen)
    assert ("passed without a product" in text) == any(unseen)
    assert ("multiplied and masked" in text) == (plan.spec.mask == "causal" and not any(unseen))


def test_unseen_blocks_of_the_defaults():
    plans = {s: make_plan(SPEC.replace(head_dim_qk=s[0], head_dim_v=s[1], mask=s[2])) for s in SHAPES}
    skipping = [s for s, plan in plans.items() if plan.wgmma is not None and plan.wgmma.skips_unseen]
    assert skipping == [(256, 256, "causal")]


@pytest.mark.parametrize("unseen", [(0, 0), (1, 0), (2, 0)])
def test_the_programs_pass_unseen_blocks_but_never_all(unseen):
    """Products by hand: 5 blocks of which 2 are unseen leave 3, and of 1 or 2 blocks one is seen."""
    plan = make_plan(SPEC.replace(mask="causal", tile_m=128, tile_n=48, across_tiles=True))
    for blocks in ((0,), (1,), (2,), (5,), (1, 2, 0, 5, 1)):
        actors = barriers._actors(plan.spec, plan.smem, blocks, unseen, 1)
        assert not petri.run(actors, {b.name: b.arrive_count for b in plan.barriers})
        for name, most in (("consumer0.0", unseen[0]), ("consumer0.1", unseen[0]), ("consumer1.1", unseen[1])):
            products = [op for op in actors[name] if getattr(op, "what", "").startswith("product")]
            assert len(products) == 2 * sum(max(n - most, min(n, 1)) for n in blocks)


def test_more_unseen_blocks_than_stages_would_wait_for_ever():
    """The V that a warpgroup holds until its first S keeps K of the fourth block away from a ring of two stages."""
    plan = make_plan(SPEC.replace(mask="causal", tile_m=192, tile_n=48, across_tiles=True))
    counts = {b.name: b.arrive_count for b in plan.barriers}
    assert not petri.run(barriers._actors(plan.spec, plan.smem, (5, 5), (2, 2, 0), 1), counts)
    assert any("deadlock" in x for x in petri.run(barriers._actors(plan.spec, plan.smem, (5, 5), (3, 2, 0), 1), counts))


@pytest.mark.parametrize("change", ["k", "v"])
def test_an_unseen_block_that_is_not_released_is_found(change, monkeypatch):
    plan = make_plan(SPEC.replace(mask="causal", tile_m=128, tile_n=64, across_tiles=True))
    release, seen = barriers._Consumer.release, []

    def forget_once(self, operand):
        if operand == change and not seen and isinstance(self.ops[-1], petri.Wait):  # no product since it landed
            seen.append(operand)
            self.used[operand] += 1
        else:
            release(self, operand)

    monkeypatch.setattr(barriers._Consumer, "release", forget_once)
    actors = barriers._actors(plan.spec, plan.smem, (5, 5), (1, 0), 1)
    found = petri.run(actors, {b.name: b.arrive_count for b in plan.barriers})
    assert seen and any(word in text for text in found for word in ("deadlock", "race"))


def test_schedules_of_the_defaults():
    chosen = {s: make_plan(SPEC.replace(head_dim_qk=s[0], head_dim_v=s[1], mask=s[2])).schedule.name for s in SHAPES}
    causal = {d: name for (d, _, mask), name in chosen.items() if mask == "causal"}
    assert causal == {64: "balanced", 96: "balanced", 128: "balanced", 192: "paired", 256: "balanced"}
    assert {name for (_, _, mask), name in chosen.items() if mask == "full"} == {"static_persistent"}


@pytest.mark.parametrize(
    ("changes", "across"),
    [({}, True), ({"warpgroup_order": "exp"}, False), ({"overlap": False}, False), ({"q_in_registers": True}, False)],
)
def test_tiles_follow_each_other_where_the_other_choices_allow_it(changes, across):
    assert make_plan(SPEC.replace(**changes)).spec.across_tiles is across
    with_it = SPEC.replace(across_tiles=True, **changes)
    if across:
        assert make_plan(with_it).spec.across_tiles
    else:
        with pytest.raises(PlanError, match=r"s.yaml:7: across_tiles=true: .*use overlap: true"):
            make_plan(with_it)


@pytest.mark.parametrize(
    ("changes", "recompute"),
    [
        ({}, False),
        ({"head_dim_qk": 96, "head_dim_v": 96}, True),
        ({"head_dim_qk": 96, "head_dim_v": 96, "kv_stage": 2}, False),
        ({"head_dim_qk": 96, "head_dim_v": 96, "tile_n": 144}, False),
        ({"head_dim_qk": 96, "head_dim_v": 96, "q_in_registers": True}, False),
        ({"head_dim_qk": 64, "head_dim_v": 64, "tile_m": 192}, True),
        ({"head_dim_qk": 64, "head_dim_v": 64, "tile_m": 192, "tile_n": 96, "kv_stage": 2}, False),
        ({"tile_m": 192, "tile_n": 64, "q_in_registers": True}, False),
        ({"head_dim_qk": 64, "head_dim_v": 64, "tile_m": 192, "overlap": False}, False),
    ],
)
def test_s_is_computed_again_where_registers_or_stages_are_for_it(changes, recompute):
    assert make_plan(SPEC.replace(**changes)).wgmma.recompute_s is recompute
    if changes.get("q_in_registers") or changes.get("overlap") is False:
        with pytest.raises(PlanError, match=r"s.yaml:7: recompute_s=true: .*use overlap: true and q_in_registers: fal"):
            make_plan(SPEC.replace(recompute_s=True, **changes))


@pytest.mark.parametrize(("mask", "rows"), [("full", 3072), ("causal", 8192)])
def test_192_rows_are_for_long_sequences(mask, rows):
    spec = SPEC.replace(head_dim_qk=64, head_dim_v=64, mask=mask)
    short, long = make_plan(spec), make_plan(spec.replace(tile_m=192))
    assert (short.serves.min_rows, long.serves.min_rows) == (0, rows)
    assert (long.rank, short.rank) == (0, 1) and short.serves.max_rows is long.serves.max_rows is None
    assert (long.spec.tile_n, long.spec.kv_stage, long.wgmma.consumers) == (112, 3, 3)
    assert make_plan(SPEC.replace(tile_m=192, tile_n=64)).serves.min_rows == 0
    for untuned in ({"tile_n": 96}, {"kv_stage": 2}, {"recompute_s": False, "tile_n": 64}, {"warpgroup_order": "gemm"}):
        other = make_plan(spec.replace(tile_m=192, **untuned))
        assert (other.serves.min_rows, other.rank) == (0, 2)
    assert make_plan(spec.replace(warpgroup_order="gemm")).rank == 2


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] != 64], ids=str)
def test_a_tile_that_was_not_tuned_needs_its_keys(shape):
    d, dv, mask = shape
    with pytest.raises(PlanError, match=r"s.yaml:7: tile.m=192: no tile.n was tuned .*give tile.n too"):
        make_plan(SPEC.replace(head_dim_qk=d, head_dim_v=dv, mask=mask, tile_m=192))


@pytest.mark.parametrize("name", ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty"])
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("across", [True, False])
def test_a_wrong_arrive_count_is_found(name, off, across):
    plan = make_plan(SPEC.replace(tile_m=128, tile_n=128, across_tiles=across))
    table = tuple(
        dataclasses.replace(b, arrive_count=b.arrive_count + off) if b.name == name else b for b in plan.barriers
    )
    assert any(word in text for text in findings(plan, table) for word in ("deadlock", "race"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_m": 64}, r"s.yaml:7: tile.m=64: .*use 128 or 192"),
        ({"tile_n": 136}, r"tile.n=136: .*multiple of 16"),
        ({"kv_stage": 1}, r"kv_stage=1: .*use kv_stage >= 2"),
        ({"warpgroup_order": "both"}, "use one of none, gemm, exp"),
        ({"exp2_emulation": 16}, "use exp2_emulation: 0"),
        ({"num_ctas": 2}, "use num_ctas: 1"),
        ({"head_dim_qk": 80, "head_dim_v": 80}, r"\(80, 80\).*no sm_90a template"),
        ({"registers": Registers(248, 24, 24)}, "multiples of 8 from 24 to 240"),
        (
            {"tile_m": 192, "tile_n": 64, "registers": Registers(168, 24, 24)},
            r"3x168 \+ 24 = 528 .*with 512 .*use softmax <= 160",
        ),
        ({"registers": Registers(240, 32, 24)}, "no correction warps; use correction: 24, as other"),
        ({"registers": Registers(240, 32, 32)}, r"2x240 \+ 32 = 512 .*with 504 \(3x168\) .*use softmax <= 232"),
        ({"tile_n": 240}, r"needs 294992 B SMEM \(q 32768 \+ k 122880 \+ v 122880 \+ 64 columns of o 16384 \+ mb"),
        ({"tile_n": 176, "q_stage": 2}, "use a smaller tile.n, kv_stage or q_stage"),
        ({"schedule": "balanced"}, r"schedule=balanced, mask=full: .*use static_persistent"),
        ({"varlen": True}, "varlen=true: not built yet"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(changes, message):
    with pytest.raises(PlanError, match=message):
        make_plan(SPEC.replace(tile_m=changes.get("tile_m", 128)).replace(**changes))
