"""mma.sync: matrix products of one warp, 16 rows at a time.

The accumulators of a warp's m16n8k16 products, 8 columns after 8, are in the order of a wgmma fragment (`wgmma`).
"""

from __future__ import annotations

from .wgmma import tied_asm


def step(acc, a_words, b_words, fmt: str):
    """acc + A B^T of one step of depth 16: 16 x N, as N/2 float32.

    a_words: four words of A, as `ptx.load_matrices` reads a 16 x 16 tile. b_words: two words for every 8 columns, as it
    reads 16 rows of B at a time. fmt ``bf16`` or ``f16``.
    """
    num_acc = len(acc)
    a = ", ".join(f"${2 * num_acc + i}" for i in range(4))
    lines = []
    for j in range(num_acc // 4):
        d = ", ".join(f"${4 * j + i}" for i in range(4))
        b = ", ".join(f"${2 * num_acc + 4 + 2 * j + i}" for i in range(2))
        lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{fmt}.{fmt}.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{d}}};")
    return tied_asm("\n".join(lines), floats=acc, reads=[*a_words, *b_words])[0]
