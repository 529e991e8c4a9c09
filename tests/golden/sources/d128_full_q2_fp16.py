"""Forward attention kernel, rendered by fmha_gen; edit its templates, not this file.

kernel     fmha_fwd-sm100a-fp16-d128-full-q2
spec       79155c9d084a5ce1b4be0c4153e4825b67ca376511d4aab1967d25ea9ce2c9aa
templates  (digest)
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from fmha_gen.device import ptx, softmax, tiles, tmem, umma
from fmha_gen.device.problem import Problem

KERNEL_NAME = "fmha_fwd_sm100a_fp16_d128_full_q2_79155c9d"
DTYPE, PACK_FORMAT = cutlass.Float16, "f16"

# Tiles: ROWS_PER_TILE query rows of one head against blocks of TILE_N keys.
Q_STAGE = 2
TILE_M = 128
TILE_N = 128
ROWS_PER_TILE = 256
HEAD_DIM_V = 128

# Warps and registers.
CORRECTION_WARP = 8
MMA_WARP = 12
EPILOGUE_WARP = 13
LOAD_WARP = 14
NUM_THREADS = 512
LAUNCH_REGS = 128
SOFTMAX_REGS = 192
CORRECTION_REGS = 72
OTHER_REGS = 56

# Shared memory, in bytes from its base.
#        0  sQ             65536 B  Q tiles
#    65536  sKV            98304 B  K and V, see the ring
#   163840  sO             65536 B  O tiles
#   229376  sScale          2048 B  per Q tile: rescale factor or row sum [128], row shift [128], float32
#   231424  mbarriers        192 B  8 bytes each
#   231616  tmem_pointer       8 B  written by tcgen05.alloc
SMEM_BYTES = 231624
SMEM_Q = 0
SMEM_KV = 65536
SMEM_O = 163840
SMEM_STATS = 229376
SMEM_MBARS = 231424
SMEM_TMEM_POINTER = 231616
Q_TILE_BYTES = 32768
K_BLOCK_BYTES = 32768
V_BLOCK_BYTES = 32768
O_SLOT_BYTES = 32768
STATS_SLOT_BYTES = 1024
STATS_SHIFT_BYTES = STATS_SLOT_BYTES // 2

# A tile is boxes of BOX_COLS columns side by side, each row one swizzle span.
QK_BOXES, QK_BOX_COLS = 2, 64
V_BOXES, V_BOX_COLS = 2, 64
Q_BOX_BYTES = 16384
K_BOX_BYTES = 16384
V_BOX_BYTES = 16384
O_BOX_BYTES = 16384

# The ring of K and V blocks.
KV_STAGES = 3
KV_STAGE_BYTES = 32768

# Tensor memory, in columns. P lies in the second half of its S.
#     0  s0  128 columns  scores, float32, 128 keys
#   128  s1  128 columns  scores, float32, 128 keys
#    64  p0   64 columns  probabilities, 16-bit
#   192  p1   64 columns  probabilities, 16-bit
#   256  o0  128 columns  output accumulator, float32
#   384  o1  128 columns  output accumulator, float32
TMEM_ALLOC_COLS = 512
TMEM_S, TMEM_S_COLS = 0, 128
TMEM_P = 64
TMEM_O, TMEM_O_COLS = 256, 128

# Matrix products.
IDESC_QK = 0x8200010
IDESC_PV = 0x8210010
DESC_QK = 0x4000404000010000
DESC_V = 0x4000404004000000
Q_STEP_BYTES = (0, 32, 64, 96, 16384, 16416, 16448, 16480)
K_STEP_BYTES = (0, 32, 64, 96, 16384, 16416, 16448, 16480)
V_STEP_BYTES = (0, 2048, 4096, 6144, 8192, 10240, 12288, 14336)
P_STEP_COLS = 16 // 2
PV_STEPS_FIRST = 6

# Softmax works on chunks of CHUNK_COLS keys; P is handed over after P_FIRST_CHUNKS of them and at the end.
CHUNK_COLS = 32
NUM_CHUNKS = 4
P_FIRST_CHUNKS = 96 // CHUNK_COLS
RESCALE_THRESHOLD = 8.0
# Pairs of columns of each chunk whose exponentials run on the FMA pipe.
EXP2_FMA_PAIRS = ((3, 7, 11, 15), (3, 7, 11, 15), (4, 9, 15), ())
CORRECTION_COLS = 16
EPILOGUE_COLS = 16
# Shift of a row before its first key: so large that any maximum replaces it, finite so that -inf plus it stays -inf.
NO_MAX = 3e38
LN2 = 0.6931471805599453

# mbarriers, in bytes from the first: (offset, stages, arrivals a phase).
MBARRIERS = (
    (0, 2, 1),  # q_full: a Q tile has landed
    (16, 2, 1),  # q_empty: the last S = Q K of the tile has read Q
    (32, 3, 1),  # kv_full: a K or V tile has landed
    (56, 3, 1),  # kv_empty: the MMAs that read the stage are done
    (80, 2, 1),  # s_full: S is complete, and so is every MMA issued before it
    (96, 2, 256),  # p_full: the first part of P is written and O is rescaled (first block: O has been read out)
    (112, 2, 128),  # p_last_full: the rest of P is written
    (128, 2, 1),  # o_full: the tile's last PV is done: within the tile s_full implies the PV before it
    (144, 2, 128),  # stats_empty: correction has read sScale
    (160, 2, 128),  # epi_full: sO holds the output tile
    (176, 2, 1),  # epi_empty: the store has read sO
)
Q_FULL_MBAR = 0
Q_EMPTY_MBAR = 16
KV_FULL_MBAR = 32
KV_EMPTY_MBAR = 56
S_FULL_MBAR = 80
P_FULL_MBAR = 96
P_LAST_FULL_MBAR = 112
O_FULL_MBAR = 128
STATS_EMPTY_MBAR = 144
EPI_FULL_MBAR = 160
EPI_EMPTY_MBAR = 176
# Hardware barrier of each softmax warp and the correction warp of the same rows.
STATS_BARRIER_ID = 1


@cute.jit
def first_tile():
    """First tile of this CTA; every role strides over the tiles alike."""
    return cute.arch.block_idx()[0]


@cute.jit
def next_tile(tile):
    """The CTA's tile after this one."""
    return tile + ptx.grid_size()


