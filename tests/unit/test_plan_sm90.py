"""Plans of sm_90a kernels: budgets by hand, pipelines proven, faults in them found, refusals with arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from fmha_gen.errors import PlanError
from fmha_gen.plan import KernelPlan, describe, make_plan
from fmha_gen.plan.sm90 import barriers
from fmha_gen.plan.sm90.choices import CHOICES
from fmha_gen.render import render
from fmha_gen.spec import KernelSpec, Registers

SPEC = KernelSpec("fmha_fwd", "sm_90a", "bf16", 128, 128, "full", source="s.yaml:7")
SHAPES = sorted(CHOICES)


def findings(plan: KernelPlan, table: tuple | None = None) -> tuple[str, ...]:
    alias = plan.buffer("sO").alias_of is not None
    assert plan.wgmma is not None
    return barriers.findings(table or plan.barriers, plan.spec, plan.wgmma.consumers, plan.smem, alias)


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


def test_o_leaves_through_q_where_it_has_no_room():
    """(192, 128): Q 48 + K 96 + V 64 KiB leave 19 KiB of 227, O needs 32."""
    plan = make_plan(SPEC.replace(head_dim_qk=192, tile_m=128, tile_n=128))
    assert plan.buffer("sO").alias_of == "sQ" and plan.smem_bytes == (48 + 96 + 64) * 1024 + 80
    assert plan.barrier("q_empty").arrive_count == 2 * 4 + 1  # the load warp follows every phase
    assert plan.named_barrier("q_read").num_threads == 128


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


@pytest.mark.parametrize("name", ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty"])
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("head_dim_qk", [128, 192])
def test_a_wrong_arrive_count_is_found(name, off, head_dim_qk):
    plan = make_plan(SPEC.replace(head_dim_qk=head_dim_qk, tile_m=128, tile_n=128))
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
        ({"tile_m": 192, "registers": Registers(168, 24, 24)}, r"3x168 \+ 24 = 528 .* has 512 .*use softmax <= 160"),
        ({"tile_n": 240}, r"needs \d+ B SMEM \(q 32768 \+ k 122880 \+ v 122880 \+ o 32768"),
        ({"tile_n": 176, "q_stage": 2}, "O may share Q's bytes with q_stage 1 only"),
        ({"varlen": True}, "varlen=true: not built yet"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(changes, message):
    with pytest.raises(PlanError, match=message):
        make_plan(SPEC.replace(tile_m=changes.get("tile_m", 128)).replace(**changes))


def test_a_known_race_stays_found():
    """Without the load warp's own arrival, tiles without keys let q_empty run through two phases unseen."""
    plan = make_plan(SPEC.replace(head_dim_qk=192, tile_m=128, tile_n=128))
    table = tuple(
        dataclasses.replace(b, producers=b.producers[:-1], arrive_count=8) if b.name == "q_empty" else b
        for b in plan.barriers
    )
    assert findings(plan, table)
