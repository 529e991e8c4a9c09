"""The pipeline kernel is clean as written, and every fault put into it is found under every scheduler seed tried."""

# ruff: noqa: E501 (PTX text and tables of it)
from __future__ import annotations

import pytest

from tests.sim import pipeline_kernel as pk

SEEDS = range(6)


def test_clean_kernel_is_clean_and_every_seed_gives_the_same_bits():
    images = set()
    for seed in range(12):
        result, error, image = pk.launch(pk.source(), rounds=3, seed=seed)
        assert result.findings == [] and result.fault is None
        assert error < 1e-4
        images.add(image)
    assert len(images) == 1


DROP = ""
FAULTS = {
    "no proxy fence before the TMA store": ("proxy", [("    fence.proxy.async.shared::cta;\n", DROP)]),
    "proxy fence after the barrier, by the wrong warps": (
        "proxy", [("    fence.proxy.async.shared::cta;\n    bar.sync 1, 128;\n", "    bar.sync 1, 128;\n"),
                  ("EPI_STORED:\n", "EPI_STORED:\n    fence.proxy.async.shared::cta;\n")]),
    "no wait::ld": ("tcgen05-ld-unwaited", [("    tcgen05.wait::ld.sync.aligned;\n", DROP)]),
    "no fence after waiting for the MMA": (
        "tcgen05-fence", [("@!%p3 bra EPI_WAIT;\n    tcgen05.fence::after_thread_sync;\n", "@!%p3 bra EPI_WAIT;\n")]),
    "no fence before the drained arrival": (
        "tcgen05-fence", [("    tcgen05.fence::before_thread_sync;\n    mbarrier.arrive.shared.b64 _, [%r7];\n",
                           "    mbarrier.arrive.shared.b64 _, [%r7];\n")]),
    "no fence after the drained wait": (
        "tcgen05-fence", [("@!%p3 bra DRAIN_WAIT;\n    tcgen05.fence::after_thread_sync;\n", "@!%p3 bra DRAIN_WAIT;\n")]),
    "drained arrival before wait::ld": (
        "race", [("    mbarrier.arrive.shared.b64 _, [%r7];\n", DROP),
                 ("    tcgen05.wait::ld.sync.aligned;\n", "    mbarrier.arrive.shared.b64 _, [%r7];\n    tcgen05.wait::ld.sync.aligned;\n")]),
    "MMA does not wait for the load": (
        {"race", "smem-uninit"}, [("MMA_WAIT:\n    mbarrier.try_wait.parity.shared.b64 %p3, [%r4], %r21;\n    @!%p3 bra MMA_WAIT;\n", DROP)]),
    "load does not wait for the MMA": (
        {"race", "tma-phase", "mbar-overflow"}, [("LOAD_WAIT:\n    mbarrier.try_wait.parity.shared.b64 %p3, [%r5], %r22;\n    @!%p3 bra LOAD_WAIT;\n", DROP)]),
    "load waits with the wrong parity": ("deadlock", [("    xor.b32 %r22, %r21, 1;\nLOAD_WAIT", "    mov.u32 %r22, %r21;\nLOAD_WAIT")]),
    "MMA does not wait for the epilogue": (
        "race", [("DRAIN_WAIT:\n    mbarrier.try_wait.parity.shared.b64 %p3, [%r7], %r22;\n    @!%p3 bra DRAIN_WAIT;\n", DROP)]),
    "epilogue does not wait for the MMA": (
        {"race", "tmem-uninit"}, [("EPI_WAIT:\n    mbarrier.try_wait.parity.shared.b64 %p3, [%r6], %r21;\n    @!%p3 bra EPI_WAIT;\n", DROP)]),
    "too few bytes expected": ({"tma-phase", "race", "mbar-tx", "deadlock"}, [("[%r4], 24576", "[%r4], 16384")]),
    "too many bytes expected": ("deadlock", [("[%r4], 24576", "[%r4], 24592")]),
    "arrive count too high": ("deadlock", [("init.shared.b64 [%r7], 128", "init.shared.b64 [%r7], 129")]),
    "arrive count too low": ({"mbar-overflow", "race", "deadlock"}, [("init.shared.b64 [%r7], 128", "init.shared.b64 [%r7], 96")]),
    "no commit": ("deadlock", [("    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r6];\n", DROP)]),
    "barriers not fenced after initialisation": ("mbar-init-fence", [("    fence.mbarrier_init.release.cluster;\n", DROP)]),
    "initialisation races with its use": ({"mbar-init-order", "mbar-unknown", "smem-uninit", "race"}, [("    bar.sync 0;\n    tcgen05.fence::after", "    tcgen05.fence::after")]),
    "tensor memory not freed": ("tmem-leak", [("    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;\n", DROP)]),
    "tensor memory freed while it is read": ({"race", "tmem-unallocated"}, [("    bar.warp.sync -1;\n    bar.sync 0;\n    setp.ne.u32 %p1, %r2, 1;\n    @%p1 bra LEAVE", "    bar.warp.sync -1;\n    setp.ne.u32 %p1, %r2, 1;\n    @%p1 bra LEAVE")]),
    "no fence of the readers before tensor memory is freed": ("tcgen05-fence", [
        ("    tcgen05.wait::ld.sync.aligned;\n    tcgen05.fence::before_thread_sync;\n", "    tcgen05.wait::ld.sync.aligned;\n")]),
    "too few columns": ("tmem-unallocated", [("[%r8], 64", "[%r8], 32"), ("%r10, 64", "%r10, 32")]),
    "columns not a power of two": ("tmem-alloc", [("[%r8], 64", "[%r8], 96")]),
    "wrong lane quadrant": ("tmem-quadrant", [("    shl.b32 %r41, %r41, 21;", "    mov.u32 %r41, 0;")]),
    "accumulates into garbage": ("tmem-uninit", [("%rd1, %rd2, %r32, 0;", "%rd1, %rd2, %r32, 1;")]),
    "MMA by the whole warp": ({"mma-lanes", "mbar-overflow"}, [("    elect.sync _|%p2, -1;\n    @!%p2 bra MMA_NEXT;\n", DROP)]),
    "descriptor without the sm_100 bits": ("mma-descriptor", [("    mov.b64 %rd1, {%r30, DESC_HI};", "    mov.b64 %rd1, {%r30, 0x40000040};")]),
    "descriptor start off the swizzle pattern": ("mma-descriptor", [("    add.s64 %rd3, %rd1, 2;", "    add.s64 %rd3, %rd1, 10;")]),
    "descriptor outside shared memory": ("mma-operand", [("    add.u32 %r31, %r30, 1024;", "    add.u32 %r31, %r30, 4096;")]),
    "instruction descriptor of another shape": ("mma-descriptor", [("    mov.u32 %r32, IDESC;", "    mov.u32 %r32, 0x0;")]),
    "no wait for the store's reads": ({"race", "bulk-exit"}, [("    cp.async.bulk.wait_group.read 0;\n", DROP)]),
    "store leaves nothing to wait for: not committed": ({"race", "bulk-exit"}, [("    cp.async.bulk.commit_group;\n", DROP)]),
    "C is overwritten while it is stored": ("race", [("EPI_STORED:\n    bar.sync 1, 128;\n", "EPI_STORED:\n")]),
    "misaligned TMA destination": ("tma-operand", [("    add.u32 %r24, %r3, 16384;\n", "    add.u32 %r24, %r3, 16400;\n")]),
    "TMA destination beyond shared memory": ("smem-bounds", [("    add.u32 %r24, %r3, 16384;\n", "    add.u32 %r24, %r3, 57344;\n")]),
    "TMA load over the barriers": ("mbar-access", [("[%r3], [%rd1, {0, %r23}]", "[%r99], [%rd1, {0, %r23}]"), ("    shl.b32 %r23, %r20, 7;\n", "    shl.b32 %r23, %r20, 7;\n    add.u32 %r99, %r3, 40960;\n    add.u32 %r99, %r99, 128;\n")]),
    "TMA load by every lane": ({"tma-lanes", "mbar-tx", "mbar-overflow"}, [("    elect.sync _|%p2, -1;\n    @!%p2 bra END;\n    mov.b64 %rd1, tma_a;", "    mov.b64 %rd1, tma_a;")]),
    "aligned instruction in divergent code": ("partial-warp", [("    tcgen05.ld.sync.aligned.32x32b.x32.b32 {REGS1}", "    setp.lt.u32 %p7, %r40, 7;\n    @%p7 tcgen05.ld.sync.aligned.32x32b.x32.b32 {REGS1}")]),
    "named barrier count that never fills": ("deadlock", [("    bar.sync 1, 128;\n    setp.ne.u32 %p5", "    bar.sync 1, 160;\n    setp.ne.u32 %p5"), ("EPI_STORED:\n    bar.sync 1, 128;", "EPI_STORED:\n    bar.sync 1, 160;")]),
    "named barrier too small": ({"bar-count", "race", "bar-twice", "proxy", "deadlock"}, [("    bar.sync 1, 128;\n    setp.ne.u32 %p5", "    bar.sync 1, 96;\n    setp.ne.u32 %p5"), ("EPI_STORED:\n    bar.sync 1, 128;", "EPI_STORED:\n    bar.sync 1, 96;")]),
    "wait with a parity that is none": ("mbar-parity", [("    xor.b32 %r22, %r21, 1;\nDRAIN", "    add.u32 %r22, %r21, 2;\nDRAIN")]),
    "generic read of a barrier": ("mbar-access", [("    ld.shared.b32 %r10, [%r8];", "    ld.shared.b32 %r10, [%r8];\n    ld.shared.b32 %r98, [%r6];")]),
    "unmapped tensor map": ("tensor-map", [("    mov.b64 %rd2, tma_b;", "    mov.b64 %rd2, 4096;")]),
    "register never written": ("reg-uninit", [("    shl.b32 %r23, %r20, 7;\n", "    shl.b32 %r23, %r97, 7;\n")]),
    "trap": ("trap", [("MMA_NEXT:\n", "MMA_NEXT:\n    trap;\n")]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name):
    expected, edits = FAULTS[name]
    expected = {expected} if isinstance(expected, str) else expected
    text = pk.source(*edits)
    for seed in SEEDS:
        result, _, _ = pk.launch(text, rounds=3, seed=seed)
        found = {f.kind for f in result.findings if f.severity != "warning"}
        assert found & expected, f"seed {seed}: {sorted(found)}"


def test_reports_name_role_line_and_place():
    name, edits = FAULTS["no proxy fence before the TMA store"]
    text = pk.source(*edits)
    result, _, _ = pk.launch(text)
    finding = next(f for f in result.findings if f.kind == "proxy")
    assert finding.role == "epilogue0" and finding.warp == 4
    assert "cp.async.bulk.tensor.2d.global" in text.split("\n")[finding.line - 1]
    assert "st.shared.v4.b32" in finding.message and "fence.proxy.async" in str(finding)


def test_deadlock_names_barrier_phase_and_arrivals():
    _, edits = FAULTS["arrive count too high"]
    result, _, _ = pk.launch(pk.source(*edits), rounds=3)
    assert result.fault is not None and result.fault.kind == "deadlock"
    assert "pending arrivals 1 of 129" in result.fault.message and "(mma) waits for parity 0" in result.fault.message


def test_output_outside_the_tensor_is_a_fault():
    result, _, _ = pk.launch(pk.source(), rounds=2, c_rows=200)
    assert result.fault is not None and result.fault.kind == "global-bounds" and "'c'" in result.fault.message


def test_scoreboard_profile_turns_register_dependencies_into_warnings():
    _, edits = FAULTS["no wait::ld"]
    result, error, _ = pk.launch(
        pk.source(
            *edits,
            ("    tcgen05.fence::before_thread_sync;\n    mbarrier.arrive.shared.b64 _, [%r7];\n", ""),
            ("STORES\n", "STORES\n    mbarrier.arrive.shared.b64 _, [%r7];\n"),
        ),
        rounds=3,
        profile="scoreboard",
    )
    assert result.ok and error < 1e-4
    assert {"tcgen05-ld-unwaited", "tcgen05-fence"} <= {f.kind for f in result.findings}


def test_counters_by_role_and_loop():
    result, _, _ = pk.launch(pk.source(), rounds=3)
    loops = result.counters.loops["epilogue1"]
    outer, wait = sorted(loops, key=lambda loop: loop.depth)
    assert (outer.depth, wait.depth) == (1, 2) and wait.iterations >= 3  # a wait may be repeated
    assert outer.iterations == 3 and outer.own < outer.instructions and outer.by_opcode["st.shared.v4.b32"] == 48
    assert result.counters.opcodes["mma"]["tcgen05.mma.cta_group::1.kind::f16"] == 12
    assert result.steps == sum(result.counters.warps.values())
