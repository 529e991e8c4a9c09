"""Execution and checks, one small program each; most faulty programs have a repaired twin that must be clean."""

# ruff: noqa: E501 (PTX text and tables of it)
from __future__ import annotations

import numpy as np
import pytest

from fmha_gen.errors import SimError
from fmha_gen.sim import GlobalMemory, Launch, TensorMap, Unsupported, machine, prepare, run
from tests.sim.ptx_kit import execute, kernel, kinds

OUT = ".param .u64 out"
SEEDS = range(5)
# The address of this thread's word of `out`, in %rd50.
PROLOGUE = """
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    and.b32 %r3, %r1, 31;
    ld.param.u64 %rd50, [out];
    mul.wide.u32 %rd51, %r1, 4;
    add.s64 %rd50, %rd50, %rd51;
    mov.u32 %r4, smem;
    shl.b32 %r5, %r1, 2;
    add.u32 %r5, %r5, %r4;
"""
STORE = "\n    st.global.b32 [%rd50], %r9;\n"


def simple(body: str, threads: int = 32, seed: int = 0, smem: int = 4096, **kwargs):
    """Run `body`, which leaves a word per thread in %r9; (Result, words)."""
    out = np.zeros(threads, np.uint32)
    memory = GlobalMemory()
    params = [memory.map("out", out)]
    text = kernel(PROLOGUE + body + STORE, OUT, dynamic=True)
    return execute(text, params, memory, block=(threads,), seed=seed, dynamic_smem_bytes=smem, **kwargs), out


def clean(body: str, threads: int = 32, **kwargs) -> np.ndarray:
    """The words of a program that must be clean, and the same, for several seeds."""
    images = []
    for seed in SEEDS:
        result, out = simple(body, threads, seed, **kwargs)
        assert result.findings == [], [str(f) for f in result.findings]
        images.append(out)
    assert all(np.array_equal(images[0], x) for x in images)
    return images[0]


def found(body: str, kind: str, threads: int = 32, **kwargs) -> str:
    """The message of a finding that every seed must give."""
    message = ""
    for seed in SEEDS:
        result, _ = simple(body, threads, seed, **kwargs)
        assert kind in kinds(result), f"seed {seed}: {[str(f) for f in result.findings]}"
        message = next(f.message for f in result.findings if f.kind == kind)
    return message


# -- control flow -------------------------------------------------------------------------------------------------
def test_divergent_loop_and_branches():
    body = """
    mov.u32 %r9, 0;
    mov.u32 %r10, 0;
LOOP:
    and.b32 %r11, %r10, 1;
    setp.eq.u32 %p1, %r11, 0;
    setp.lt.u32 %p2, %r3, 16;
    @%p2 bra LOW;
    @%p1 add.u32 %r9, %r9, 100;
    bra JOIN;
LOW:
    @%p1 bra JOIN;
    add.u32 %r9, %r9, 1;
JOIN:
    vote.sync.ballot.b32 %r12, %p1, MEMBERS;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, %r3;
    @%p3 bra LOOP;
    """
    out = clean(body.replace("    vote.sync.ballot.b32 %r12, %p1, MEMBERS;\n", ""))
    want = [sum((k & 1) if x < 16 else 100 * (1 - (k & 1)) for k in range(max(1, x))) for x in range(32)]
    assert out.tolist() == want
    # Lanes leave the loop one by one, so a full-warp vote inside it is wrong.
    assert "member mask" in found(body.replace("MEMBERS", "-1"), "partial-warp")


def test_join_reconverges_before_the_next_instruction():
    body = """
    setp.lt.u32 %p1, %r3, 7;
    mov.u32 %r9, 1;
    @%p1 bra SKIP;
    add.u32 %r9, %r9, 1;
SKIP:
    shfl.sync.bfly.b32 %r9, %r9, 16, 31, -1;
    """
    assert clean(body).tolist() == [2] * 16 + [1] * 7 + [2] * 9


def test_sides_of_a_branch_wait_for_each_other():
    """Lanes 0-15 wait for an arrival that lanes 16-31 make after waiting for theirs: needs both sides to get on."""
    body = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r4+1024], 16;
    mbarrier.init.shared.b64 [%r4+1032], 16;
READY:
    bar.sync 0;
    mov.u32 %r9, 1;
    setp.lt.u32 %p2, %r3, 16;
    @%p2 bra LOW;
    mbarrier.arrive.shared.b64 _, [%r4+1024];
HIGH_WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r4+1032], 0;
    @!%p3 bra HIGH_WAIT;
    mov.u32 %r9, 2;
    bra JOIN;
LOW:
LOW_WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r4+1024], 0;
    @!%p3 bra LOW_WAIT;
    {arrive}