@cute.jit
def count_tiles(problem):
    """Tiles of the whole problem."""
    return tiles.ceil_div(problem.seqlen_q, ROWS_PER_TILE) * problem.num_heads_q * problem.batch


@cute.jit
def tile_coordinates(tile, problem):
    """(m_block, query head, batch entry) of a tile."""
    num_m_blocks = tiles.ceil_div(problem.seqlen_q, ROWS_PER_TILE)
    return tiles.static_order(tile, num_m_blocks, problem.num_heads_q)


@cute.jit
def count_keys(row, problem):
    """Keys that a row sees; may be negative."""
    return problem.seqlen_k


@cute.jit
def count_blocks(m_block, problem):
    """Key blocks that any row of a tile sees."""
    last_row = cutlass.min((m_block + 1) * ROWS_PER_TILE, problem.seqlen_q) - 1
    return tiles.ceil_div(cutlass.max(count_keys(last_row, problem), Int32(0)), TILE_N)


@cute.jit
def count_unmasked_blocks(first_row, problem):
    """Leading key blocks that every row from `first_row` on sees whole."""
    return cutlass.max(count_keys(first_row, problem), Int32(0)) // TILE_N


@cute.jit
def next_stage(stage, parity):
    """The ring's next (stage, parity)."""
    last = stage == KV_STAGES - 1
    return cutlass.select_(last, Int32(0), stage + 1), cutlass.select_(last, parity ^ 1, parity)


@cute.jit
def k_block_address(smem, stage):
    """Where a K block of this stage starts."""
    return smem + SMEM_KV + stage * KV_STAGE_BYTES


@cute.jit
def v_block_address(smem, stage):
    """Where a V block of this stage starts."""
    return smem + SMEM_KV + stage * KV_STAGE_BYTES


@cute.jit
def next_slot(slot, parity):
    """(slot, parity) of the next block: each softmax group keeps its own S slot."""
    return slot, parity ^ 1


class Stats(NamedTuple):
    """How a softmax thread talks to the correction thread of its row: shared address, hardware barrier, mbarrier."""

    address: Int32
    barrier_id: Int32
    empty_mbar: Int32


