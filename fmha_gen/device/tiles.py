"""Which tile a CTA works on, and which key blocks a tile needs. Shared by all architectures.

A tile is `rows` consecutive query rows of one head of one batch entry. Keys come in blocks of `tile_n`. With a causal
mask key j is visible to row i iff ``j <= i + seqlen_k - seqlen_q`` (aligned to the bottom right).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32


def ceil_div(a, b: int):
    return (a + (b - 1)) // b


@cute.jit
def static_order(tile: Int32, num_m_blocks: Int32, num_heads: Int32):
    """(m_block, head, batch) with m_block fastest: neighbouring CTAs share K and V."""
    m_block = tile % num_m_blocks
    rest = tile // num_m_blocks
    return m_block, rest % num_heads, rest // num_heads


@cute.jit
def longest_first_order(tile: Int32, num_m_blocks: Int32, num_heads: Int32, batch: Int32, heads_per_section: Int32):
    """(m_block, head, batch), most keys first within a section of heads whose K and V fit the L2 cache."""
    section_tiles = heads_per_section * num_m_blocks
    section = tile // section_tiles
    in_section = tile - section * section_tiles
    heads_here = cutlass.min(heads_per_section, num_heads * batch - section * heads_per_section)
    row = in_section // heads_here
    head_batch = section * heads_per_section + in_section - row * heads_here
    return num_m_blocks - 1 - row, head_batch % num_heads, head_batch // num_heads


@cute.jit
def paired_order(tile: Int32, num_m_blocks: Int32, num_heads: Int32):
    """(m_block, head, batch), last and first m_block in turn: under a causal mask, neighbours add up alike."""
    place = tile % num_m_blocks
    head_batch = tile // num_m_blocks
    half = place // 2
    m_block = cutlass.select_(place % 2 == 0, num_m_blocks - 1 - half, half)
    return m_block, head_batch % num_heads, head_batch // num_heads


@cute.jit
def first_sorted_tile(num_m_blocks: Int32, num_tiles: Int32, num_ctas: Int32):
    """First tile of the balanced order's part that is sorted by size: one to two rounds of pairs are left for it.

    `num_tiles`, so none, where a head's tiles are no whole pairs.
    """
    rounds = cutlass.max(num_tiles // (2 * num_ctas) - 1, Int32(0))
    return cutlass.select_(num_m_blocks % 2 == 0, 2 * num_ctas * rounds, num_tiles)


@cute.jit
def next_sorted_tile(tile: Int32, first_sorted: Int32, num_tiles: Int32, cta: Int32, num_ctas: Int32):
    """The CTA's tile after this sorted one. Rounds go back and forth, so that who took a long one takes a short one.

    Fewer than four tiles a CTA are sorted.
    """
    place = tile - first_sorted
    third = cutlass.select_(place < 2 * num_ctas, 2 * num_ctas + cta, 4 * num_ctas - 1 - cta)
    after = cutlass.select_(place < num_ctas, 2 * num_ctas - 1 - cta, third)
    return cutlass.select_(place < 3 * num_ctas, first_sorted + after, num_tiles)


@cute.jit
def balanced_order(tile: Int32, first_sorted: Int32, num_m_blocks: Int32, num_heads: Int32, batch: Int32):
    """(m_block, head, batch): `paired_order` before tile `first_sorted`, from there on the most keys first.

    The first head with tiles left may have lost its outer pairs: each of those sizes has a tile less.
    """
    place = tile % num_m_blocks
    head_batch = tile // num_m_blocks
    m_block = cutlass.select_(place % 2 == 0, num_m_blocks - 1 - place // 2, place // 2)
    if tile >= first_sorted:
        first_head = first_sorted // num_m_blocks
        lost_pairs = first_sorted % num_m_blocks // 2
        heads = num_heads * batch - first_head
        num_tiles = num_m_blocks * num_heads * batch
        index = tile - first_sorted
        # The second half are the short tiles of the pairs whose long tiles are the first half, in reverse.
        short = index >= (num_tiles - first_sorted) // 2
        index = cutlass.select_(short, num_tiles - first_sorted - 1 - index, index)
        outer_tiles = lost_pairs * (heads - 1)
        outer = index < outer_tiles
        index = cutlass.select_(outer, index, index - outer_tiles)
        heads = cutlass.max(cutlass.select_(outer, heads - 1, heads), Int32(1))
        pair = index // heads
        head_batch = first_head + index - pair * heads + cutlass.select_(outer, Int32(1), Int32(0))
        pair = pair + cutlass.select_(outer, Int32(0), lost_pairs)
        m_block = cutlass.select_(short, pair, num_m_blocks - 1 - pair)
    return m_block, head_batch % num_heads, head_batch // num_heads


@cute.jit
def num_blocks_full(seqlen_k: Int32, tile_n: cutlass.Constexpr):
    """Key blocks of a tile without a mask."""
    return ceil_div(seqlen_k, tile_n)


@cute.jit
def num_blocks_causal(
    m_block: Int32, rows: cutlass.Constexpr, tile_n: cutlass.Constexpr, seqlen_q: Int32, seqlen_k: Int32
):
    """Key blocks that any row of the tile sees; 0 if none does."""
    last_row = cutlass.min((m_block + 1) * rows, seqlen_q)
    num_keys = cutlass.max(cutlass.min(last_row + seqlen_k - seqlen_q, seqlen_k), Int32(0))
    return ceil_div(num_keys, tile_n)


@cute.jit
def num_unmasked_blocks_causal(first_row: Int32, tile_n: cutlass.Constexpr, seqlen_q: Int32, seqlen_k: Int32):
    """Leading key blocks that row `first_row`, and so every later row, sees whole."""
    num_keys = cutlass.max(cutlass.min(first_row + 1 + seqlen_k - seqlen_q, seqlen_k), Int32(0))
    return num_keys // tile_n
