"""Tensor memory: allocation, loads and stores of whole row segments, fences.

A warp reads and writes the 32 lanes of its own quadrant (warp index modulo 4); an address holds the first lane of the
quadrant in bits 16 and up. Loads are issued together with their ``wait::ld`` in one asm block: the compiler does not
know that the wait orders the registers, and would otherwise be free to touch them before it.
"""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass.cute.arch import inline_ptx


def alloc(dst_smem: Int32, num_cols: int) -> None:
    """Allocate TMEM columns by one whole warp; the address is written to shared memory at `dst_smem`."""
    inline_ptx(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {num_cols};", read_only_args=[dst_smem]
    )
    inline_ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;")


def dealloc(tmem: Int32, num_cols: int) -> None:
    """Free what `alloc` got, by one whole warp, after every use."""
    inline_ptx(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {num_cols};", read_only_args=[tmem])


def fence_before_thread_sync() -> None:
    inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_thread_sync() -> None:
    inline_ptx("tcgen05.fence::after_thread_sync;")


def wait_store() -> None:
    """Wait until this warp's TMEM stores have been performed."""
    inline_ptx("tcgen05.wait::st.sync.aligned;")


def load_row(tmem: Int32, num_cols: int, step: int = 32) -> list[Float32]:
    """`num_cols` consecutive columns of the thread's lane as float32 registers, complete on return.

    step is the widest load instruction; it and num_cols are powers of two, or num_cols is a multiple of step.
    """
    step = min(step, num_cols)
    lines = []
    for first in range(0, num_cols, step):
        regs = ", ".join(f"{{$w{i}}}" for i in range(first, first + step))
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {{{regs}}}, [{{$r0}} + {first}];")
    lines.append("tcgen05.wait::ld.sync.aligned;")
    return list(inline_ptx("\n".join(lines), write_only_types=[Float32] * num_cols, read_only_args=[tmem]))


def store_row(tmem: Int32, first_col: int, values) -> None:
    """Store 32-bit registers to consecutive columns from `first_col` of the thread's lane (a power of two of them)."""
    regs = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32 [{{$r0}} + {first_col}], {{{regs}}};",
        read_only_args=[tmem, *values],
    )