JOIN:
    """
    arrive = "mbarrier.arrive.shared.b64 _, [%r4+1032];"
    assert clean(body.format(arrive=arrive)).tolist() == [1] * 16 + [2] * 16
    assert "pending arrivals 16 of 16" in found(body.format(arrive=""), "deadlock")


def test_early_exit_of_lanes_and_guarded_exit():
    body = "mov.u32 %r9, 5;\n setp.lt.u32 %p1, %r3, 8;\n @%p1 exit;\n"
    assert clean(body).tolist() == [0] * 8 + [5] * 24


def test_nested_scopes_repeat_names():
    inner = "{ .reg .b32 t; .reg .pred P1; mov.u32 t, %r9; setp.lt.u32 P1, t, 3; @P1 bra DONE; add.u32 %r9, t, 10; DONE: }\n"
    assert clean("mov.u32 %r9, %r3;\n" + inner * 2).tolist() == [x if x < 3 else x + 20 for x in range(32)]


def test_special_registers_and_a_chosen_cta():
    body = """
    mov.u32 %r10, %ctaid.x;  mov.u32 %r11, %ctaid.y;  mov.u32 %r12, %nctaid.x;  mov.u32 %r13, %tid.y;
    mad.lo.s32 %r9, %r11, %r12, %r10;
    mad.lo.s32 %r9, %r9, 100, %r13;
    """
    out = np.zeros(32, np.uint32)
    memory = GlobalMemory()
    text = kernel(PROLOGUE + body + STORE, OUT, dynamic=True)
    launch = Launch(text, grid=(3, 2), block=(8, 4), params=[memory.map("out", out)])
    run(launch, memory, ctas=[4]).raise_for_findings()
    assert out[:8].tolist() == [403] * 8  # the last row of threads wrote last
    result = run(launch, memory)
    assert result.ok and result.counters.warps[0] == result.steps


# -- shared memory ------------------------------------------------------------------------------------------------
EXCHANGE = """
    st.shared.b32 [%r5], %r1;
    {sync}
    xor.b32 %r10, %r1, 32;
    shl.b32 %r10, %r10, 2;
    add.u32 %r10, %r10, %r4;
    ld.shared.b32 %r9, [%r10];
"""


def test_exchange_between_warps_needs_a_barrier():
    assert clean(EXCHANGE.format(sync="bar.sync 0;"), 64).tolist() == [x ^ 32 for x in range(64)]
    for seed in SEEDS:  # without one, either the write comes first (a race) or it does not (nothing was written)
        result, _ = simple(EXCHANGE.format(sync=""), 64, seed)
        assert kinds(result) & {"race", "smem-uninit"}


def test_write_after_read_needs_a_barrier():
    body = EXCHANGE.format(sync="bar.sync 0;") + "    {sync}\n    st.shared.b32 [%r5], %r9;\n"
    clean(body.format(sync="bar.sync 0;"), 64)
    found(body.format(sync=""), "race", 64)
    messages = {f.message for seed in range(20) for f in simple(body.format(sync=""), 64, seed)[0].findings}
    assert any(
        "is not ordered after the read by" in m for m in messages
    )  # whichever comes first is blamed on the other
    assert any("is not ordered after the write by" in m for m in messages)


@pytest.mark.parametrize("good,bad", [("bar.sync 3, 64;", "bar.warp.sync -1;"), ("barrier.cta.sync 5, 64;", "membar.cta;"),
                                      ("barrier.sync.aligned 5;", "fence.acq_rel.cta;")])  # fmt: skip
def test_named_barriers_order(good, bad):
    clean(EXCHANGE.format(sync=good), 64)
    for seed in SEEDS:
        result, _ = simple(EXCHANGE.format(sync=bad), 64, seed)
        assert kinds(result) & {"race", "smem-uninit"}


PRODUCER = """
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra CONSUME;
    st.shared.b32 [%r5], %r1;
    {arrive}
    mov.u32 %r9, 0;
    bra DONE;
CONSUME:
    {wait}
    shl.b32 %r10, %r3, 2;
    add.u32 %r10, %r10, %r4;
    ld.shared.b32 %r9, [%r10];
