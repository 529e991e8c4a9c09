"""Descriptors, tensor maps, parameters, exponentials, schedules and the model, against hand-derived numbers."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fmha_gen import launch_rules
from fmha_gen.arch import get_arch
from fmha_gen.plan import describe, make_plan, model
from fmha_gen.plan.describe import to_json, to_text
from fmha_gen.spec import KernelSpec

SPEC = KernelSpec("fmha_fwd", "sm_100a", "bf16", 128, 128, "full", q_stage=2, source="specs/x.yaml:14")
B200, B300 = get_arch("sm_100a"), get_arch("sm_103a")


def variant(**changes: object) -> KernelSpec:
    return dataclasses.replace(SPEC, **changes)


def test_instruction_descriptors() -> None:
    """The values in FlashAttention-4's cubins for bf16, 128 x 128."""
    plan = make_plan(SPEC)
    assert (plan.umma_qk.idesc, plan.umma_pv.idesc) == (0x8200490, 0x8210490)
    half = make_plan(variant(dtype="fp16"))
    assert (half.umma_qk.idesc, half.umma_pv.idesc) == (0x8200010, 0x8210010)
    narrow = make_plan(variant(head_dim_qk=64, head_dim_v=64))
    assert narrow.umma_pv.idesc == 0x8110490  # N = 64
    assert narrow.umma_qk.idesc == 0x8200490  # N is tile_n whatever the head dimension


def test_shared_memory_descriptors() -> None:
    """High word 0x40004040: SBO 1024, version 1, 128B swizzle; V's LBO is one 128-byte column block of 128 keys."""
    plan = make_plan(SPEC)
    qk, pv = plan.umma_qk, plan.umma_pv
    assert qk.a is not None
    assert qk.a.base >> 32 == qk.b.base >> 32 == pv.b.base >> 32 == 0x40004040
    assert qk.b.base & 0xFFFFFFFF == 1 << 16
    assert (pv.b.lbo_bytes, pv.b.base & 0xFFFFFFFF) == (16384, 1024 << 16)
    assert pv.a is None
    # K major: 32 bytes a step, four steps a box, boxes 128 rows x 128 B apart.
    assert qk.a.k_step_bytes == (0, 32, 64, 96, 16384, 16416, 16448, 16480)
    # MN major: 16 keys a step.
    assert pv.b.k_step_bytes == tuple(i * 16 * 128 for i in range(8))


def test_descriptors_of_64_byte_swizzle() -> None:
    plan = make_plan(variant(head_dim_qk=96, head_dim_v=96))
    qk, pv = plan.umma_qk, plan.umma_pv
    assert qk.b.base >> 61 == pv.b.base >> 61 == 4
    assert (qk.b.sbo_bytes, pv.b.sbo_bytes, pv.b.lbo_bytes) == (512, 512, 128 * 64)
    assert qk.b.k_step_bytes == (0, 32, 8192, 8224, 16384, 16416)
    assert pv.b.k_step_bytes == tuple(i * 16 * 64 for i in range(8))
    assert (pv.n, pv.idesc >> 17 & 0x3F) == (96, 12)


def test_boxes_and_copies() -> None:
    plan = make_plan(variant(head_dim_qk=192))
    got = {op.name: (op.box_elems, op.num_boxes, op.box_bytes, op.tile_bytes, op.swizzle) for op in plan.operands}
    assert got == {
        "q": (64, 3, 16384, 49152, "128B"),
        "k": (64, 3, 16384, 49152, "128B"),
        "v": (64, 2, 16384, 32768, "128B"),
        "o": (64, 2, 16384, 32768, "128B"),
    }
    d96 = make_plan(variant(head_dim_qk=96, head_dim_v=96)).operand("k")
    assert (d96.box_elems, d96.num_boxes, d96.swizzle) == (32, 3, "64B")
    for op in plan.operands:
        assert op.num_boxes * op.box_bytes == op.tile_bytes
        record = op.tensor_map
        assert [a.axis for a in record.axes] == ["d", "s", "h", "b"]
        assert [a.box for a in record.axes] == [64, 128, 1, 1]
        assert record.axes[1].extent == ("seqlen_q" if op.name in "qo" else "seqlen_k")
        assert record.axes[2].extent == ("num_heads_q" if op.name in "qo" else "num_heads_kv")


