"""Row arithmetic on accumulator fragments of wgmma: a thread holds parts of two rows, four threads share a row.

Fragments are lists as `wgmma` describes them. Exponentials follow `softmax`: ``2^(s * scale_log2 + shift)``, with the
row's shift near minus its scaled maximum.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.arch import inline_ptx

from . import softmax

ROWS = 2


def row(acc, r: int):
    """The thread's elements of its row r (0 or 1), columns ascending."""
    return [acc[4 * j + 2 * r + e] for j in range(len(acc) // 4) for e in range(2)]


def merge(rows):
    """The inverse of `row`: both rows' elements in fragment order."""
    return [rows[r][2 * j + e] for j in range(len(rows[0]) // 2) for r in range(ROWS) for e in range(2)]


def tree(op, values):
    """`values` reduced by `op` as a balanced tree."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [op(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


def row_maxima(rows, chains: int = 8):
    """Largest value of each row over the four threads that share it.

    The rows take turns, in `chains` chains each: one dependent maximum after the other would cost its latency.
    """
    acc = [list(values[:chains]) for values in rows]
    for i in range(chains, len(rows[0])):
        for r, values in enumerate(rows):
            acc[r][i % chains] = cute.arch.fmax(acc[r][i % chains], values[i])
    top = [tree(cute.arch.fmax, values) for values in acc]
    for mask in (1, 2):
        top = [cute.arch.fmax(value, shuffle_xor(value, mask)) for value in top]
    return top


def quad_max(value):
    """Largest over the four threads that share a row."""
    for mask in (1, 2):
        value = cute.arch.fmax(value, shuffle_xor(value, mask))
    return value


def quad_sum(value):
    """Sum over the four threads that share a row."""
    for mask in (1, 2):
        value = value + shuffle_xor(value, mask)
    return value


def shuffle_xor(value: Float32, mask: int) -> Float32:
    """The value of the lane whose index differs in the bits of `mask`."""
    return inline_ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {mask}, 0x1f, 0xffffffff;",
        write_only_types=[Float32],
        read_only_args=[value],
    )


def total(values, chains: int = 4):
    """The sum of `values`, as independent chains."""
    acc = list(values[:chains])
    for i, value in enumerate(values[chains:]):
        acc[i % chains] = acc[i % chains] + value
    return tree(lambda a, b: a + b, acc)


def exponentials(values, scale_log2: Float32, shift: Float32):
    """2^(value * scale_log2 + shift)."""
    return [cute.arch.exp2(softmax.fma(value, scale_log2, shift)) for value in values]


def visible_elements(num_visible: Int32, lane: Int32) -> Int32:
    """How many of the thread's elements of a row lie among the first `num_visible` columns of the block.

    Columns ascend with the element index: 2 of every 8 columns belong to the thread, from ``2 (lane % 4)`` on.
    """
    rest = cutlass.max(num_visible, Int32(0)) - 2 * (lane % 4)
    return 2 * (rest >> 3) + cutlass.min(rest & 7, Int32(2))


def mask_row(values, num_visible: Int32, lane: Int32):
    """The row's elements with those past the first `num_visible` columns replaced by -inf."""
    count = visible_elements(num_visible, lane)
    out = []
    for first in range(0, len(values), 32):
        chunk = values[first : first + 32]
        out += softmax.select_bits(chunk, softmax.mask_bits(count, first))
    return out


def scale_rows(acc, factors):
    """Every element times its row's factor."""
    return [value * factors[i // 2 % ROWS] for i, value in enumerate(acc)]