DONE:
"""


def test_arrive_and_sync_hand_over_data():
    good = PRODUCER.format(arrive="barrier.cta.arrive 2, 64;", wait="barrier.cta.sync 2, 64;")
    assert clean(good, 64).tolist() == [0] * 32 + list(range(32))
    bad = PRODUCER.format(arrive="barrier.cta.arrive 2, 96;", wait="barrier.cta.sync 2, 96;")
    assert "64 of 96 threads" in found(bad, "deadlock", 64)
    mixed = PRODUCER.format(arrive="barrier.cta.arrive 2, 64;", wait="barrier.cta.sync 2, 96;")
    found(mixed, "bar-count", 64)
    twice = PRODUCER.format(arrive="bar.arrive 2, 96;\n bar.arrive 2, 96;", wait="")
    found(twice, "bar-twice", 64)


def test_barrier_reductions():
    body = "setp.lt.u32 %p1, %r1, 40;\n bar.red.popc.u32 %r9, 0, %p1;\n"
    assert clean(body, 64).tolist() == [40] * 64
    body = "setp.lt.u32 %p1, %r1, 40;\n barrier.cta.red.{op}.aligned.pred %p2, 1, 64, {neg}%p1;\n selp.b32 %r9, 1, 0, %p2;\n"
    for op, neg, want in (("and", "", 0), ("or", "", 1), ("or", "!", 1)):
        assert (
            clean(body.format(op=op, neg=neg).replace("red." + op + ".aligned", "red." + op), 64).tolist()
            == [want] * 64
        )


def test_uninitialised_bounds_and_alignment():
    assert "never written" in found("ld.shared.b32 %r9, [%r5];", "smem-uninit")
    found("st.shared.b32 [%r4+4096], %r1; mov.u32 %r9, 0;", "smem-bounds")
    found("st.shared.b32 [%r4+2], %r1; mov.u32 %r9, 0;", "smem-misaligned")
    found("add.s64 %rd1, %rd50, 2; ld.global.b32 %r9, [%rd1];", "global-misaligned")
    message = found("add.s64 %rd1, %rd50, 128; ld.global.b32 %r9, [%rd1];", "global-bounds")
    assert "'out'" in message and "bytes past its end" in message
    found("mov.u32 %r9, %r77;", "reg-uninit")
    found("setp.lt.u32 %p1, %r3, 9;\n @%p1 mov.u32 %r77, 1;\n mov.u32 %r9, %r77;", "reg-uninit")
    clean("setp.lt.u32 %p1, %r3, 9;\n @%p1 mov.u32 %r77, 1;\n @!%p1 mov.u32 %r77, 2;\n mov.u32 %r9, %r77;")


def test_vector_and_narrow_accesses():
    body = """
    shl.b32 %r10, %r1, 4;
    add.u32 %r10, %r10, %r4;
    add.u32 %r11, %r1, 1;
    mul.wide.u32 %rd1, %r1, 0x10001;
    st.shared.v2.b32 [%r10], {%r1, %r11};
    st.shared.b64 [%r10+8], %rd1;
    st.shared.b8 [%r10+3], %r11;
    ld.shared.v4.b32 {%r12, %r13, %r14, %r15}, [%r10];
    ld.shared.u16 %h1, [%r10+8];
    ld.shared.s8 %r16, [%r10+3];
    cvt.u32.u16 %r17, %h1;
    add.u32 %r9, %r12, %r13;
    add.u32 %r9, %r9, %r14;
    add.u32 %r9, %r9, %r16;
    add.u32 %r9, %r9, %r17;
    """
    out = clean(body)
    want = [((x | (x + 1) << 24) + (x + 1) + (x << 16 | x) + (x + 1) + x) & 0xFFFFFFFF for x in range(32)]
    assert out.tolist() == want


def test_atomics():
    body = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    st.shared.b32 [%r4], %r1;
READY:
    bar.sync 0;
    setp.ge.u32 %p1, %r2, 1;
    @%p1 bra SKIP;
    atom.shared.add.u32 %r9, [%r4], 3;
SKIP:
    bar.sync 0;
    ld.shared.b32 %r10, [%r4];
    ld.param.u64 %rd1, [out];
    setp.eq.u32 %p2, %r2, 1;
    @%p2 mov.u32 %r9, %r10;
    """
    assert clean(body, 64).tolist() == [3 * x for x in range(32)] + [96] * 32


def test_sparse_addresses_beyond_32_bits():
    memory, out = GlobalMemory(), np.zeros(32, np.uint32)
    far = memory.map("far", np.arange(32, dtype=np.uint32), address=(1 << 45) + 512)
    text = kernel(
        PROLOGUE + f"mov.u64 %rd1, {far};\n add.s64 %rd1, %rd1, %rd51;\n ld.global.b32 %r9, [%rd1];" + STORE,
        OUT,
        dynamic=True,
    )
    execute(text, [memory.map("out", out)], memory, dynamic_smem_bytes=64).raise_for_findings()
    assert out.tolist() == list(range(32))
    with pytest.raises(SimError, match="overlaps"):
        memory.map("again", np.zeros(4, np.uint32), address=(1 << 45) + 520)
    with pytest.raises(SimError, match="windows"):
        memory.map("low", np.zeros(4, np.uint32), address=0x7E00_0000_1000)
    memory.map("constant", np.zeros(4, np.uint32), address=0x2000, writable=False)
    text = kernel(
        PROLOGUE + "mov.u64 %rd1, 0x2000;\n st.global.b32 [%rd1], %r1; mov.u32 %r9, 0;" + STORE, OUT, dynamic=True
    )
    result = execute(text, [memory.map("out2", out.copy())], memory, dynamic_smem_bytes=64)
    assert result.fault is not None and result.fault.kind == "global-readonly"


# -- mbarriers ----------------------------------------------------------------------------------------------------
MBAR = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r4+1024], {count};
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra CONSUME;
    st.shared.b32 [%r5], %r1;
    {arrive}
    mov.u32 %r9, 0;
    bra DONE;
CONSUME:
{wait}
    shl.b32 %r10, %r3, 2;
    add.u32 %r10, %r10, %r4;
    ld.shared.b32 %r9, [%r10];
DONE:
"""
WAIT = "WAIT:\n mbarrier.try_wait.parity.shared.b64 %p2, [%r4+1024], 0, 1000;\n @!%p2 bra WAIT;"


@pytest.mark.parametrize("count,arrive", [
    (32, "mbarrier.arrive.shared.b64 _, [%r4+1024];"), (64, "mbarrier.arrive.shared.b64 _, [%r4+1024], 2;"),
    (32, "mbarrier.arrive.release.cta.shared::cta.b64 %rd1, [%r4+1024];"),
    (1, "elect.sync _|%p3, -1;\n bar.warp.sync -1;\n @%p3 mbarrier.arrive.shared::cta.b64 _, [%r4+1024];"),
    (33, "mbarrier.arrive.noComplete.shared.b64 _, [%r4+1024], 1;\n mbarrier.arrive_drop.shared.b64 _, [%r4+1024], 0;\n setp.eq.u32 %p4, %r3, 31;\n @%p4 mbarrier.arrive.shared.b64 _, [%r4+1024];"),
])  # fmt: skip
def test_mbarrier_hands_over_data(count, arrive):
    if count == 1:  # one lane arrives: the other lanes' stores are ordered before it by the warp barrier only
        arrive = arrive.replace("elect.sync", "bar.warp.sync -1;\n elect.sync")
    assert clean(MBAR.format(count=count, arrive=arrive, wait=WAIT), 64).tolist() == [0] * 32 + list(range(32))


def test_mbarrier_state_token():
    token = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r4+1024], 64;
READY:
    bar.sync 0;
    st.shared.b32 [%r5], %r1;
    mbarrier.arrive.shared.b64 %rd1, [%r4+1024];
WAIT:
    mbarrier.test_wait.shared.b64 %p2, [%r4+1024], %rd1;
    @!%p2 bra WAIT;
    xor.b32 %r10, %r5, 128;
    ld.shared.b32 %r9, [%r10];
    """
    assert clean(token, 64).tolist() == [x ^ 32 for x in range(64)]


