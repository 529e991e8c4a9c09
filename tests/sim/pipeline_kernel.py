"""One small kernel with everything a tcgen05 pipeline has; the mutation tests break it in one place at a time.

256 threads: warp 0 loads A (128 x 64) and B (64 x 64, bf16) by TMA, warp 1 allocates tensor memory and issues the MMAs,
warps 4-7 read D, write it to shared memory as float32, and warp 4 stores it by TMA. `rounds` tiles along A's rows.
"""

# ruff: noqa: E501 (PTX text and tables of it)
from __future__ import annotations

import numpy as np

from fmha_gen.sim import GlobalMemory, Launch, TensorMap, run
from tests.sim.ptx_kit import kernel

ROLES = {0: "load", 1: "mma", 4: "epilogue0", 5: "epilogue1", 6: "epilogue2", 7: "epilogue3"}
DESC_HI = 0x40004040  # 128B swizzle, SBO 1024, sm_100
IDESC = 1 << 4 | 1 << 7 | 1 << 10 | (64 >> 3) << 17 | (128 >> 4) << 24  # f32 += bf16 x bf16, M 128, N 64

BODY = """
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    mov.u32 %r3, smem;                 // A +0, B +16384, C +24576 (2 x 16384), barriers +57344
    add.u32 %r4, %r3, 57344;           // full
    add.u32 %r5, %r3, 57352;           // empty
    add.u32 %r6, %r3, 57360;           // done
    add.u32 %r7, %r3, 57368;           // drained
    add.u32 %r8, %r3, 57376;           // tensor-memory address
    ld.param.u32 %r9, [rounds];
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra ALLOC;
    elect.sync _|%p2, -1;
    @!%p2 bra INIT_DONE;
    mbarrier.init.shared.b64 [%r4], 1;
    mbarrier.init.shared.b64 [%r5], 1;
    mbarrier.init.shared.b64 [%r6], 1;
    mbarrier.init.shared.b64 [%r7], 128;
    fence.mbarrier_init.release.cluster;
INIT_DONE:
    bar.warp.sync -1;
    bra START;
ALLOC:
    setp.ne.u32 %p1, %r2, 1;
    @%p1 bra START;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r8], 64;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
START:
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r10, [%r8];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra LOAD;
    setp.eq.u32 %p1, %r2, 1;
    @%p1 bra MMA;
    setp.ge.u32 %p1, %r2, 4;
    @%p1 bra EPILOGUE;
    bra END;

LOAD:
    elect.sync _|%p2, -1;
    @!%p2 bra END;
    mov.b64 %rd1, tma_a;
    mov.b64 %rd2, tma_b;
    mov.u32 %r20, 0;                   // round
    mov.u32 %r21, 0;                   // phase
LOAD_LOOP:
    xor.b32 %r22, %r21, 1;
LOAD_WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r5], %r22;
    @!%p3 bra LOAD_WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 24576;
    shl.b32 %r23, %r20, 7;
    add.u32 %r24, %r3, 16384;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd1, {0, %r23}], [%r4];
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r24], [%rd2, {0, 0}], [%r4];
    xor.b32 %r21, %r21, 1;
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p4, %r20, %r9;
    @%p4 bra LOAD_LOOP;
    bra END;

MMA:
    mov.u32 %r20, 0;
    mov.u32 %r21, 0;
    shr.u32 %r30, %r3, 4;
    or.b32 %r30, %r30, 0x10000;
    add.u32 %r31, %r30, 1024;          // B: +16384
MMA_LOOP:
MMA_WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r4], %r21;
    @!%p3 bra MMA_WAIT;
    xor.b32 %r22, %r21, 1;
DRAIN_WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r7], %r22;
    @!%p3 bra DRAIN_WAIT;
    tcgen05.fence::after_thread_sync;
    elect.sync _|%p2, -1;
    @!%p2 bra MMA_NEXT;
    mov.b64 %rd1, {%r30, DESC_HI};
    mov.b64 %rd2, {%r31, DESC_HI};
    add.s64 %rd3, %rd1, 2;
    add.s64 %rd4, %rd2, 2;
    add.s64 %rd5, %rd1, 4;
    add.s64 %rd6, %rd2, 4;
    add.s64 %rd7, %rd1, 6;
    add.s64 %rd8, %rd2, 6;
    mov.u32 %r32, IDESC;
    tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd1, %rd2, %r32, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd3, %rd4, %r32, 1;
    tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd5, %rd6, %r32, 1;
    tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd7, %rd8, %r32, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r6];
MMA_NEXT:
    bar.warp.sync -1;
    xor.b32 %r21, %r21, 1;
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p4, %r20, %r9;
    @%p4 bra MMA_LOOP;
    bra END;

EPILOGUE:
    mov.u32 %r20, 0;
    mov.u32 %r21, 0;
    and.b32 %r40, %r1, 127;
    and.b32 %r41, %r2, 3;
    shl.b32 %r41, %r41, 21;            // lane 32 * (warp % 4)
    add.u32 %r41, %r41, %r10;
    add.u32 %r42, %r41, 32;
    shl.b32 %r43, %r40, 7;
    add.u32 %r43, %r43, %r3;
    add.u32 %r43, %r43, 24576;         // this row of C, first 32 columns
    mov.b64 %rd1, tma_c;
EPI_LOOP:
EPI_WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r6], %r21;
    @!%p3 bra EPI_WAIT;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {REGS0}, [%r41];
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {REGS1}, [%r42];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    mbarrier.arrive.shared.b64 _, [%r7];
STORES
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
    setp.ne.u32 %p5, %r2, 4;
    @%p5 bra EPI_STORED;
    elect.sync _|%p2, -1;
    @!%p2 bra EPI_ISSUED;
    add.u32 %r44, %r3, 24576;
    add.u32 %r45, %r3, 40960;
    shl.b32 %r46, %r20, 7;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {0, %r46}], [%r44];
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {32, %r46}], [%r45];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
EPI_ISSUED:
    bar.warp.sync -1;
EPI_STORED:
    bar.sync 1, 128;
    xor.b32 %r21, %r21, 1;
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p4, %r20, %r9;
    @%p4 bra EPI_LOOP;

END:
    bar.warp.sync -1;
    bar.sync 0;
    setp.ne.u32 %p1, %r2, 1;
    @%p1 bra LEAVE;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;
LEAVE:
"""