@cute.jit
def softmax_role(mbar, smem, problem, group):
    """Softmax warpgroups: one thread a row of S. Group t owns Q tile t."""
    thread = cute.arch.thread_idx()[0] % 128
    warp = cute.arch.make_warp_uniform(thread // 32)
    quadrant = warp << 21
    stats = Stats(
        address=smem + SMEM_STATS + group * STATS_SLOT_BYTES + thread * 4,
        barrier_id=STATS_BARRIER_ID + 4 * group + warp,
        empty_mbar=mbar + STATS_EMPTY_MBAR + 8 * group,
    )
    scale_log2 = problem.softmax_scale_log2
    slot, s_parity = group, Int32(0)
    stats_parity = Int32(1)
    tile = first_tile()
    num_tiles = count_tiles(problem)
    while tile < num_tiles:
        m_block, _, _ = tile_coordinates(tile, problem)
        num_blocks = count_blocks(m_block, problem)
        if num_blocks > 0:
            first_row = m_block * ROWS_PER_TILE + group * TILE_M
            row_keys = count_keys(first_row + thread, problem)
            warp_keys = (count_keys(first_row + warp * 32, problem), count_keys(first_row + warp * 32 + 31, problem))
            num_unmasked = cutlass.min(count_unmasked_blocks(first_row, problem), num_blocks)
            key = (num_blocks - 1) * TILE_N
            shift, sum_lo, sum_hi = Float32(NO_MAX), Float32(0.0), Float32(0.0)
            for _ in cutlass.range(num_blocks - num_unmasked, unroll=1):
                s = wait_scores(mbar, quadrant, slot, s_parity)
                visible = (row_keys - key, warp_keys[0] - key, warp_keys[1] - key)
                shift, sum_lo, sum_hi = masked_block(
                    s, visible, mbar, quadrant, slot, stats, stats_parity, scale_log2, shift, sum_lo, sum_hi
                )
                key = key - TILE_N
                stats_parity = stats_parity ^ 1
                slot, s_parity = next_slot(slot, s_parity)
            for _ in cutlass.range(num_unmasked, unroll=1):
                s = wait_scores(mbar, quadrant, slot, s_parity)
                shift, sum_lo, sum_hi = unmasked_block(
                    s, mbar, quadrant, slot, stats, stats_parity, scale_log2, shift, sum_lo, sum_hi
                )
                stats_parity = stats_parity ^ 1
                slot, s_parity = next_slot(slot, s_parity)
            ptx.mbarrier_wait(stats.empty_mbar, stats_parity)
            ptx.store_shared_f32(stats.address, sum_lo + sum_hi)
            ptx.store_shared_f32(stats.address + STATS_SHIFT_BYTES, shift)
            ptx.named_barrier_arrive(stats.barrier_id, 64)
            stats_parity = stats_parity ^ 1
        tile = next_tile(tile)


@cute.jit
def wait_scores(mbar, quadrant, slot, parity):
    """The thread's row of S, in registers."""
    ptx.mbarrier_wait(mbar + S_FULL_MBAR + 8 * slot, parity)
    tmem.fence_after_thread_sync()
    return tmem.load_row(quadrant + TMEM_S + slot * TMEM_S_COLS, TILE_N)


@cute.jit
def new_shift(shift, block_max, stats, stats_parity, scale_log2):
    """Lazy rescale: the shift (minus the scaled maximum) moves only when the maximum grew by RESCALE_THRESHOLD or more.

    Publishes the factor for O and the row sum to the correction warps: by how much the shift moved, so that the
    shift's own rounding cancels in all that is summed. Returns (shift, factor). NO_MAX makes the first block with a
    key move the shift, with factor 0; a block without keys (maximum -inf) leaves it. A NaN or +inf logit makes
    the shift NaN, and so the row, wherever its key lies.
    """
    growth = softmax.fma(block_max, -scale_log2, -shift)
    factor = Float32(1.0)
    if not growth >= -RESCALE_THRESHOLD:
        moved = softmax.fma(block_max, -scale_log2, block_max * 0.0)
        factor = cute.arch.exp2(moved - shift)
        shift = moved
    ptx.mbarrier_wait(stats.empty_mbar, stats_parity)
    ptx.store_shared_f32(stats.address, factor)
    ptx.named_barrier_arrive(stats.barrier_id, 64)
    return shift, factor


@cute.jit
def unmasked_block(s, mbar, quadrant, slot, stats, stats_parity, scale_log2, shift, sum_lo, sum_hi):
    """A block that every row of the tile sees whole."""
    block_max = softmax.maximum(s)
    shift, factor = new_shift(shift, block_max, stats, stats_parity, scale_log2)
    tmem_p = quadrant + TMEM_P + slot * TMEM_S_COLS
    p = []
    for c in cutlass.range_constexpr(NUM_CHUNKS):
        chunk = s[CHUNK_COLS * c : CHUNK_COLS * (c + 1)]
        run = softmax.exponentials(chunk, scale_log2, shift, EXP2_FMA_PAIRS[c])
        tmem.store_row(tmem_p, c * CHUNK_COLS // 2, softmax.pack(run, PACK_FORMAT))
        p += run
        if cutlass.const_expr(c + 1 == P_FIRST_CHUNKS):
            publish(mbar + P_FULL_MBAR + 8 * slot)
    publish(mbar + P_LAST_FULL_MBAR + 8 * slot)
    total = softmax.row_sum(p, (sum_lo, sum_hi), factor)
    return shift, total[0], total[1]


@cute.jit
def masked_block(s, visible, mbar, quadrant, slot, stats, stats_parity, scale_log2, shift, sum_lo, sum_hi):
    """A block that some row sees in part. visible: keys of it that this row and the warp's first and last row see.

    Work is skipped by chunks for the warp as a whole: a chunk that no row sees costs nothing but zeros in P,
    one that all rows see needs no mask.
    """
    row_visible, first_visible, last_visible = visible
    chunks = [s[CHUNK_COLS * c : CHUNK_COLS * (c + 1)] for c in range(NUM_CHUNKS)]
    block_max = Float32(-Float32.inf)
    for c in cutlass.range_constexpr(NUM_CHUNKS):
        chunk = chunks[c]
        if last_visible > CHUNK_COLS * c:
            if first_visible < CHUNK_COLS * (c + 1):
                chunk = softmax.select_bits(chunk, softmax.mask_bits(row_visible, CHUNK_COLS * c))
            block_max = softmax.maximum([block_max, *chunk])
        chunks[c] = chunk
    shift, factor = new_shift(shift, block_max, stats, stats_parity, scale_log2)
    sum_lo, sum_hi = sum_lo * factor, sum_hi * factor
    tmem_p = quadrant + TMEM_P + slot * TMEM_S_COLS
    for c in cutlass.range_constexpr(NUM_CHUNKS):
        packed = [Int32(0)] * (CHUNK_COLS // 2)
        if last_visible > CHUNK_COLS * c:
            p = softmax.exponentials(chunks[c], scale_log2, shift, EXP2_FMA_PAIRS[c])
            packed = softmax.pack(p, PACK_FORMAT)
            sum_lo, sum_hi = softmax.row_sum(p, (sum_lo, sum_hi), Float32(1.0))
        tmem.store_row(tmem_p, c * CHUNK_COLS // 2, packed)
        if cutlass.const_expr(c + 1 == P_FIRST_CHUNKS):
            publish(mbar + P_FULL_MBAR + 8 * slot)
    publish(mbar + P_LAST_FULL_MBAR + 8 * slot)
    return shift, sum_lo, sum_hi


@cute.jit
def publish(bar):
    """What this thread stored to TMEM so far is there for the MMA warp."""
    tmem.wait_store()
    tmem.fence_before_thread_sync()
    ptx.mbarrier_arrive(bar)


@cute.jit
def correction_role(mbar, smem, problem):
    """Correction warpgroup: rescales O when a row's maximum moved, and writes O and LSE at the end of a tile."""
    thread = cute.arch.thread_idx()[0] % 128
    warp = cute.arch.make_warp_uniform(thread // 32)
    quadrant = warp << 21
    o_parity, epi_parity = Int32(0), Int32(1)
    tile = first_tile()
    num_tiles = count_tiles(problem)
    while tile < num_tiles:
        m_block, head, b = tile_coordinates(tile, problem)
        num_blocks = count_blocks(m_block, problem)
        row = m_block * ROWS_PER_TILE + thread
        if num_blocks > 0:
            for block in cutlass.range(num_blocks, unroll=1):
                for t in cutlass.range_constexpr(2):
                    factor = read_factor(mbar, smem, t, thread, warp)
                    # The first block replaces O: nothing to rescale. A complete S means that O is at rest.
                    if block > 0:
                        if ptx.any_below_one(factor):
                            rescale(quadrant + (TMEM_O + t * TMEM_O_COLS), factor)
                    tmem.fence_before_thread_sync()
                    ptx.mbarrier_arrive(mbar + (P_FULL_MBAR + 8 * t))
            for t in cutlass.range_constexpr(Q_STAGE):
                ptx.mbarrier_wait(mbar + (O_FULL_MBAR + 8 * t), o_parity)
                tmem.fence_after_thread_sync()
                row_sum, shift = read_sum_and_shift(mbar, smem, t, thread, warp)
                write_lse(problem, row + t * TILE_M, head, b, row_sum, shift)
                ptx.mbarrier_wait(mbar + (EPI_EMPTY_MBAR + 8 * t), epi_parity)
                write_o(smem + (SMEM_O + t * O_SLOT_BYTES), quadrant + (TMEM_O + t * TMEM_O_COLS), row_sum, thread)
                ptx.fence_proxy_async_shared()
                ptx.mbarrier_arrive(mbar + (EPI_FULL_MBAR + 8 * t))
            o_parity = o_parity ^ 1
        else:
            for t in cutlass.range_constexpr(Q_STAGE):
                ptx.mbarrier_wait(mbar + (EPI_EMPTY_MBAR + 8 * t), epi_parity)
                write_zero_o(smem + (SMEM_O + t * O_SLOT_BYTES), thread)
                ptx.fence_proxy_async_shared()
                ptx.mbarrier_arrive(mbar + (EPI_FULL_MBAR + 8 * t))
                write_lse(problem, row + t * TILE_M, head, b, Float32(0.0), Float32(0.0))
        epi_parity = epi_parity ^ 1
        tile = next_tile(tile)


@cute.jit
def read_factor(mbar, smem, t, thread, warp):
    """The factor that softmax group t published for its block; frees the slot."""
    ptx.named_barrier_sync(STATS_BARRIER_ID + 4 * t + warp, 64)
    tmem.fence_after_thread_sync()
    factor = ptx.load_shared_f32(smem + SMEM_STATS + t * STATS_SLOT_BYTES + thread * 4)
    ptx.mbarrier_arrive(mbar + STATS_EMPTY_MBAR + 8 * t)
    return factor


@cute.jit
def read_sum_and_shift(mbar, smem, t, thread, warp):
    """Row sum and shift (minus the scaled maximum, log2 units) at the end of a tile; frees the slot."""
    ptx.named_barrier_sync(STATS_BARRIER_ID + 4 * t + warp, 64)
    stats = smem + SMEM_STATS + t * STATS_SLOT_BYTES + thread * 4
    row_sum, shift = ptx.load_shared_f32(stats), ptx.load_shared_f32(stats + STATS_SHIFT_BYTES)
    ptx.mbarrier_arrive(mbar + STATS_EMPTY_MBAR + 8 * t)
    return row_sum, shift


@cute.jit
def rescale(tmem_o, factor):
    """O of the thread's row times factor."""
    for first in cutlass.range_constexpr(0, HEAD_DIM_V, CORRECTION_COLS):
        o = tmem.load_row(tmem_o + first, CORRECTION_COLS)
        tmem.store_row(tmem_o, first, softmax.scale(o, factor))
    tmem.wait_store()


@cute.jit
def write_o(o_tile, tmem_o, row_sum, thread):
    """The thread's row of O / row_sum to shared memory in 16 bits, swizzled as the TMA store expects.

    A row without keys becomes 0 whatever its accumulator holds.
    """
    empty = row_sum == 0.0
    inverse = cute.arch.rcp_approx(cutlass.select_(empty, Float32(1.0), row_sum))
    for first in cutlass.range_constexpr(0, HEAD_DIM_V, EPILOGUE_COLS):
        o = tmem.load_row(tmem_o + first, EPILOGUE_COLS)
        if empty:
            o = [Float32(0.0)] * EPILOGUE_COLS
        packed = softmax.pack(softmax.scale(o, inverse), PACK_FORMAT)
        for word in cutlass.range_constexpr(0, EPILOGUE_COLS // 2, 4):
            ptx.store_shared_v4(o_chunk_address(o_tile, first + 2 * word, thread), packed[word : word + 4])


@cute.jit
def write_zero_o(o_tile, thread):
    """A row of zeros."""
    for col in cutlass.range_constexpr(0, HEAD_DIM_V, 8):
        ptx.store_shared_v4(o_chunk_address(o_tile, col, thread), [Int32(0)] * 4)


@cute.jit
def o_chunk_address(o_tile, col: cutlass.Constexpr, thread):
    """Shared address of 8 columns of a row: boxes side by side, 16-byte chunks permuted by the swizzle."""
    box, chunk = col // V_BOX_COLS, col % V_BOX_COLS // 8
    chunks = V_BOX_COLS // 8
    swizzled = ((thread * chunks // 8) & (chunks - 1)) ^ chunk
    return o_tile + box * O_BOX_BYTES + thread * (2 * V_BOX_COLS) + swizzled * 16


@cute.jit
def write_lse(problem, row, head, b, row_sum, shift):
    """Natural-log sum of exponentials of one row, where wanted; -inf for a row without keys."""
    if problem.lse != 0:
        if row < problem.seqlen_q:
            lse = LN2 * (softmax.log2(row_sum) - shift)
            lse = cutlass.select_(row_sum == 0.0, Float32(-Float32.inf), lse)
            offset = b * problem.lse_stride_b + head * problem.lse_stride_h + row * problem.lse_stride_s
            ptx.store_global_f32(problem.lse + 4 * offset, lse)


@cute.jit
def mma_role(mbar, smem, problem):
    """MMA warp: all products from one elected thread in one order, so that a commit tells what has finished."""
    q_parity = Int32(0)
    stage, parity = Int32(0), Int32(0)
    p_parity = Int32(0)
    tile = first_tile()
    num_tiles = count_tiles(problem)
    while tile < num_tiles:
        m_block, _, _ = tile_coordinates(tile, problem)
        num_blocks = count_blocks(m_block, problem)
        if num_blocks > 0:
            # S_t of a block is issued after the PV product that read the P in its columns: a complete S_t means that
            # O_t holds every block before.
            k_stage = stage
            ptx.mbarrier_wait(mbar + KV_FULL_MBAR + 8 * k_stage, parity)
            for t in cutlass.range_constexpr(2):
                ptx.mbarrier_wait(mbar + (Q_FULL_MBAR + 8 * t), q_parity)
                qk_product(mbar, smem, t, t, k_stage)
            commit(mbar + KV_EMPTY_MBAR + 8 * k_stage)
            stage, parity = next_stage(stage, parity)
            accumulate = Int32(0)
            for _ in cutlass.range(num_blocks - 1, unroll=1):
                v_stage = stage
                ptx.mbarrier_wait(mbar + KV_FULL_MBAR + 8 * v_stage, parity)
                k_stage, k_parity = next_stage(stage, parity)
                pv_product(mbar, smem, 0, 0, v_stage, p_parity, accumulate)
                ptx.mbarrier_wait(mbar + KV_FULL_MBAR + 8 * k_stage, k_parity)
                qk_product(mbar, smem, 0, 0, k_stage)
                pv_product(mbar, smem, 1, 1, v_stage, p_parity, accumulate)
                commit(mbar + KV_EMPTY_MBAR + 8 * v_stage)
                qk_product(mbar, smem, 1, 1, k_stage)
                commit(mbar + KV_EMPTY_MBAR + 8 * k_stage)
                stage, parity = next_stage(k_stage, k_parity)
                p_parity = p_parity ^ 1
                accumulate = Int32(1)
            for t in cutlass.range_constexpr(2):
                commit(mbar + (Q_EMPTY_MBAR + 8 * t))
            ptx.mbarrier_wait(mbar + KV_FULL_MBAR + 8 * stage, parity)
            for t in cutlass.range_constexpr(2):
                pv_product(mbar, smem, t, t, stage, p_parity, accumulate)
                commit(mbar + (O_FULL_MBAR + 8 * t))
            commit(mbar + KV_EMPTY_MBAR + 8 * stage)
            stage, parity = next_stage(stage, parity)
            p_parity = p_parity ^ 1
            q_parity = q_parity ^ 1
        tile = next_tile(tile)


@cute.jit
def qk_product(mbar, smem, q_slot, s_slot, k_stage):
    """S of a slot = Q K^T for one block, and its commit."""
    q_low = umma.desc_low(smem + SMEM_Q + q_slot * Q_TILE_BYTES, DESC_QK)
    k_low = umma.desc_low(k_block_address(smem, k_stage), DESC_QK)
    tmem_s = umma.tmem_base(smem) + TMEM_S + s_slot * TMEM_S_COLS
    if ptx.elect_one():
        for step in cutlass.range_constexpr(len(K_STEP_BYTES)):
            q_step, k_step = Q_STEP_BYTES[step] // 16, K_STEP_BYTES[step] // 16
            umma.mma_ss(tmem_s, q_low + q_step, k_low + k_step, DESC_QK, IDESC_QK, min(step, 1))
        umma.commit(mbar + S_FULL_MBAR + 8 * s_slot)


@cute.jit
def pv_product(mbar, smem, o_slot, p_slot, v_stage, p_parity, accumulate):
    """O (+)= P V for one block, as soon as most of P is there and the correction warps have rescaled O."""
    v_low = umma.desc_low(v_block_address(smem, v_stage), DESC_V)
    tmem_o = umma.tmem_base(smem) + TMEM_O + o_slot * TMEM_O_COLS
    tmem_p = umma.tmem_base(smem) + TMEM_P + p_slot * TMEM_S_COLS
    ptx.mbarrier_wait(mbar + P_FULL_MBAR + 8 * p_slot, p_parity)
    tmem.fence_after_thread_sync()
    pv_steps(tmem_o, tmem_p, v_low, accumulate, 0, PV_STEPS_FIRST)
    ptx.mbarrier_wait(mbar + P_LAST_FULL_MBAR + 8 * p_slot, p_parity)
    tmem.fence_after_thread_sync()
    pv_steps(tmem_o, tmem_p, v_low, accumulate, PV_STEPS_FIRST, len(V_STEP_BYTES))


@cute.jit
def pv_steps(tmem_o, tmem_p, v_low, accumulate, first: cutlass.Constexpr, end: cutlass.Constexpr):
    """K steps [first, end) of a PV product."""
    if ptx.elect_one():
        for step in cutlass.range_constexpr(first, end):
            p_step, v_step = step * P_STEP_COLS, V_STEP_BYTES[step] // 16
            umma.mma_ts(tmem_o, tmem_p + p_step, v_low + v_step, DESC_V, IDESC_PV, accumulate if step == 0 else 1)


@cute.jit
def commit(bar):
    """Arrive at `bar` when every product issued so far has completed."""
    if ptx.elect_one():
        umma.commit(bar)


@cute.jit
def epilogue_role(tma_o, mbar, smem, problem):
    """Epilogue warp, one elected thread: TMA stores of O tiles; rows past seqlen_q are clipped by the map."""
    parity = Int32(0)
    tile = first_tile()
    num_tiles = count_tiles(problem)
    while tile < num_tiles:
        m_block, head, b = tile_coordinates(tile, problem)
        row = m_block * ROWS_PER_TILE
        for t in cutlass.range_constexpr(Q_STAGE):
            ptx.mbarrier_wait(mbar + (EPI_FULL_MBAR + 8 * t), parity)
            for box in cutlass.range_constexpr(V_BOXES):
                src = smem + (SMEM_O + t * O_SLOT_BYTES + box * O_BOX_BYTES)
                ptx.tma_store_4d(tma_o, src, box * V_BOX_COLS, row + t * TILE_M, head, b)
            ptx.bulk_commit_group()
        for t in cutlass.range_constexpr(Q_STAGE):
            ptx.bulk_wait_group_read(Q_STAGE - 1 - t)
            ptx.mbarrier_arrive(mbar + (EPI_EMPTY_MBAR + 8 * t))
        parity = parity ^ 1
        tile = next_tile(tile)
    ptx.bulk_wait_group(0)


@cute.jit
def load_role(tma_q, tma_k, tma_v, mbar, smem, problem):
    """Load warp, one elected thread: Q tiles and the ring of K and V blocks, last block first."""
    kv_ratio = problem.num_heads_q // problem.num_heads_kv
    q_parity = Int32(1)
    stage, parity = Int32(0), Int32(1)
    tile = first_tile()
    num_tiles = count_tiles(problem)
    while tile < num_tiles:
        m_block, head, b = tile_coordinates(tile, problem)
        row = m_block * ROWS_PER_TILE
        num_blocks = count_blocks(m_block, problem)
        key = (num_blocks - 1) * TILE_N
        kv_head = head // kv_ratio
        if num_blocks > 0:
            stage, parity = load_k(tma_k, mbar, smem, stage, parity, key, kv_head, b)
        if num_blocks > 0:
            for slot in cutlass.range_constexpr(Q_STAGE):
                load_q(tma_q, mbar, smem, slot, q_parity, row + slot * TILE_M, head, b)
            q_parity = q_parity ^ 1
            stage, parity = load_v(tma_v, mbar, smem, stage, parity, key, kv_head, b)
            for _ in cutlass.range(num_blocks - 1, unroll=1):
                key = key - TILE_N
                stage, parity = load_k(tma_k, mbar, smem, stage, parity, key, kv_head, b)
                stage, parity = load_v(tma_v, mbar, smem, stage, parity, key, kv_head, b)
        tile = next_tile(tile)


@cute.jit
def load_q(tma_q, mbar, smem, slot, parity, row, head, b):
    """One Q tile into its slot, once the products of the tile before have read it."""
    ptx.mbarrier_wait(mbar + (Q_EMPTY_MBAR + 8 * slot), parity)
    full = mbar + (Q_FULL_MBAR + 8 * slot)
    ptx.mbarrier_arrive_expect_tx(full, Q_TILE_BYTES)
    for box in cutlass.range_constexpr(QK_BOXES):
        dst = smem + (SMEM_Q + slot * Q_TILE_BYTES + box * Q_BOX_BYTES)
        ptx.tma_load_4d(dst, tma_q, full, box * QK_BOX_COLS, row, head, b)


@cute.jit
def load_k(tma_k, mbar, smem, stage, parity, key, kv_head, b):
    """One K block into the ring; returns the ring's next (stage, parity)."""
    ptx.mbarrier_wait(mbar + KV_EMPTY_MBAR + 8 * stage, parity)
    full = mbar + KV_FULL_MBAR + 8 * stage
    ptx.mbarrier_arrive_expect_tx(full, K_BLOCK_BYTES)
    dst = k_block_address(smem, stage)
    for box in cutlass.range_constexpr(QK_BOXES):
        ptx.tma_load_4d(dst + box * K_BOX_BYTES, tma_k, full, box * QK_BOX_COLS, key, kv_head, b)
    return next_stage(stage, parity)


@cute.jit
def load_v(tma_v, mbar, smem, stage, parity, key, kv_head, b):
    """One V block into the ring; returns the ring's next (stage, parity)."""
    ptx.mbarrier_wait(mbar + KV_EMPTY_MBAR + 8 * stage, parity)
    full = mbar + KV_FULL_MBAR + 8 * stage
    ptx.mbarrier_arrive_expect_tx(full, V_BLOCK_BYTES)
    dst = v_block_address(smem, stage)
    for box in cutlass.range_constexpr(V_BOXES):
        ptx.tma_load_4d(dst + box * V_BOX_BYTES, tma_v, full, box * V_BOX_COLS, key, kv_head, b)
    return next_stage(stage, parity)


@cute.kernel
def kernel(
    tma_q: GridConstant[TensorMap],
    tma_k: GridConstant[TensorMap],
    tma_v: GridConstant[TensorMap],
    tma_o: GridConstant[TensorMap],
    lse: cute.Pointer,
    lse_stride_b: Int64,
    lse_stride_h: Int64,
    lse_stride_s: Int64,
    batch: Int32,
    num_heads_q: Int32,
    num_heads_kv: Int32,
    seqlen_q: Int32,
    seqlen_k: Int32,
    softmax_scale_log2: Float32,
):
    problem = Problem(
        lse=lse.toint(),
        lse_stride_b=lse_stride_b,
        lse_stride_h=lse_stride_h,
        lse_stride_s=lse_stride_s,
        batch=batch,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        softmax_scale_log2=softmax_scale_log2,
    )
    smem = ptx.smem_base()
    mbar = smem + SMEM_MBARS
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

    if warp == LOAD_WARP:
        if ptx.elect_one():
            for tensor_map in (tma_q, tma_k, tma_v, tma_o):
                ptx.prefetch_tensormap(tensor_map)
            for offset, stages, arrive_count in MBARRIERS:
                for stage in cutlass.range_constexpr(stages):
                    ptx.mbarrier_init(mbar + (offset + 8 * stage), arrive_count)
            ptx.mbarrier_init_fence()
    if warp == MMA_WARP:
        # All columns of the SM's tensor memory: the allocation can only start at column 0.
        tmem.alloc(smem + SMEM_TMEM_POINTER, TMEM_ALLOC_COLS)
    tmem.fence_before_thread_sync()
    cute.arch.sync_threads()
    tmem.fence_after_thread_sync()

    if warp < CORRECTION_WARP:
        ptx.set_registers(SOFTMAX_REGS, LAUNCH_REGS)
        softmax_role(mbar, smem, problem, warp // 4)
    elif warp < MMA_WARP:
        ptx.set_registers(CORRECTION_REGS, LAUNCH_REGS)
        correction_role(mbar, smem, problem)
    else:
        ptx.set_registers(OTHER_REGS, LAUNCH_REGS)
        if warp == MMA_WARP:
            mma_role(mbar, smem, problem)
        elif warp == EPILOGUE_WARP:
            if ptx.elect_one():
                epilogue_role(tma_o, mbar, smem, problem)
        elif warp == LOAD_WARP:
            if ptx.elect_one():
                load_role(tma_q, tma_k, tma_v, mbar, smem, problem)

    tmem.fence_before_thread_sync()
    cute.arch.sync_threads()
    if warp == MMA_WARP:
        tmem.fence_after_thread_sync()
        tmem.dealloc(Int32(0), TMEM_ALLOC_COLS)


@cute.jit
def host_entry(lse: cute.Pointer, i64: Int64, i32: Int32, f32: Float32):
    """Traced for its kernel alone: launchers encode their own tensor maps and pass every argument by the manifest."""
    any_map = create_tensor_map_tiled(
        i64, DTYPE, [64, i32, i32, i32], [i64, i64, i64], [64, 128, 1, 1], swizzle=TensorMapSwizzle.s128b
    )
    kernel.set_name_prefix(KERNEL_NAME, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(
        any_map,
        any_map,
        any_map,
        any_map,
        lse,
        i64,
        i64,
        i64,
        i32,
        i32,
        i32,
        i32,
        i32,
        f32,
    ).launch(grid=(i32, 1, 1), block=(NUM_THREADS, 1, 1), smem=SMEM_BYTES, min_blocks_per_mp=1)


def trace_arguments():
    """Example arguments of `host_entry`; only their types matter."""
    return make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=4), Int64(16), Int32(1), Float32(1.0)