def test_mbarrier_faults():
    arrive = "mbarrier.arrive.shared.b64 _, [%r4+1024];"
    found(MBAR.format(count=31, arrive=arrive, wait=WAIT), "mbar-overflow", 64)
    assert "pending arrivals 1 of 33" in found(MBAR.format(count=33, arrive=arrive, wait=WAIT), "deadlock", 64)
    for seed in SEEDS:
        result, _ = simple(MBAR.format(count=32, arrive=arrive, wait=""), 64, seed)
        assert kinds(result) & {"race", "smem-uninit"}
    found(MBAR.format(count=32, arrive=arrive.replace("1024", "1032"), wait=WAIT), "mbar-unknown", 64)
    found(MBAR.format(count=0, arrive=arrive, wait=WAIT), "mbar-count", 64)
    relaxed = arrive.replace("arrive", "arrive.relaxed.cta")
    found(MBAR.format(count=32, arrive=relaxed, wait=WAIT), "race", 64)
    clean(MBAR.format(count=32, arrive="fence.acq_rel.cta;\n" + relaxed, wait=WAIT), 64)
    again = MBAR.format(count=32, arrive=arrive, wait=WAIT).replace(
        "fence.mbarrier", "mbarrier.init.shared.b64 [%r4+1024], 32;\n fence.mbarrier"
    )
    found(again, "mbar-init", 64)
    fine = again.replace(
        "mbarrier.init.shared.b64 [%r4+1024], 32;\n fence",
        "mbarrier.inval.shared.b64 [%r4+1024];\n mbarrier.init.shared.b64 [%r4+1024], 32;\n fence",
    )
    clean(fine, 64)


def test_spinning_for_ever_is_a_livelock(monkeypatch):
    monkeypatch.setattr(machine, "STALL_TICKS", 20_000)
    spin = "WAIT:\n mbarrier.test_wait.parity.shared.b64 %p2, [%r4+1024], 0;\n @!%p2 bra WAIT;"
    text = MBAR.format(count=33, arrive="mbarrier.arrive.shared.b64 _, [%r4+1024];", wait=spin)
    result, _ = simple(text, 64)
    assert result.fault is not None and result.fault.kind == "livelock" and "nothing completes" in result.fault.message


# -- asynchronous copies ------------------------------------------------------------------------------------------
def copies(body: str, seed: int, threads: int = 32, smem: int = 8192, **kwargs):
    """Run `body` with `in` (1024 words) and `out` (1024 words); (Result, in, out)."""
    source, out = np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32)
    memory = GlobalMemory()
    params = [memory.map("in", source), memory.map("out", out)]
    head = PROLOGUE + "    ld.param.u64 %rd10, [in];\n    ld.param.u64 %rd11, [out];\n"
    text = kernel(head + body, ".param .u64 in, .param .u64 out", dynamic=True)
    return execute(text, params, memory, block=(threads,), seed=seed, dynamic_smem_bytes=smem, **kwargs), source, out


def check_copies(good: str, bad: dict[str, str], threads: int = 32, want=None):
    for seed in SEEDS:
        result, source, out = copies(good, seed, threads)
        assert result.findings == [], [str(f) for f in result.findings]
        assert np.array_equal(out, source if want is None else want)
        for kind, text in bad.items():
            result, _, _ = copies(text, seed, threads)
            assert kinds(result) & set(kind.split("|")), f"{kind}: {[str(f) for f in result.findings]}"


BULK = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    mbarrier.init.shared.b64 [%r4+4096], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r4+4096], 4096;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd10], 4096, [%r4+4096];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r4+4096], 0;
    @!%p2 bra WAIT;
    ld.shared.b32 %r20, [%r4];
    st.shared.b32 [%r4], %r20;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd11], [%r4], 4096;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