def test_parameters_follow_the_canonical_order_with_the_assembler_s_offsets() -> None:
    params = make_plan(SPEC).params
    names = [p.name for p in params]
    assert names[:5] == ["tma_q", "tma_k", "tma_v", "tma_o", "lse"]
    assert [p.offset for p in params] == [0, 128, 256, 384, 512, 520, 528, 536, 544, 548, 552, 556, 560, 564]
    assert [p.name for p in params if p.nullable] == ["lse"]
    assert {p.name for p in params if p.tensor_map} == {"tma_q", "tma_k", "tma_v", "tma_o"}
    causal = make_plan(variant(mask="causal")).params
    assert [p.name for p in causal[len(params) :]] == ["heads_per_section"]
    assert causal[: len(params)] == params
    assert "lse" not in [p.name for p in make_plan(variant(lse=False)).params]


def test_an_architecture_s_parameter_base_moves_the_maps() -> None:
    """c[0x210] is not 64-byte aligned: the first map lies at offset 48, as measured on sm_90a."""
    from fmha_gen.plan.abi import make_params

    plan = make_plan(SPEC)
    assert make_params(plan.spec, plan.operands, get_arch("sm_90a"))[0].offset == 48


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("q_stage", [1, 2])
def test_grid_rules_exist_and_count_tiles(mask: str, q_stage: int) -> None:
    plan = make_plan(variant(mask=mask, q_stage=q_stage))

    class Sizes:
        dtype, batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k = "bf16", 2, 3, 3, 300, 77
        head_dim_qk = head_dim_v = 128

    tiles = 2 * 3 * -(-300 // (128 * q_stage))
    assert launch_rules.grid(plan.grid, Sizes(), 1000) == tiles
    assert launch_rules.grid(plan.grid, Sizes(), 4) == (4 if mask == "full" else tiles)
    assert {"full": "static_persistent", "causal": "longest_first"}[mask] == plan.schedule.name


def test_either_q_stage_serves_and_rows_say_which_is_better() -> None:
    two, one = make_plan(SPEC), make_plan(variant(q_stage=1))
    assert (two.serves.min_rows, two.serves.max_rows) == (129, None)
    assert (one.serves.min_rows, one.serves.max_rows) == (0, 128)
    assert two.rank < one.rank
    assert dataclasses.replace(two.serves, min_rows=0) == dataclasses.replace(one.serves, max_rows=None)


# head dims, mask -> emulated exponentials, MUFU per row. d64: 16 (129 - e) clocks of MUFU meet 2 (420 + 4.04 e) + 115 +
# 149 issue slots at e = 40; d96: MUFU under MMA's 1536 needs e >= 33; d128: 85% of 2048 allows 108 MUFU, the peer has
# 113 in causal; (192, 128): 85% of 2560 allows 136.
EXP2 = [
    (64, 64, "full", 40, 89),
    (64, 64, "causal", 40, 89),
    (96, 96, "full", 34, 95),
    (128, 128, "full", 22, 107),
    (128, 128, "causal", 16, 113),
    (192, 128, "full", 0, 129),
    (192, 128, "causal", 0, 129),
]


@pytest.mark.parametrize(("d", "dv", "mask", "emulated", "mufu"), EXP2)
def test_auto_exp2_emulation(d: int, dv: int, mask: str, emulated: int, mufu: int) -> None:
    plan = make_plan(variant(head_dim_qk=d, head_dim_v=dv, mask=mask))
    assert (plan.exp2.emulated_elems, plan.model.mufu_per_row) == (emulated, mufu)
    assert make_plan(variant(head_dim_qk=d, head_dim_v=dv, mask=mask, q_stage=1)).exp2 == plan.exp2


@pytest.mark.parametrize(("d", "dv", "mask", "emulated", "mufu"), EXP2)
def test_auto_exp2_is_the_best_of_all(d: int, dv: int, mask: str, emulated: int, mufu: int) -> None:
    """Exhaustively: no even number within the cap has a smaller bound, and no smaller number has the same bound."""
    cap = model.mufu_cap(d, dv, mask, 128, B200)
    bounds = {e: model.predict(d, dv, 128, e, B200).bound_clk for e in range(0, 97, 2) if 129 - e <= cap}
    assert emulated in bounds
    assert bounds[emulated] == min(bounds.values())
    assert all(bounds[e] > bounds[emulated] for e in bounds if e < emulated)


def test_sm_103a_emulates_nothing() -> None:
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128)):
        assert make_plan(variant(arch="sm_103a", head_dim_qk=d, head_dim_v=dv)).exp2.emulated_elems == 0


