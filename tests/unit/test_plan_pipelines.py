"""The host-side proof of the pipelines: it accepts every plan, and names what a fault would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from fmha_gen.errors import PlanError
from fmha_gen.plan import barriers, make_plan, petri, protocol
from fmha_gen.plan.petri import Access, Arrive, Commit, Load, Mma, Op, Wait
from fmha_gen.plan.types import Barrier, KernelPlan
from fmha_gen.spec import KernelSpec

SPEC = KernelSpec("fmha_fwd", "sm_100a", "bf16", 128, 128, "full", q_stage=2)


def plan_of(d: int = 128, dv: int = 128, q_stage: int = 2, **more: object) -> KernelPlan:
    return make_plan(dataclasses.replace(SPEC, head_dim_qk=d, head_dim_v=dv, q_stage=q_stage, **more))


def map_of(plan: KernelPlan, table: tuple[Barrier, ...] | None = None) -> protocol.Map:
    return protocol.map_of(plan.tiles, plan.smem, plan.kv_ring, plan.tmem, table or plan.barriers)


def pipelines_of(plan: KernelPlan) -> barriers.Pipelines:
    q = plan.buffer("sQ")
    return barriers.Pipelines(plan.roles, q.stages, 1, q.stage_stride_bytes, plan.kv_ring, plan.o_aliases_q)


def run(plan: KernelPlan, blocks: Sequence[int], edit=None, counts=None, map_=None, rescale: bool = True) -> list[str]:
    """Findings of a plan's programs after `edit(programs)`."""
    m = map_ or map_of(plan)
    programs = {name: list(ops) for name, ops in protocol.programs(m, blocks, rescale).items()}
    if edit:
        edit(programs)
    table = {b.name: b.arrive_count for b in plan.barriers} | protocol.NAMED_COUNTS | (counts or {})
    return petri.run(programs, table)


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128)])
@pytest.mark.parametrize("q_stage", [1, 2])
def test_every_plan_is_consistent_for_long_walks(d: int, dv: int, q_stage: int) -> None:
    plan = plan_of(d, dv, q_stage)
    for blocks in [(0,), (1,), (5, 0, 0, 1, 25, 2, 0), (1,) * 9, (0, 0, 0, 0, 3), (2, 2, 2)]:
        for rescale in (True, False):
            assert run(plan, blocks, rescale=rescale) == []


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("q_stage", [1, 2])
def test_rings_of_any_depth_work(stages: int, q_stage: int) -> None:
    plan = plan_of(64, 64, q_stage, kv_stage=stages)
    assert run(plan, (stages + 3, 1, 4)) == []


def test_a_ring_of_one_stage_deadlocks() -> None:
    """Why kv_stage 1 is refused: with two blocks a V waits in the only stage while the next K is needed."""
    m = map_of(plan_of(64, 64, kv_stage=2))
    one = dataclasses.replace(
        m, kv_stage=1, k_spans=m.k_spans[:1], v_spans=m.v_spans[:1], k_waits=((0,),), v_waits=((0,),)
    )
    assert run(plan_of(64, 64), (1, 1), map_=one) == []
    (found,) = run(plan_of(64, 64), (2,), map_=one)
    assert found.startswith("deadlock: ")
    assert "load waits for completion 1 of kv_empty[0], which has 1 and 0 of 1 arrivals of the next" in found
    assert "mma waits for completion 2 of kv_full[0]" in found


def test_arrive_counts_come_from_role_sizes() -> None:
    table = {b.name: b for b in plan_of(192).barriers}
    assert {n: b.arrive_count for n, b in table.items()} == {
        "q_full": 1,
        "q_empty": 1,
        "kv_full": 1,
        "kv_empty": 1,
        "s_full": 1,
        "p_full": 128 + 128,
        "p_last_full": 128,
        "o_full": 1,
        "stats_empty": 128,
        "epi_full": 128,
        "epi_empty": 2,
    }
    assert (table["q_full"].tx_bytes, table["kv_full"].tx_bytes) == (128 * 192 * 2, 128 * 192 * 2)
    assert table["epi_empty"].consumers == ("correction", "load")
    assert {b.name: b for b in plan_of().barriers}["epi_empty"].arrive_count == 1
    assert [b.offset_bytes for b in plan_of().barriers][:4] == [0, 16, 32, 56]


def test_a_cta_group_counts_its_peers() -> None:
    pair = dataclasses.replace(pipelines_of(plan_of()), num_ctas=2)
    table = {b.name: b for b in barriers.make_barriers(pair)}
    assert (table["p_full"].arrive_count, table["p_last_full"].arrive_count) == (512, 256)
    assert table["q_full"].tx_bytes == 2 * 128 * 128 * 2
    assert table["stats_empty"].arrive_count == 128