"""


def test_bulk_copies():
    check_copies(BULK, {
        "proxy": BULK.replace("    fence.proxy.async.shared::cta;\n", ""),
        "race|smem-uninit": BULK.replace("WAIT:\n    mbarrier.try_wait.parity.shared.b64 %p2, [%r4+4096], 0;\n    @!%p2 bra WAIT;\n", ""),
        "bulk-exit": BULK.replace("    cp.async.bulk.wait_group 0;\n", ""),
        "bulk-size": BULK.replace("[%r4], [%rd10], 4096", "[%r4], [%rd10], 4090"),
        "smem-misaligned": BULK.replace("[%r4], [%rd10], 4096", "[%r4+8], [%rd10], 4096"),
        "global-bounds": BULK.replace("[%r4], [%rd10], 4096", "[%r4], [%rd10+16], 4096"),
        "deadlock": BULK.replace("[%r4+4096], 4096;", "[%r4+4096], 4080;"),
        "mbar-init-fence": BULK.replace("    fence.mbarrier_init.release.cluster;\n", ""),
        "smem-uninit|race": BULK.replace("WAIT:\n", "    ld.shared.b32 %r20, [%r4+64];\nWAIT:\n", 1),
        "race": BULK.replace("    cp.async.bulk.wait_group 0;\n", "    st.shared.b32 [%r4+4], %r20;\n    cp.async.bulk.wait_group 0;\n"),
    })  # fmt: skip


def test_bulk_reduction_adds():
    body = BULK.replace(
        "cp.async.bulk.global.shared::cta.bulk_group", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"
    )
    twice = body.replace(
        "    cp.async.bulk.commit_group;\n",
        "    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd11], [%r4], 4096;\n    cp.async.bulk.commit_group;\n",
    )
    check_copies(twice, {}, want=2 * np.arange(1024, dtype=np.uint32))


CP_ASYNC = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r4+4096], 32;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra CONSUME;
    mov.u32 %r20, 0;
COPY:
    shl.b32 %r21, %r20, 9;
    shl.b32 %r22, %r3, 4;
    add.u32 %r21, %r21, %r22;
    cvt.u64.u32 %rd20, %r21;
    add.s64 %rd20, %rd20, %rd10;
    add.u32 %r21, %r21, %r4;
    cp.async.cg.shared.global [%r21], [%rd20], 16;
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p2, %r20, 8;
    @%p2 bra COPY;
    {signal}
    bra DONE;
CONSUME:
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r4+4096], 0;
    @!%p2 bra WAIT;
    {fence}
    elect.sync _|%p3, -1;
    @!%p3 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd11], [%r4], 4096;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
DONE:
"""


def test_cp_async_through_an_mbarrier():
    fence, signal = "fence.proxy.async.shared::cta;", "cp.async.mbarrier.arrive.noinc.shared.b64 [%r4+4096];"
    check_copies(CP_ASYNC.format(fence=fence, signal=signal), {
        "proxy": CP_ASYNC.format(fence="", signal=signal),
        "race|smem-uninit": CP_ASYNC.format(fence=fence, signal="mbarrier.arrive.shared.b64 _, [%r4+4096];"),
    }, threads=64)  # fmt: skip


def test_cp_async_groups():
    waits = "cp.async.commit_group;\n cp.async.wait_group 0;\n mbarrier.arrive.shared.b64 _, [%r4+4096];"
    fence = "fence.proxy.async.shared::cta;"
    check_copies(CP_ASYNC.format(fence=fence, signal=waits), {
        "race|smem-uninit": CP_ASYNC.format(fence=fence, signal=waits.replace("group 0", "group 1")),
    }, threads=64)  # fmt: skip
    for seed in SEEDS:
        result, _, _ = copies(
            CP_ASYNC.format(
                fence=fence, signal=waits.replace("cp.async.commit_group;\n cp.async.wait_group 0", "cp.async.wait_all")
            ),
            seed,
            64,
        )
        assert result.ok


def test_cp_async_zero_fill():
    body = """
    shl.b32 %r20, %r1, 2;
    and.b32 %r20, %r20, 15;
    shl.b32 %r21, %r1, 4;
    add.u32 %r22, %r21, %r4;
    cvt.u64.u32 %rd20, %r21;
    add.s64 %rd21, %rd20, %rd10;
    add.s64 %rd22, %rd20, %rd11;
    cp.async.cg.shared.global [%r22], [%rd21], 16, %r20;
    cp.async.wait_all;
    ld.shared.v4.b32 {%r23, %r24, %r25, %r26}, [%r22];
    st.global.v4.b32 [%rd22], {%r23, %r24, %r25, %r26};
    """
    result, source, out = copies(body, 0)
    assert result.ok
    want = [source[4 * t + k] if 4 * k < (4 * t & 15) else 0 for t in range(32) for k in range(4)]
    assert out[:128].tolist() == want


# -- tensor memory ------------------------------------------------------------------------------------------------
TMEM = """
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra READY;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4+2048], 32;
READY:
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r20, [%r4+2048];
    shl.b32 %r21, %r2, 21;
    add.u32 %r21, %r21, %r20;
    tcgen05.st.sync.aligned.SHAPE.b32 [%r21], {REGS};
    {after}
    tcgen05.ld.sync.aligned.SHAPE.b32 {REGS2}, [%r21];
    tcgen05.wait::ld.sync.aligned;
    add.u32 %r9, OUT0, OUT1;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra FREED;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;
FREED:
"""


def tmem(after: str, shape: str = "32x32b.x2", regs: int = 2) -> str:
    init = "".join(f"    add.u32 %r{60 + k}, %r1, {1000 * k};\n" for k in range(regs))
    names = [", ".join(f"%r{base + k}" for k in range(regs)) for base in (60, 100)]
    text = TMEM.replace("{after}", after).replace("SHAPE", shape).replace("REGS2", names[1]).replace("REGS", names[0])
    return init + text.replace("OUT0", "%r100").replace("OUT1", f"%r{100 + regs - 1}")


def test_tensor_memory_store_then_load():
    out = clean(tmem("tcgen05.wait::st.sync.aligned;"), 128)
    assert out.tolist() == [2 * x + 1000 for x in range(128)]
    assert "tcgen05.st" in found(tmem(""), "race", 128)


