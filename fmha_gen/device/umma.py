"""tcgen05.mma: shared-memory descriptors and the issue of one matrix product as a run of K steps.

All of it is for one elected thread: products of one thread execute in the order of issue, and a commit covers all that
the thread issued before it. Of a 64-bit matrix descriptor only the low word varies (start address and leading byte
offset); the high word (stride byte offset, version, swizzle) is a constant of the plan.
"""

from __future__ import annotations

from cutlass import Int32
from cutlass.cute.arch import inline_ptx


def tmem_base(smem: Int32) -> Int32:
    """0, the column where an allocation of all tensor memory starts, as a value that the compiler cannot fold.

    Shared addresses are below 2^24. Given constants, ptxas 13.4 builds each address of a tcgen05.mma in a vector
    register and moves it over: 58 more issue slots in the main loop than with one uniform register to start from.
    """
    return smem >> 24


def desc_low(addr: Int32, desc: int) -> Int32:
    """Low word of the matrix descriptor `desc` with its operand at shared address `addr`, 16-byte aligned."""
    return (addr >> 4) | Int32(desc & 0xFFFFFFFF)


def mma_ss(tmem_d: Int32, a_low: Int32, b_low: Int32, desc: int, idesc: int, accumulate) -> None:
    """D (+)= A B with both operands in shared memory, their descriptors alike but for the low word.

    `accumulate` is 0 or 1, at trace time or at run time.
    """
    inline_ptx(
        "{ .reg .pred p; .reg .b32 d, i; .reg .b64 a, b;\n"
        "mov.b32 d, {$r0};\n"
        f"mov.b64 a, {{{{$r1}}, {desc >> 32:#x}}};\n"
        f"mov.b64 b, {{{{$r2}}, {desc >> 32:#x}}};\n"
        f"mov.b32 i, {idesc:#x};\n"
        "setp.ne.b32 p, {$r3}, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [d], a, b, i, p; }",
        read_only_args=[tmem_d, a_low, b_low, Int32(accumulate)],
    )


def mma_ts(tmem_d: Int32, tmem_a: Int32, b_low: Int32, desc: int, idesc: int, accumulate) -> None:
    """D (+)= A B with A in tensor memory and B in shared memory."""
    inline_ptx(
        "{ .reg .pred p; .reg .b32 d, a, i; .reg .b64 b;\n"
        "mov.b32 d, {$r0};\n"
        "mov.b32 a, {$r1};\n"
        f"mov.b64 b, {{{{$r2}}, {desc >> 32:#x}}};\n"
        f"mov.b32 i, {idesc:#x};\n"
        "setp.ne.b32 p, {$r3}, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [d], [a], b, i, p; }",
        read_only_args=[tmem_d, tmem_a, b_low, Int32(accumulate)],
    )


def commit(bar: Int32) -> None:
    """Arrive at mbarrier `bar` when all products that this thread issued so far have completed."""
    inline_ptx("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];", read_only_args=[bar])