@pytest.mark.parametrize(
    ("name", "delta", "says"),
    [
        (
            "p_full",
            1,
            "deadlock: p_full expects 257 arrivals a phase, its producers make 256 (softmax0 128 + correction 128)",
        ),
        ("p_full", -128, "race: p_full expects 128 arrivals a phase, its producers make 256"),
        ("stats_empty", -32, "race: stats_empty expects 96 arrivals a phase, its producers make 128 (correction 128)"),
        ("s_full", 1, "deadlock: s_full expects 2 arrivals a phase, its producers make 1 (mma 1)"),
    ],
)
def test_a_wrong_count_is_named_with_the_sum(name: str, delta: int, says: str) -> None:
    plan = plan_of()
    table = tuple(
        dataclasses.replace(b, arrive_count=b.arrive_count + delta) if b.name == name else b for b in plan.barriers
    )
    with pytest.raises(PlanError) as e:
        barriers.check(table, pipelines_of(plan), map_of(plan, table), "specs/x.yaml:3")
    assert str(e.value).startswith(f"specs/x.yaml:3: pipelines: {says}")
    assert f"set arrive_count to {table[0].arrive_count if name == 'q_full' else dict_count(plan, name)}" in str(
        e.value
    )


def dict_count(plan: KernelPlan, name: str) -> int:
    return plan.barrier(name).arrive_count


@pytest.mark.parametrize(
    ("name", "delta"),
    [(b.name, d) for b in plan_of(192).barriers for d in (-1, 1) if b.arrive_count + d > 0],
)
def test_the_execution_alone_finds_every_wrong_count(name: str, delta: int) -> None:
    plan = plan_of(192)
    count = plan.barrier(name).arrive_count + delta
    found = run(plan, (3, 3, 3), counts={name: count})
    assert found and found[0].startswith(("deadlock: ", "race: "))


def without(barrier: str, actor: str, kind: type[Op] = Wait):
    def edit(programs: dict[str, list[Op]]) -> None:
        assert any(isinstance(o, kind) and o.barrier == barrier for o in programs[actor])  # type: ignore[attr-defined]
        programs[actor] = [
            o
            for o in programs[actor]
            if not (isinstance(o, kind) and o.barrier == barrier)  # type: ignore[attr-defined]
        ]

    return edit


@pytest.mark.parametrize(
    ("actor", "barrier"),
    [
        ("mma", "q_full"),
        ("mma", "kv_full"),
        ("mma", "p_full"),
        ("mma", "p_last_full"),
        ("load", "kv_empty"),
        ("softmax0.0", "s_full"),
        ("softmax1.1", "stats_empty"),
        ("correction.0", "o_full"),
        ("correction.1", "stats"),
        ("correction.1", "epi_empty"),
        ("epilogue", "epi_full"),
        ("load", "epi_empty"),
    ],
)
def test_a_forgotten_wait_is_a_race(actor: str, barrier: str) -> None:
    found = run(plan_of(192), (3, 0, 0, 3, 3), without(barrier, actor))
    assert found and found[0].startswith("race: ")


def test_the_wait_for_an_empty_q_is_needed_unless_o_lies_over_it() -> None:
    """An O over Q implies it: its store follows the tile's last product. Kept there all the same: it costs nothing."""
    assert run(plan_of(), (3, 3, 3), without("q_empty", "load"))[0].startswith("race: 'load: load Q")
    assert run(plan_of(192), (3, 3, 3), without("q_empty", "load")) == []


@pytest.mark.parametrize(
    ("actor", "barrier", "kind"),
    [
        ("softmax0.0", "p_full", Arrive),
        ("correction.1", "p_full", Arrive),
        ("softmax1.0", "p_last_full", Arrive),
        ("correction.0", "stats_empty", Arrive),
        ("mma", "s_full", Commit),
        ("mma", "kv_empty", Commit),
        ("mma", "o_full", Commit),
        ("epilogue", "epi_empty", Arrive),
    ],
)
def test_a_forgotten_arrival_is_a_deadlock(actor: str, barrier: str, kind: type[Op]) -> None:
    found = run(plan_of(), (3, 3), without(barrier, actor, kind))
    assert found and found[0].startswith("deadlock: ")


def test_a_k_in_stage_0_of_the_uneven_ring_must_wait_for_stage_1_too() -> None:
    plan = plan_of(192)
    bad = dataclasses.replace(map_of(plan), k_waits=((0,), (1,), (2,)))
    assert run(plan, (3,), map_=map_of(plan)) == []
    (found,) = run(plan, (4,), map_=bad)
    assert found.startswith("race: 'load: load K into stage 0' is not ordered after 'mma: S")


def test_an_uneven_ring_does_not_suit_one_q_tile() -> None:
    """K runs ahead of V there: a second K in stage 1 would overlap the first one in stage 0."""
    two, one = plan_of(192), plan_of(192, q_stage=1)
    assert (two.kv_ring.kind, one.kv_ring.kind) == ("uneven", "even")
    ring = two.kv_ring
    base = one.buffer("sKV").offset_bytes
    bad = dataclasses.replace(
        map_of(one),
        k_spans=tuple((base + o, base + o + ring.k_bytes) for o in ring.k_offset_bytes),
        v_spans=tuple((base + o, base + o + ring.v_bytes) for o in ring.v_offset_bytes),
        k_waits=ring.k_waits,
        v_waits=ring.v_waits,
    )
    found = run(one, (3,), map_=bad)
    assert found and found[0].startswith("race: ")


