"""tcgen05.mma: shared-memory descriptors and the issue of one matrix product as a run of K steps.

All of it is for one elected thread: products of one thread execute in the order of issue, and a commit covers all that
the thread issued before it. Of a 64-bit matrix descriptor only the low word varies (start address and leading byte
offset); the high word (stride byte offset, version, swizzle) is a constant of the plan.
"""

from __future__ import annotations

from cutlass import Int32
from cutlass.cute.arch import inline_ptx


def desc_low(addr: Int32, leading_bytes: int) -> Int32:
    """Low word of the descriptor of the operand that starts at shared address `addr`, 16-byte aligned."""
    return (addr >> 4) | Int32((leading_bytes >> 4) << 16)


def mma_ss(tmem_d: Int32, a_low: Int32, b_low: Int32, desc_high: int, idesc: int, accumulate) -> None:
    """D (+)= A B with both operands in shared memory; `accumulate` is 0 or 1, at trace time or at run time."""
    inline_ptx(
        "{ .reg .pred p; .reg .b32 d, i; .reg .b64 a, b;\n"
        "mov.b32 d, {$r0};\n"
        f"mov.b64 a, {{{{$r1}}, {desc_high:#x}}};\n"
        f"mov.b64 b, {{{{$r2}}, {desc_high:#x}}};\n"
        f"mov.b32 i, {idesc:#x};\n"
        "setp.ne.b32 p, {$r3}, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [d], a, b, i, p; }",
        read_only_args=[tmem_d, a_low, b_low, Int32(accumulate)],
    )


def mma_ts(tmem_d: Int32, tmem_a: Int32, b_low: Int32, desc_high: int, idesc: int, accumulate) -> None:
    """D (+)= A B with A in tensor memory."""
    inline_ptx(
        "{ .reg .pred p; .reg .b32 d, a, i; .reg .b64 b;\n"
        "mov.b32 d, {$r0};\n"
        "mov.b32 a, {$r1};\n"
        f"mov.b64 b, {{{{$r2}}, {desc_high:#x}}};\n"
        f"mov.b32 i, {idesc:#x};\n"
        "setp.ne.b32 p, {$r3}, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [d], [a], b, i, p; }",
        read_only_args=[tmem_d, tmem_a, b_low, Int32(accumulate)],
    )


def commit(bar: Int32) -> None:
    """Arrive at mbarrier `bar` when all products that this thread issued so far have completed."""
    inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];", read_only_args=[bar]
    )