@pytest.mark.parametrize(
    "shape,regs", [("16x64b.x2", 2), ("16x128b.x2", 4), ("16x256b.x1", 4), ("32x32b.x2.unpack::16b", 2)]
)
def test_tensor_memory_shapes(shape, regs):
    text = tmem("tcgen05.wait::st.sync.aligned;", shape, regs)
    if "unpack" in shape:
        text = text.replace(
            "tcgen05.ld.sync.aligned.32x32b.x2.unpack::16b", "tcgen05.ld.sync.aligned.32x32b.x2.pack::16b"
        )
    assert clean(text, 128).tolist() == [2 * x + 1000 * (regs - 1) for x in range(128)]


def test_registers_of_a_store_may_change_after_it():
    changed = tmem("mov.u32 %r60, 7;\n    tcgen05.wait::st.sync.aligned;")
    assert clean(changed, 128).tolist() == [2 * x + 1000 for x in range(128)]


TS_MMA = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra ALLOC;
    mbarrier.init.shared.b64 [%r4+4096], 1;
    mbarrier.init.shared.b64 [%r4+4104], 128;
    fence.mbarrier_init.release.cluster;
ALLOC:
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra READY;
    bar.warp.sync -1;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4+4112], 32;
READY:
    mov.u32 %r20, 0x3f803f80;
    shl.b32 %r21, %r1, 4;
    add.u32 %r21, %r21, %r4;
    mov.u32 %r22, 0;
    st.shared.v4.b32 [%r21], {%r20, %r20, %r20, %r20};
    fence.proxy.async.shared::cta;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r23, [%r4+4112];
    shl.b32 %r24, %r2, 21;
    add.u32 %r24, %r24, %r23;
    mov.u32 %r25, 0x40004000;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r24+16], {%r25, %r25, %r25, %r25, %r25, %r25, %r25, %r25};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    mbarrier.arrive.shared.b64 _, [%r4+4104];
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra WAIT;
PWAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r4+4104], 0;
    @!%p3 bra PWAIT;
    tcgen05.fence::after_thread_sync;
    elect.sync _|%p2, -1;
    @!%p2 bra WAIT;
    shr.u32 %r26, %r4, 4;
    or.b32 %r26, %r26, 0x80000;        // B: K-major, no swizzle: LBO 128, SBO 256
    mov.b64 %rd1, {%r26, 0x00004010};
    add.u32 %r27, %r23, 16;
    mov.u32 %r28, IDESC;
    tcgen05.mma.cta_group::1.kind::f16 [%r23], [%r27], %rd1, %r28, 0;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+4096];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r4+4096], 0;
    @!%p3 bra WAIT;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r24];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    bar.warp.sync -1;
    bar.sync 0;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra FREED;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r23, 32;
FREED:
""".replace("IDESC", str(1 << 4 | 1 << 7 | 1 << 10 | 2 << 17 | 8 << 24))


def test_operand_from_tensor_memory():
    out = clean(TS_MMA, 128, smem=8192)
    assert set(out.view(np.float32).tolist()) == {32.0}  # 16 products of 2 and 1
    found(TS_MMA.replace("    tcgen05.wait::st.sync.aligned;\n", ""), "race", 128, smem=8192)
    found(
        TS_MMA.replace("st.sync.aligned;\n    tcgen05.fence::before_thread_sync;", "st.sync.aligned;"),
        "tcgen05-fence",
        128,
        smem=8192,
    )
    found(
        TS_MMA.replace("@!%p3 bra PWAIT;\n    tcgen05.fence::after_thread_sync;", "@!%p3 bra PWAIT;"),
        "tcgen05-fence",
        128,
        smem=8192,
    )
    found(TS_MMA.replace("    fence.proxy.async.shared::cta;\n", ""), "proxy", 128, smem=8192)
    found(TS_MMA.replace("[%r24+16], {%r25", "[%r24+8], {%r25"), "tmem-uninit", 128, smem=8192)


def test_tensor_memory_allocation_rules():
    body = "    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], {a};\n" \
           "    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n" \
           "    ld.shared.b32 %r20, [%r4];\n    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, {b};\n    mov.u32 %r9, %r20;\n"  # fmt: skip
    assert clean(body.format(a=512, b=512)).tolist() == [0] * 32
    found(body.format(a=512, b=256), "tmem-dealloc")
    found(body.format(a=48, b=48), "tmem-alloc")
    found(
        body.format(a=64, b=64).replace(
            "    tcgen05.dealloc",
            "    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 32;\n    tcgen05.dealloc",
        ),
        "tmem-alloc",
    )
    two = body.format(a=512, b=512).replace(
        "    tcgen05.relinquish",
        "    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 32;\n    tcgen05.relinquish",
    )
    assert "free tensor-memory columns" in found(two, "deadlock")


# -- registers ----------------------------------------------------------------------------------------------------
def test_setmaxnreg_pool():
    body = """
    setp.ge.u32 %p1, %r2, 4;
    @%p1 bra HIGH;
    setmaxnreg.dec.sync.aligned.u32 {low};
    mov.u32 %r9, 1;
    bra DONE;
HIGH:
    setmaxnreg.inc.sync.aligned.u32 {high};
    mov.u32 %r9, 2;