def test_one_o_full_barrier_for_both_slots_passes_a_phase_early() -> None:
    """q_stage 1: a complete S implies the PV three before it, not two, so that one parity is ambiguous."""

    def one_barrier(programs: dict[str, list[Op]]) -> None:
        for name, ops in programs.items():
            counts: dict[str, int] = {}
            for i, op in enumerate(ops):
                if isinstance(op, Commit) and op.barrier == "o_full":
                    ops[i] = Commit("o_full", 0)
                if isinstance(op, Wait) and op.barrier == "o_full":
                    counts[name] = 2 * op.k + op.stage
                    ops[i] = Wait("o_full", 0, counts[name])

    plan = plan_of(q_stage=1)
    assert run(plan, (3,), rescale=False) == []
    (found,) = run(plan, (3,), one_barrier, rescale=False)
    assert "correction.0 can wait for completion 2 of o_full[0] before completion 1" in found
    assert "passed one phase early" in found


def test_tiles_without_keys_must_not_overtake_the_load_warp() -> None:
    """O over Q: if the load warp only waited for epi_empty, others could complete it twice meanwhile."""
    plan = plan_of(192)
    assert run(plan, (0, 0, 0, 2)) == []
    (found,) = run(plan, (0, 0, 0, 2), without("epi_empty", "load", Arrive), counts={"epi_empty": 1})
    assert "of epi_empty[0] can come before load has passed its first wait: it is overtaken" in found
    (found,) = run(plan, (2, 0, 0), without("epi_empty", "load", Arrive), counts={"epi_empty": 1})
    assert "completion 1 of epi_empty[0] can come before load has seen completion 0" in found
    assert run(plan, (1, 1, 2), without("epi_empty", "load", Arrive), counts={"epi_empty": 1}) == []


def test_s_before_its_p_is_read_would_race() -> None:
    """Fact (a) of the issue order: the next S of a slot follows the PV that consumed the slot's P."""

    def swap(programs: dict[str, list[Op]]) -> None:
        ops = programs["mma"]
        first = next(i for i, o in enumerate(ops) if isinstance(o, Mma) and o.what.startswith("O0 += P0"))
        s = next(i for i, o in enumerate(ops) if i > first and isinstance(o, Mma) and o.what.startswith("S0"))
        moved = [ops.pop(s - 1), ops.pop(s - 1)]
        assert moved[0] == Wait("kv_full", 2, 0)
        wait = next(i for i, o in enumerate(ops) if isinstance(o, Wait) and o.barrier == "p_full")
        ops[wait:wait] = moved

    found = run(plan_of(), (2,), swap)
    assert found and found[0].startswith("race: ")
    assert "tmem" in found[0]


def test_a_p_outside_its_own_s_is_seen() -> None:
    plan = plan_of()
    m = map_of(plan)
    over_o = dataclasses.replace(m, p_first_cols=((256, 304), m.p_first_cols[1]))
    assert run(plan, (2, 2), map_=over_o)[0].startswith("race: ")


def test_petri_basics() -> None:
    ping: dict[str, list[Op]] = {"a": [Arrive("x", 0, 1), Arrive("x", 0, 1)], "b": [Wait("x", 0, 0)]}
    assert petri.run(ping, {"x": 2}) == []
    assert petri.run({"a": [Arrive("x", 0, 3)]}, {"x": 2})[0].startswith("race: a makes 3 arrivals on x[0] in phase 0")
    assert petri.run({"b": [Wait("x", 0, -1)]}, {"x": 1}) == []
    early: dict[str, list[Op]] = {
        "a": [Arrive("x", 0, 1)],
        "b": [Arrive("x", 0, 1), Arrive("x", 0, 1)],
        "c": [Arrive("x", 0, 1)],
    }
    assert "can arrive on x[0] for phase 1 before phase 0 completes" in petri.run(early, {"x": 2})[0]
    span = (("smem", 0, 8),)
    load: dict[str, list[Op]] = {
        "a": [Load("load", "x", 0, span)],
        "b": [Wait("x", 0, 0), Access("read", reads=span)],
    }
    assert petri.run(load, {"x": 1}) == []
    load["b"].pop(0)
    assert petri.run(load, {"x": 1}) == ["race: 'b: read' is not ordered after 'a: load' on smem from 0"]
    queue: dict[str, list[Op]] = {
        "m": [Mma("one", (), span), Mma("two", span, ()), Commit("x", 0), Mma("three", (), span)],
        "b": [Wait("x", 0, 0), Access("read", reads=span)],
    }
    assert petri.run(queue, {"x": 1})[0].startswith("race: ")
    queue["m"].pop()
    assert petri.run(queue, {"x": 1}) == []
