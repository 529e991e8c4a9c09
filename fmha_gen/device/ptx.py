"""Thin wrappers of the PTX instructions that the kernels use, one function an instruction.

Shared addresses are Int32 in the ``shared::cta`` window. Source of every semantic: the PTX ISA.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx


def smem_base() -> Int32:
    """Shared address of the dynamic shared memory, 1024-byte aligned."""
    return Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())


# Threads and warps.


def grid_size() -> Int32:
    """CTAs of the grid's x dimension, read here and now: a value that loops carry costs a register."""
    # Volatile, or the compiler would read it once; inline_ptx has no spelling for a special register.
    return Int32(llvm.inline_asm(Int32.mlir_type, [], "mov.u32 $0, %nctaid.x;", "=r", has_side_effects=True))


def elect_one():
    """True in one lane of a converged warp."""
    return (
        inline_ptx("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 {$w0}, 1, 0, p; }", write_only_types=[Int32])
        != 0
    )


def any_below_one(value: Float32):
    """True in the whole warp if `value` is below 1 in any lane."""
    return (
        inline_ptx(
            "{ .reg .pred p, q; setp.lt.f32 p, {$r0}, 0f3F800000; vote.sync.any.pred q, p, 0xffffffff;"
            " selp.b32 {$w0}, 1, 0, q; }",
            write_only_types=[Int32],
            read_only_args=[value],
        )
        != 0
    )


def any_above(a: Float32, b: Float32, limit: float):
    """True in the whole warp if, in any lane, `a` or `b` is above `limit` or NaN."""
    return (
        inline_ptx(
            "{ .reg .pred p, q; setp.gtu.f32 p, {$r0}, {$r2}; setp.gtu.or.f32 p, {$r1}, {$r2}, p;"
            " vote.sync.any.pred q, p, 0xffffffff; selp.b32 {$w0}, 1, 0, q; }",
            write_only_types=[Int32],
            read_only_args=[a, b, Float32(limit)],
        )
        != 0
    )


def named_barrier_arrive(barrier_id: Int32, num_threads: int) -> None:
    """Arrive at a named barrier without waiting; all lanes of the warp count."""
    inline_ptx(f"barrier.cta.arrive {{$r0}}, {num_threads};", read_only_args=[barrier_id])


def named_barrier_sync(barrier_id: Int32, num_threads: int) -> None:
    """Arrive at a named barrier and wait for it."""
    inline_ptx(f"barrier.cta.sync {{$r0}}, {num_threads};", read_only_args=[barrier_id])


def set_registers(num_regs: int, launch_regs: int) -> None:
    """Registers per thread of this warpgroup from here on; a multiple of 8."""
    if num_regs < launch_regs:
        cute.arch.setmaxregister_decrease(num_regs)
    elif num_regs > launch_regs:
        cute.arch.setmaxregister_increase(num_regs)


# mbarriers.


def mbarrier_init(bar: Int32, arrive_count: int) -> None:
    inline_ptx(f"mbarrier.init.shared::cta.b64 [{{$r0}}], {arrive_count};", read_only_args=[bar])


def mbarrier_init_fence() -> None:
    """Make initialised mbarriers visible to the asynchronous proxy."""
    inline_ptx("fence.mbarrier_init.release.cluster;")


def mbarrier_arrive(bar: Int32) -> None:
    """One arrival a lane, with release semantics."""
    inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[bar])


def mbarrier_arrive_expect_tx(bar: Int32, tx_bytes: int) -> None:
    """One arrival that also announces `tx_bytes` of asynchronous copies."""
    inline_ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{{$r0}}], {tx_bytes};", read_only_args=[bar])


def mbarrier_wait(bar: Int32, parity: Int32) -> None:
    """Wait until the phase of `parity` has completed; a fresh mbarrier is in phase 0 (parity 1 passes at once)."""
    inline_ptx(
        "{ .reg .pred p;\n"
        "RETRY:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}, 0x989680;\n"
        "@p bra DONE;\n"
        "bra RETRY;\n"
        "DONE:\n"
        "}",
        read_only_args=[bar, parity],
    )


def mbarrier_test(bar: Int32, parity: Int32) -> Int32:
    """1 if the phase of `parity` has completed, else 0, without waiting; see `mbarrier_wait_unless`."""
    return inline_ptx(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[bar, parity],
    )


def mbarrier_wait_unless(done: Int32, bar: Int32, parity: Int32) -> None:
    """`mbarrier_wait`, but for the answer that an earlier `mbarrier_test` gave: its latency is then not waited for."""
    inline_ptx(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, {$r2}, 0;\n"
        "@p bra DONE;\n"
        "RETRY:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1};\n"
        "@p bra DONE;\n"
        "bra RETRY;\n"
        "DONE:\n"
        "}",
        read_only_args=[bar, parity, done],
    )


# Asynchronous copies.


def prefetch_tensormap(tensor_map) -> None:
    inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[tensor_map.get_ptr()])


def tma_load_4d(dst: Int32, tensor_map, bar: Int32, c0, c1: Int32, c2: Int32, c3: Int32) -> None:
    """Load one box at coordinates (c0 innermost) into `dst`; completes transaction bytes on `bar`."""
    inline_ptx(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}, {{$r3}, {$r4}, {$r5}, {$r6}}], [{$r2}];",
        read_only_args=[dst, tensor_map.get_ptr(), bar, Int32(c0), c1, c2, c3],
    )


def tma_store_4d(tensor_map, src: Int32, c0, c1: Int32, c2: Int32, c3: Int32) -> None:
    """Store one box from `src`; part of the current bulk group."""
    inline_ptx(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [{$r0}, {{$r2}, {$r3}, {$r4}, {$r5}}], [{$r1}];",
        read_only_args=[tensor_map.get_ptr(), src, Int32(c0), c1, c2, c3],
    )


def bulk_commit_group() -> None:
    inline_ptx("cp.async.bulk.commit_group;")


def bulk_wait_group_read(pending: int) -> None:
    """Wait until at most `pending` bulk groups of this thread still read shared memory."""
    inline_ptx(f"cp.async.bulk.wait_group.read {pending};")


def bulk_wait_group(pending: int) -> None:
    """Wait until at most `pending` bulk groups of this thread are incomplete."""
    inline_ptx(f"cp.async.bulk.wait_group {pending};")


def fence_proxy_async_shared() -> None:
    """Order this thread's shared-memory accesses before later accesses by the asynchronous proxy."""
    inline_ptx("fence.proxy.async.shared::cta;")


# Memory.


def store_shared_f32(addr: Int32, value: Float32) -> None:
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def load_shared_f32(addr: Int32) -> Float32:
    return inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def store_shared_v4(addr: Int32, values) -> None:
    """Store four 32-bit words at a 16-byte aligned address."""
    inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *values])


def store_global_f32(addr: Int64, value: Float32) -> None:
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def store_matrices(addr: Int32, values) -> None:
    """stmatrix: four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8."""
    inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[addr, *values],
    )


def load_matrices(addr: Int32) -> list[Int32]:
    """ldmatrix: four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8."""
    return list(
        inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[addr],
        )
    )


def opaque(value: Int32) -> Int32:
    """`value`, of which the compiler knows nothing: what derives from it is computed here, not ahead of a loop."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