DONE:
    """
    assert clean(body.format(low=56, high=200), 256, registers=128).tolist() == [1] * 128 + [2] * 128
    message = found(body.format(low=64, high=200), "deadlock", 256, registers=128)
    assert "registers of the CTA's pool" in message
    found(body.format(low=136, high=200), "setmaxnreg", 256, registers=128)
    found(body.format(low=56, high=120).replace("%r2, 4", "%r2, 3"), "setmaxnreg-group", 256, registers=112)
    with pytest.raises(SimError, match=r"136 registers x 512 threads = 69632 exceed the 65536"):
        simple("mov.u32 %r9, 0;", 512, registers=136)


# -- clusters -----------------------------------------------------------------------------------------------------
CLUSTER = """
    mov.u32 %r10, %cluster_ctarank;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r4+1024], 32;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    xor.b32 %r11, %r10, 1;
    add.u32 %r12, %r4, 1024;
    mapa.shared::cluster.u32 %r13, %r12, %r11;
    mapa.shared::cluster.u32 %r14, %r5, %r11;
    mad.lo.s32 %r15, %r10, 1000, %r1;
    st.shared::cluster.b32 [%r14], %r15;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13];
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r12], 0;
    @!%p2 bra WAIT;
    ld.shared.b32 %r9, [%r5];
    mul.wide.u32 %rd1, %r10, 128;
    add.s64 %rd50, %rd50, %rd1;
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""


def cluster_run(body: str, seed: int):
    out = np.zeros(64, np.uint32)
    memory = GlobalMemory()
    text = kernel(PROLOGUE + body + STORE, OUT, dynamic=True)
    launch = Launch(
        text, grid=(2,), block=(32,), cluster=(2,), params=[memory.map("out", out)], dynamic_smem_bytes=2048
    )
    return run(launch, memory, seed=seed), out


def test_distributed_shared_memory_of_a_cluster():
    for seed in SEEDS:
        result, out = cluster_run(CLUSTER, seed)
        assert result.findings == [], [str(f) for f in result.findings]
        assert out.tolist() == [1000 + x for x in range(32)] + list(range(32))
        early = CLUSTER.replace("    barrier.cluster.arrive.relaxed;\n    barrier.cluster.wait;\n", "")
        assert kinds(cluster_run(early, seed)[0]) & {"mbar-unknown", "mbar-init-order", "mbar-overflow", "peer-exited"}
        local = CLUSTER.replace("st.shared::cluster.b32", "st.shared::cta.b32")
        assert "smem-rank" in kinds(cluster_run(local, seed)[0])
        lost = CLUSTER.replace(
            "WAIT:\n    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r12], 0;\n    @!%p2 bra WAIT;\n",
            "",
        )
        assert kinds(cluster_run(lost, seed)[0]) & {"race", "smem-uninit"}


def test_using_the_memory_of_a_cta_that_has_ended():
    gone = CLUSTER.replace("    barrier.cluster.arrive;\n    barrier.cluster.wait;\n", "").replace(
        "READY:\n", "READY:\n    setp.eq.u32 %p5, %r10, 0;\n    barrier.cluster.arrive.relaxed;\n    barrier.cluster.wait;\n    @%p5 exit;\n    mov.u32 %r40, 0;\nDELAY:\n"
        "    add.u32 %r40, %r40, 1;\n    setp.lt.u32 %p6, %r40, 2000;\n    @%p6 bra DELAY;\n").replace(
        "    barrier.cluster.arrive.relaxed;\n    barrier.cluster.wait;\n    xor", "    xor")  # fmt: skip
    assert "peer-exited" in kinds(cluster_run(gone, 0)[0])


def test_multicast_load():
    body = """
    mov.u32 %r10, %cluster_ctarank;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r4+1024], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r4+1024], 128;
READY:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    add.u32 %r12, %r4, 1024;
    setp.ne.u32 %p3, %r10, 0;
    @%p3 bra WAIT;
    elect.sync _|%p2, -1;
    @!%p2 bra WAIT;
    mov.b64 %rd2, map;
    mov.u32 %r20, 3;
    cvt.u16.u32 %h1, %r20;
    cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r4], [%rd2, {0}], [%r12], %h1;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r12], 0;
    @!%p2 bra WAIT;
    ld.shared.b32 %r9, [%r5];
    mul.wide.u32 %rd1, %r10, 128;
    add.s64 %rd50, %rd50, %rd1;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    """
    for seed in SEEDS:
        memory, out = GlobalMemory(), np.zeros(64, np.uint32)
        address = memory.map("in", np.arange(100, 132, dtype=np.uint32))
        text = kernel(PROLOGUE + body + STORE, OUT + ", .param .align 64 .b8 map[128]", dynamic=True)
        params = [memory.map("out", out), TensorMap("u32", address, (32,), (), (32,))]
        launch = Launch(text, grid=(2,), block=(32,), cluster=(2,), params=params, dynamic_smem_bytes=2048)
        result = run(launch, memory, seed=seed)
        assert result.findings == [], [str(f) for f in result.findings]
        assert out.tolist() == 2 * list(range(100, 132))