@pytest.mark.parametrize("emulated", [0, 2, 16, 22, 38, 64, 96])
def test_emulated_pairs_are_spread_and_spare_the_last_chunk(emulated: int) -> None:
    pairs = make_plan(variant(exp2_emulation=emulated)).exp2.emulated_pairs
    assert len(pairs) == 4
    assert pairs[3] == ()
    assert 2 * sum(len(c) for c in pairs) == emulated
    assert max(len(c) for c in pairs[:3]) - min(len(c) for c in pairs[:3]) <= 1
    for chunk in pairs:
        assert list(chunk) == sorted(set(chunk))
        assert all(0 <= p < 16 for p in chunk)
        gaps = [b - a for a, b in zip(chunk, chunk[1:], strict=False)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_polynomial_is_what_its_comment_says() -> None:
    c = make_plan(SPEC).exp2.coefficients
    worst = max(abs((c[0] + f * (c[1] + f * (c[2] + f * c[3]))) / 2**f - 1) for f in (i / 4096 for i in range(4096)))
    assert worst < 8.9e-5
    assert c[0] == 1.0


def test_model_terms() -> None:
    """The paper's figures for 256 rows of d128: MMA 2048, exponentials 2048 clocks."""
    assert model.mma_clk(128, 128, 128, B200) == 2048
    assert model.mma_clk(192, 128, 128, B200) == 2560
    assert model.mma_clk(64, 64, 128, B200) == 1024
    assert model.mufu_clk(128, B200) == 2048
    assert model.mufu_clk(128, B300) == 1024
    assert model.issue_clk(515, 107, 173) == 1310
    b = model.bound(64, 64, 128, 113, 515, 107, 173, B200)
    assert (b.bound_clk, b.limiter) == (1808, "MUFU")
    assert model.predict(64, 64, 128, 40, B200).bound_clk == pytest.approx(1427.2)
    assert model.predict(96, 96, 128, 34, B200).bound_clk == 1536


def test_unrecorded_shapes_get_slots_from_the_lines() -> None:
    for (d, dv), (correction, mma) in model.LOOP_SLOTS.items():
        assert abs(round(24 + 1.4 * dv) / correction - 1) < 0.08
        assert abs(round(0.96 * (d + 128) - 36) / mma - 1) < 0.08
    assert model.loop_slots(32, 32) == (69, 118)
    assert model.loop_slots(128, 128) == (203, 211)


def test_autos_are_resolved_and_explained() -> None:
    plan = make_plan(SPEC)
    assert plan.spec.auto_fields == ()
    assert set(dict(plan.reasons)) == {
        "tile_m",
        "tile_n",
        "num_ctas",
        "kv_stage",
        "registers",
        "schedule",
        "exp2_emulation",
    }
    again = make_plan(plan.spec)
    assert again.spec == plan.spec
    assert again.reasons == ()
    assert dataclasses.replace(again, reasons=plan.reasons) == plan
    assert make_plan(variant(q_stage=None, head_dim_qk=256, head_dim_v=256)).spec.q_stage == 1
    assert make_plan(variant(q_stage=None)).spec.q_stage == 2


def test_plans_are_frozen_and_json_able() -> None:
    plan = make_plan(variant(head_dim_qk=192))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.smem_bytes = 1  # type: ignore[misc]
    data = json.loads(to_json(plan))
    assert data["kv_ring"]["kind"] == "uneven"
    assert data["spec"] == plan.spec.canonical() | {"registers": {"softmax": 192, "correction": 72, "other": 56}}
    assert to_json(plan) == to_json(make_plan(variant(head_dim_qk=192)))
    with pytest.raises(KeyError, match="'sP' is none of sQ"):
        plan.buffer("sP")


def test_tables_hold_every_barrier_buffer_and_region() -> None:
    plan = make_plan(variant(head_dim_qk=192))
    tables = {t.title: t for t in describe(plan)}
    for t in tables.values():
        assert set(t.right) <= set(t.columns)
        assert all(len(row) == len(t.columns) for row in t.rows)
    assert {r[3] for r in tables["shared memory"].rows} == {b.name for b in plan.smem}
    assert {r[1] for r in tables["pipelines"].rows} == {b.name for b in plan.barriers} | {"stats"}
    assert {r[3] for r in tables["tensor memory"].rows} == {r.name for r in plan.tmem}
    assert "512 of 512 columns" in tables["tensor memory"].note
    assert "1 and 0" in to_text(plan)
    small = make_plan(variant(head_dim_qk=64, head_dim_v=64, q_stage=1))
    assert ("320", "512", "192", "(free)", "", "") in {t.title: t for t in describe(small)}["tensor memory"].rows