PARAMS = ".param .align 64 .b8 tma_a[128], .param .align 64 .b8 tma_b[128], .param .align 64 .b8 tma_c[128], .param .u32 rounds"


def source(*edits: tuple[str, str]) -> str:
    """The kernel with edits (old text, new text); every old text must be there."""
    regs = [", ".join(f"%r{base + k}" for k in range(32)) for base in (100, 132)]
    stores = []
    for half, base in enumerate((100, 132)):
        for k in range(0, 32, 4):
            items = ", ".join(f"%r{base + k + j}" for j in range(4))
            stores.append(f"    st.shared.v4.b32 [%r43+{half * 16384 + 4 * k}], {{{items}}};")
    body = BODY
    for old, new in edits:
        assert old in body, f"the pipeline kernel has no {old!r}"
        body = body.replace(old, new)
    body = body.replace("REGS0", regs[0]).replace("REGS1", regs[1]).replace("STORES", "\n".join(stores))
    return kernel(body.replace("DESC_HI", hex(DESC_HI)).replace("IDESC", str(IDESC)), PARAMS, dynamic=True)


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widen(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def launch(
    text: str,
    rounds: int = 2,
    seed: int = 0,
    profile: str = "isa",
    c_rows: int | None = None,
    registers: int | None = None,
):
    """Run; (Result, largest error, bytes of C)."""
    rng = np.random.default_rng(3)
    a, b = bf16(rng.normal(size=(128 * rounds, 64))), bf16(rng.normal(size=(64, 64)))
    c = np.full((c_rows or 128 * rounds, 64), np.nan, np.float32)
    memory = GlobalMemory()
    where = [memory.map(n, x) for n, x in (("a", a), ("b", b), ("c", c))]
    maps = [TensorMap("bf16", where[0], (64, 128 * rounds), (128,), (64, 128), swizzle="128B"),
            TensorMap("bf16", where[1], (64, 64), (128,), (64, 64), swizzle="128B"),
            TensorMap("f32", where[2], (64, 128 * rounds), (256,), (32, 128))]  # fmt: skip
    result = run(Launch(text, grid=(1,), block=(256,), params=[*maps, rounds], dynamic_smem_bytes=58368, roles=ROLES,
                        registers=registers), memory, seed=seed, profile=profile, max_steps=400_000)  # fmt: skip
    want = widen(a) @ widen(b).T
    with np.errstate(invalid="ignore"):
        error = float(np.abs(c[: want.shape[0]] - want[: c.shape[0]]).max())
    return result, error, c.tobytes()