# -- refusals -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", [
    "add.cc.u32 %r1, %r1, %r1;", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r1}, {%r1}, {%r1};",
    "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;", "tcgen05.shift.cta_group::1.down [%r1];",
    "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, 1;",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, {%r1, %r1, %r1, %r1}, 1;",
    "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd1, [%r1], %r1, 1;",
    "cvt.rn.satfinite.bf16x2.f32 %r1, %r1, %r1;", "match.any.sync.b32 %r1, %r1, -1;", "call foo;",
    "cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r1}], [%r1];",
    "mov.u64 %rd1, %clock64;", "add.sat.s32 %r1, %r1, %r1;", "ex2.approx.ftz.bf16x2 %r1, %r1;", "fma.rn.f16x2 %r1, %r1, %r1, %r1;",
    "ld.local.b32 %r1, [%r1];", "setmaxnreg.inc.sync.aligned.u32 100;", "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;",
    "wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;",
    "bar.foo 0;", "mov.u32 %r1, nowhere;", "add.f32 %r1, %rd1, %r1;", "frobnicate.b32 %r1, %r1;",
])  # fmt: skip
def test_unsupported_is_refused_by_name_before_the_run(code):
    with pytest.raises(SimError) as e:
        prepare(Launch(kernel("mov.u32 %r1, 1;\n" + code), grid=(1,), block=(32,), params=[]))
    assert isinstance(e.value, Unsupported) or "PTX line" in str(e.value)
    assert "PTX line" in str(e.value) and code.split()[0].rstrip(";") in str(e.value)


@pytest.mark.parametrize("target", ["sm_100a", "sm_100f", "sm_100", "sm_90", "sm_80", "sm_100a, debug"])
def test_ptx_for_this_architecture_runs(target):
    out = np.zeros(32, np.uint32)
    memory = GlobalMemory()
    text = kernel("mov.u32 %r1, 7;\nld.param.u64 %rd1, [o];\nst.global.b32 [%rd1], %r1;", ".param .u64 o")
    text = text.replace(".target sm_100a", f".target {target}")
    assert execute(text, [memory.map("out", out)], memory).ok and out[0] == 7


@pytest.mark.parametrize("target", ["sm_90a", "sm_103a", "sm_103f", "sm_103", "sm_120a", "sm_120"])
def test_ptx_for_another_architecture_is_refused_by_name(target):
    text = kernel("mov.u32 %r1, 7;").replace("sm_100a", target)
    with pytest.raises(Unsupported, match=f"PTX: .target {target}: the simulator models sm_100a, .* build it for sm_"):
        prepare(Launch(text, grid=(1,), block=(32,), params=[]))


@pytest.mark.parametrize("header", ["", ".target texmode_unified\n"])
def test_ptx_without_an_architecture_is_refused(header):
    text = kernel("mov.u32 %r1, 7;").replace(".target sm_100a\n", header)
    with pytest.raises(Unsupported, match=r"PTX: .target (\(none\)|texmode_unified): not an sm_ target"):
        prepare(Launch(text, grid=(1,), block=(32,), params=[]))


def test_launch_misuse_is_refused():
    text = kernel("mov.u32 %r1, 1;", ".param .u32 a, .param .align 64 .b8 m[128]")
    good = {"grid": (1,), "block": (32,)}
    tmap = TensorMap("u32", 4096, (32,), (), (32,))
    for changes, message in [
        ({"params": [1]}, "1 parameters; the kernel has 2"), ({"params": [1 << 40, tmap]}, "does not fit"),
        ({"params": [1, 2.0]}, "a float needs"), ({"params": [tmap, tmap]}, "a tensor map needs"),
        ({"params": [1, b"abc"]}, "3 bytes given"), ({"params": [1, tmap], "entry": "other"}, "not one of"),
        ({"params": [1, tmap], "block": (2048,)}, "not launchable"), ({"params": [1, tmap], "grid": (0,)}, "positive"),
        ({"params": [1, tmap], "dynamic_smem_bytes": 233000}, "bytes of shared memory"),
        ({"params": [1, tmap], "grid": (3,), "cluster": (2,)}, "not launchable"),
    ]:  # fmt: skip
        with pytest.raises(SimError, match=message):
            run(Launch(text, **{**good, **changes}), GlobalMemory())
    with pytest.raises(SimError, match="profile"):
        run(Launch(text, **good, params=[1, tmap]), GlobalMemory(), profile="fast")
    required = text.replace("\n{", "\n.reqntid 64\n{", 1)
    with pytest.raises(SimError, match="requires"):
        run(Launch(required, **good, params=[1, tmap]), GlobalMemory())


def test_source_lines_of_findings():
    body = '.file 1 "kernel.py"\n'
    text = kernel("    .loc 1 42 7\n    ld.shared.b32 %r9, [smem];\n", dynamic=True).replace(
        ".visible", body + ".visible"
    )
    result = execute(text, dynamic_smem_bytes=64)
    assert result.findings[0].loc == ("kernel.py", 42) and "kernel.py:42" in str(result.findings[0])
    with pytest.raises(SimError, match="smem-uninit"):
        result.raise_for_findings()


def test_instructions_without_effect():
    body = (
        "griddepcontrol.wait;\n griddepcontrol.launch_dependents;\n nanosleep.u32 20;\n membar.gl;\n mov.u32 %r9, 4;\n"
    )
    assert clean(body + "prefetch.global.L2 [%rd50];\n").tolist() == [4] * 32


def test_some_seeds_take_warps_away():
    """A warp that falls behind everything else finds what luck hides; it costs ticks, not instructions."""
    text = kernel("mov.u32 %r1, %tid.x;\n" + "bar.warp.sync 0xffffffff;\n" * 60)
    runs = [execute(text, seed=seed) for seed in range(24)]
    assert all(r.ok for r in runs) and len({r.steps for r in runs}) == 1
    late = sum(r.ticks > r.steps + 1000 for r in runs)
    assert 0 < late < 24
