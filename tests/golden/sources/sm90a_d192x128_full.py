"""Forward attention kernel, rendered by fmha_gen; edit its templates, not this file.

kernel     fmha_fwd-sm90a-bf16-d192x128-full-q1
spec       a575931f5df22c3c1fafff70eb5f02ba793a6888772e8692e26f07310f2ce0a8
templates  (digest)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from fmha_gen.device import fragment, ptx, softmax, tiles, wgmma
from fmha_gen.device.problem import Problem

KERNEL_NAME = "fmha_fwd_sm90a_bf16_d192x128_full_q1_a575931f"
DTYPE, PACK_FORMAT = cutlass.BFloat16, "bf16"

# Tiles: every consumer warpgroup owns 64 of ROWS_PER_TILE query rows, against blocks of TILE_N keys.
NUM_CONSUMERS = 2
GROUP_ROWS, WARP_ROWS = 64, 16
ROWS_PER_TILE = 128
TILE_N = 128
HEAD_DIM_V = 128

# Warps and registers.
LOAD_WARP = 8
NUM_THREADS = 384
LAUNCH_REGS = 168
CONSUMER_REGS = 240
LOAD_REGS = 24

# Shared memory, in bytes from its base.
#        0  sQ             49152 B  Q tiles, all consumers' rows
#    49152  sK             98304 B  ring of K blocks
#   147456  sV             65536 B  ring of V blocks
#   212992  sO             16384 B  output rows, each warp its own, 64 columns at a time
#   229376  mbarriers         80 B  8 bytes each
SMEM_BYTES = 229456
SMEM_Q = 0
SMEM_K = 49152
SMEM_V = 147456
SMEM_O = 212992
SMEM_MBARS = 229376
Q_STAGES, K_STAGES, V_STAGES = 1, 2, 2
Q_TILE_BYTES = 49152
K_BLOCK_BYTES = 49152
V_BLOCK_BYTES = 32768

# A tile is boxes of BOX_COLS columns side by side, each row one swizzle span.
QK_BOXES, QK_BOX_COLS = 3, 64
V_BOXES, V_BOX_COLS = 2, 64
Q_BOX_BYTES = 16384
K_BOX_BYTES = 16384
V_BOX_BYTES = 16384
QK_ROW_BYTES = 128
O_ROW_BYTES = 128
O_BOX_BYTES = ROWS_PER_TILE * O_ROW_BYTES
O_PIECE_BOXES = 1

# Matrix products.
DESC_QK = 0x4000004000010000
DESC_V = 0x4000004004000000
Q_STEP_BYTES = (0, 32, 64, 96, 16384, 16416, 16448, 16480, 32768, 32800, 32832, 32864)
K_STEP_BYTES = (0, 32, 64, 96, 16384, 16416, 16448, 16480, 32768, 32800, 32832, 32864)
V_STEP_BYTES = (0, 2048, 4096, 6144, 8192, 10240, 12288, 14336)

# A row's shift moves when a thread's exponentials of one block add up to more than this.
MAX_SUM = 2.0 ** 8.0
# Shift of a row before its first key: so large that any maximum replaces it, finite so that -inf plus it stays -inf.
NO_MAX = 3e38
LN2 = 0.6931471805599453

# mbarriers, in bytes from the first: (offset, stages, arrivals a phase).
MBARRIERS = (
    (0, 1, 1),  # q_full: a Q tile has landed
    (8, 1, 8),  # q_empty: every warp is done with Q
    (16, 2, 1),  # k_full: a K block has landed
    (32, 2, 8),  # k_empty: no warp needs the stage for S = Q K any more
    (48, 2, 1),  # v_full: a V block has landed
    (64, 2, 8),  # v_empty: every warp's O += P V has read the stage
)
Q_FULL_MBAR = 0
Q_EMPTY_MBAR = 8
K_FULL_MBAR = 16
K_EMPTY_MBAR = 32
V_FULL_MBAR = 48
V_EMPTY_MBAR = 64
# Hardware barriers, one a consumer warpgroup: its turn (order of gemm).
TURN_BARRIER_ID = 1


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
def consumer_role(tma_o, mbar, smem, problem, group):
    """Consumer warpgroups: both products, softmax and epilogue of 64 query rows.

    The walk goes from tile to tile without a pause: the first S of the next tile is computed beside the last O of this.
    """
    thread = cute.arch.thread_idx()[0] % 128
    lane = thread % 32
    warp = cute.arch.make_warp_uniform(thread // 32)
    q_stage, q_parity = Int32(0), Int32(0)
    k_stage, k_parity = Int32(0), Int32(0)
    v_stage, v_parity = Int32(0), Int32(0)
    num_tiles = count_tiles(problem)
    # The first turn is the first group's own.
    if group == 0:
        ptx.named_barrier_arrive(Int32(TURN_BARRIER_ID), 256)
    tile = first_tile()
    tile, m_block, head, b = pass_tiles_without_keys(tile, tma_o, smem, problem, group, warp, lane)
    q = q_operand(smem, q_stage, group)
    s = [Float32(0.0)] * (TILE_N // 2)
    if tile < num_tiles:
        s, k_stage, k_parity = first_s(q, q_stage, q_parity, k_stage, k_parity, mbar, smem, group, lane)
    while tile < num_tiles:
        num_blocks = count_blocks(m_block, problem)
        first_row = m_block * ROWS_PER_TILE + group * GROUP_ROWS
        row = first_row + warp * WARP_ROWS + lane // 4
        keys = (count_keys(row, problem), count_keys(row + 8, problem))
        num_unmasked = cutlass.min(count_unmasked_blocks(first_row, problem), num_blocks)
        o = [Float32(0.0)] * (HEAD_DIM_V // 2)
        sums = [Float32(0.0)] * 2
        q_empty = mbar + Q_EMPTY_MBAR + 8 * q_stage
        # Index of the block whose S is there, and so how many follow it.
        left = num_blocks - 1
        release_if(left == 0, q_empty, lane)
        if left >= num_unmasked:
            s = mask(s, keys, left * TILE_N, lane)
        shift = [Float32(NO_MAX)] * 2
        k_ready = Int32(0)
        rows, shift, sums, _ = exact_rows(s, shift, sums, problem)
        p = softmax.pack(fragment.merge(rows), PACK_FORMAT)
        ptx.mbarrier_wait(mbar + V_FULL_MBAR + 8 * v_stage, v_parity)
        num_masked = num_blocks - num_unmasked
        for _ in cutlass.range(cutlass.max(num_masked - 1, Int32(0)), unroll=1):
            left = left - 1
            q, p, o, shift, sums, k_stage, k_parity, k_ready, v_stage, v_parity = overlapped_block(
                q, p, o, shift, sums, k_stage, k_parity, k_ready, v_stage, v_parity,
                mbar, smem, problem, group, lane, left, q_empty, (keys, left * TILE_N),
            )
        for _ in cutlass.range(cutlass.min(num_unmasked, num_blocks - 1), unroll=1):
            left = left - 1
            q, p, o, shift, sums, k_stage, k_parity, k_ready, v_stage, v_parity = overlapped_block(
                q, p, o, shift, sums, k_stage, k_parity, k_ready, v_stage, v_parity,
                mbar, smem, problem, group, lane, left, q_empty, None,
            )
        q_stage, q_parity = next_stage(q_stage, q_parity, Q_STAGES)
        tile = next_tile(tile)
        next_m_block, next_head, next_b = tile_coordinates(tile, problem)
        q = q_operand(smem, q_stage, group)
        now_v_stage = v_stage
        v_empty = mbar + V_EMPTY_MBAR + 8 * v_stage
        v_stage, v_parity = next_stage(v_stage, v_parity, V_STAGES)
        if (tile < num_tiles) & (count_blocks(next_m_block, problem) > 0):
            # Q of the next tile loads into the stage that this tile's last S has just freed: not waited for before PV.
            o, p = start_pv(smem, p, o, now_v_stage)
            ptx.mbarrier_wait(mbar + Q_FULL_MBAR + 8 * q_stage, q_parity)
            ptx.mbarrier_wait(mbar + K_FULL_MBAR + 8 * k_stage, k_parity)
            take_turn(group)
            s = start_qk(smem, q, k_stage)
            pass_turn(group)
            o, p = wgmma.wait(1, o, p)
            release(v_empty, lane)
            finish_tile(tma_o, smem, problem, o, shift, sums, row, first_row, head, b, group, warp, lane)
            s, _ = wgmma.wait(0, s)
            release(mbar + K_EMPTY_MBAR + 8 * k_stage, lane)
            k_stage, k_parity = next_stage(k_stage, k_parity, K_STAGES)
        else:
            o, p = start_pv(smem, p, o, now_v_stage)
            o, p = wgmma.wait(0, o, p)
            release(v_empty, lane)
            finish_tile(tma_o, smem, problem, o, shift, sums, row, first_row, head, b, group, warp, lane)
            tile, next_m_block, next_head, next_b = pass_tiles_without_keys(
                tile, tma_o, smem, problem, group, warp, lane
            )
            s = [Float32(0.0)] * (TILE_N // 2)
            if tile < num_tiles:
                s, k_stage, k_parity = first_s(q, q_stage, q_parity, k_stage, k_parity, mbar, smem, group, lane)
        m_block, head, b = next_m_block, next_head, next_b
    if lane == 0:
        ptx.bulk_wait_group(0)
    # Take the last turn back, so that no barrier is left half full.
    if group == 0:
        take_turn(group)


@cute.jit
def q_operand(smem, q_stage, group):
    """Low descriptor word of the warpgroup's rows of Q."""
    return wgmma.desc_low(smem + SMEM_Q + q_stage * Q_TILE_BYTES + group * (GROUP_ROWS * QK_ROW_BYTES), DESC_QK)


@cute.jit
def first_s(q, q_stage, q_parity, k_stage, k_parity, mbar, smem, group, lane):
    """S of a tile's first block, with no product beside it; and the next (stage, parity) of the ring of K."""
    ptx.mbarrier_wait(mbar + Q_FULL_MBAR + 8 * q_stage, q_parity)
    ptx.mbarrier_wait(mbar + K_FULL_MBAR + 8 * k_stage, k_parity)
    take_turn(group)
    s = start_qk(smem, q, k_stage)
    pass_turn(group)
    s, _ = wgmma.wait(0, s)
    release(mbar + K_EMPTY_MBAR + 8 * k_stage, lane)
    k_stage, k_parity = next_stage(k_stage, k_parity, K_STAGES)
    return s, k_stage, k_parity


@cute.jit
def pass_tiles_without_keys(tile, tma_o, smem, problem, group, warp, lane):
    """Zeros for tiles without keys from this one on. Returns the first tile with keys, or one past the last."""
    num_tiles = count_tiles(problem)
    m_block, head, b = tile_coordinates(tile, problem)
    while (tile < num_tiles) & (count_blocks(m_block, problem) == 0):
        first_row = m_block * ROWS_PER_TILE + group * GROUP_ROWS
        row = first_row + warp * WARP_ROWS + lane // 4
        write_zero_o(tma_o, smem, first_row, head, b, group, warp, lane)
        write_lse(problem, row, head, b, Float32(0.0), Float32(0.0), lane)
        write_lse(problem, row + 8, head, b, Float32(0.0), Float32(0.0), lane)
        tile = next_tile(tile)
        m_block, head, b = tile_coordinates(tile, problem)
    return tile, m_block, head, b


@cute.jit
def finish_tile(tma_o, smem, problem, o, shift, sums, row, first_row, head, b, group, warp, lane):
    """LSE and O of a tile whose products are complete."""
    sums = [fragment.quad_sum(x) for x in sums]
    write_o(tma_o, smem, o, sums, first_row, head, b, group, warp, lane)
    write_lse(problem, row, head, b, sums[0], shift[0], lane)
    write_lse(problem, row + 8, head, b, sums[1], shift[1], lane)


@cute.jit
def overlapped_block(
    q, p, o, shift, sums, k_stage, k_parity, k_ready, v_stage, v_parity, mbar, smem, problem, group, lane,
    left, q_empty,
    masked: cutlass.Constexpr,
):
    """O += P V of the block before under S = Q K^T and softmax of this one. masked: (keys of both rows, first key)."""
    ptx.mbarrier_wait_unless(k_ready, mbar + K_FULL_MBAR + 8 * k_stage, k_parity)
    take_turn(group)
    s = start_qk(smem, q, k_stage)
    o, p = start_pv(smem, p, o, v_stage)
    pass_turn(group)
    s, _ = wgmma.wait(1, s)
    release(mbar + K_EMPTY_MBAR + 8 * k_stage, lane)
    release_if(left == 0, q_empty, lane)
    k_stage, k_parity = next_stage(k_stage, k_parity, K_STAGES)
    next_v_stage, v_parity = next_stage(v_stage, v_parity, V_STAGES)
    next_v_full = mbar + V_FULL_MBAR + 8 * next_v_stage
    v_ready = ptx.mbarrier_test(next_v_full, v_parity)
    if cutlass.const_expr(masked is not None):
        s = mask(s, masked[0], masked[1], lane)
    words0, sum0 = quick_row(s, 0, shift, problem.softmax_scale_log2)
    # The V block of this P is waited for here, ahead of its use, because that ends a basic block: without it, ptxas
    # 13.4 moves the wait for the product above all exponentials, and nothing runs under it. The other row's come
    # after it, and hide the packing, for which the old P must have been read.
    ptx.mbarrier_wait_unless(v_ready, next_v_full, v_parity)
    o, p = wgmma.wait(0, o, p)
    release(mbar + V_EMPTY_MBAR + 8 * v_stage, lane)
    k_ready = ptx.mbarrier_test(mbar + K_FULL_MBAR + 8 * k_stage, k_parity)
    words1, sum1 = quick_row(s, 1, shift, problem.softmax_scale_log2)
    p, o, shift, sums = settle(s, interleave(words0, words1), o, shift, sums, [sum0, sum1], problem)
    return q, p, o, shift, sums, k_stage, k_parity, k_ready, next_v_stage, v_parity


@cute.jit
def start_qk(smem, q, k_stage):
    """S = Q K^T of one block, started."""
    k_low = wgmma.desc_low(smem + SMEM_K + k_stage * K_BLOCK_BYTES, DESC_QK)
    return wgmma.product_ss(TILE_N, PACK_FORMAT, q, k_low, DESC_QK, DESC_QK, Q_STEP_BYTES, K_STEP_BYTES)


@cute.jit
def start_pv(smem, p, o, v_stage):
    """O += P V of one block, started; returns (o, p), both in use until the wait."""
    v_low = wgmma.desc_low(smem + SMEM_V + v_stage * V_BLOCK_BYTES, DESC_V)
    return wgmma.product_rs(HEAD_DIM_V, PACK_FORMAT, o, p, v_low, DESC_V, V_STEP_BYTES, True)


@cute.jit
def release(bar, lane):
    """One arrival of this warp at an empty barrier: its reads are complete."""
    if lane == 0:
        ptx.mbarrier_arrive(bar)


@cute.jit
def release_if(condition, bar, lane):
    """`release` where `condition` holds."""
    if (lane == 0) & condition:
        ptx.mbarrier_arrive(bar)


@cute.jit
def take_turn(group):
    """Wait until the group before has passed the turn."""
    ptx.named_barrier_sync(TURN_BARRIER_ID + group, 256)


@cute.jit
def pass_turn(group):
    """Hand the turn to the next group."""
    following = cutlass.select_(group == NUM_CONSUMERS - 1, Int32(0), group + 1)
    ptx.named_barrier_arrive(TURN_BARRIER_ID + following, 256)




@cute.jit
def mask(s, keys, key, lane):
    """S with -inf for keys that a row does not see; keys: of both rows, key: the block's first."""
    return fragment.merge([fragment.mask_row(fragment.row(s, r), keys[r] - key, lane) for r in range(2)])


@cute.jit
def exact_rows(s, shift, sums, problem):
    """Softmax of a block by its maxima, whatever came before: a row's first key may be in it.

    Returns (elements of both rows, shifts, sums, factors of what came before).
    """
    rows, shift, block_sums, factors = exact_block(s, shift, [Float32(Float32.inf)] * 2, problem)
    return rows, shift, [sums[r] * factors[r] + block_sums[r] for r in range(2)], factors


@cute.jit
def interleave(words0, words1):
    """P words of both rows in the order of an A operand."""
    return [word for pair in zip(words0, words1, strict=True) for word in pair]


@cute.jit
def quick_row(s, r: cutlass.Constexpr, shift, scale_log2):
    """(P words, sum) of one row's elements with the shift of the blocks before, whatever the maximum of this one.

    A softmax does not depend on its shift, as long as nothing overflows: `settle` looks at the sums.
    """
    values = fragment.exponentials(fragment.row(s, r), scale_log2, shift[r])
    return softmax.pack(values, PACK_FORMAT), fragment.total(values)


@cute.jit
def settle(s, p, o, shift, sums, block_sums, problem):
    """Keep P and its sums where they are small enough; else move the shifts of the rows that are not. Rare."""
    if ptx.any_above(block_sums[0], block_sums[1], MAX_SUM):
        large = [fragment.quad_max(x) for x in block_sums]
        rows, shift, block_sums, factors = exact_block(s, shift, large, problem)
        p = softmax.pack(fragment.merge(rows), PACK_FORMAT)
        o = fragment.scale_rows(o, factors)
        sums = [sums[r] * factors[r] for r in range(2)]
    return p, o, shift, [sums[r] + block_sums[r] for r in range(2)]


@cute.jit
def exact_block(s, shift, large, problem):
    """Softmax of one block by its maxima. Returns (elements, shifts, sums of the block, factors of what came before).

    A row's shift, in log2 units, becomes minus its scaled maximum if that has grown and the row's sum in `large` (the
    largest of its four threads) is above MAX_SUM or NaN. Its factor is by how much it moved, so that its own rounding
    cancels in all that is summed. NO_MAX makes the first block with a key move it, with factor 0; a block without
    keys (maximum -inf) leaves it.
    """
    scale_log2 = problem.softmax_scale_log2
    rows = [fragment.row(s, r) for r in range(2)]
    block_max = fragment.row_maxima(rows)
    new_shift, factors = [], []
    for r in cutlass.range_constexpr(2):
        new_shift.append(lower_shift(shift[r], block_max[r] * -scale_log2, large[r]))
        factors.append(cute.arch.exp2(new_shift[r] - shift[r]))
    rows = [fragment.exponentials(rows[r], scale_log2, new_shift[r]) for r in range(2)]
    sums = [fragment.total(rows[r]) for r in range(2)]
    return rows, new_shift, sums, factors


@cute.jit
def lower_shift(shift, wanted, large):
    """`wanted` where the row's maximum has grown, so that it is lower, and its sum `large` is above MAX_SUM or NaN."""
    wanted = cutlass.select_(large <= MAX_SUM, shift, wanted)
    return cutlass.select_(wanted < shift, wanted, shift)


@cute.jit
def chunk_address(tile, row, chunk: cutlass.Constexpr, odd, box_cols: cutlass.Constexpr, box_bytes: cutlass.Constexpr):
    """Shared address of 8 columns of a row, number chunk + odd (chunk even, odd 0 or 1), of a swizzled tile."""
    chunks = box_cols // 8
    swizzle = row * chunks // 8 & (chunks - 1)
    return tile + chunk // chunks * box_bytes + row * (2 * box_cols) + ((chunk % chunks + odd) ^ swizzle) * 16


@cute.jit
def write_o(tma_o, smem, o, sums, first_row, head, b, group, warp, lane):
    """The warp's 16 rows of O / sum to memory in 16 bits. A row without keys becomes 0, whatever its accumulator."""
    inverse = [cute.arch.rcp_approx(x) for x in sums]
    keep = [cutlass.select_(x != 0.0, Int32(-1), Int32(0)) for x in sums]
    packed = softmax.pack(fragment.scale_rows(o, inverse), PACK_FORMAT)
    packed = [word & keep[i % 2] for i, word in enumerate(packed)]
    store_rows(tma_o, smem, packed, first_row, head, b, group, warp, lane)


@cute.jit
def write_zero_o(tma_o, smem, first_row, head, b, group, warp, lane):
    """Zeros for the warp's 16 rows."""
    store_rows(tma_o, smem, None, first_row, head, b, group, warp, lane)


@cute.jit
def store_rows(tma_o, smem, packed: cutlass.Constexpr, first_row, head, b, group, warp, lane):
    """The warp's 16 rows of packed O, or zeros, to memory through shared memory, O_PIECE_BOXES boxes at a time.

    Each piece is swizzled as the TMA store expects, which clips rows past seqlen_q; the last one is still on its way on
    return.
    """
    warp_row = group * GROUP_ROWS + warp * WARP_ROWS
    steps = O_PIECE_BOXES * V_BOX_COLS // 16
    for piece in cutlass.range_constexpr(V_BOXES // O_PIECE_BOXES):
        wait_o_store(lane)
        for step in cutlass.range_constexpr(steps):
            addr = chunk_address(smem + SMEM_O, warp_row + lane % 16, 2 * step, lane // 16, V_BOX_COLS, O_BOX_BYTES)
            first = 4 * (piece * steps + step)
            if cutlass.const_expr(packed is None):  # stmatrix takes no constants
                ptx.store_shared_v4(addr, [Int32(0)] * 4)
            else:
                ptx.store_matrices(addr, packed[first : first + 4])
        ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            for box in cutlass.range_constexpr(O_PIECE_BOXES):
                src = smem + SMEM_O + box * O_BOX_BYTES + warp_row * O_ROW_BYTES
                col = (piece * O_PIECE_BOXES + box) * V_BOX_COLS
                ptx.tma_store_4d(tma_o, src, col, first_row + warp * WARP_ROWS, head, b)
            ptx.bulk_commit_group()


@cute.jit
def wait_o_store(lane):
    """Wait until the warp's last TMA store has read shared memory."""
    if lane == 0:
        ptx.bulk_wait_group_read(0)
    cute.arch.sync_warp()


@cute.jit
def write_lse(problem, row, head, b, row_sum, shift, lane):
    """Natural-log sum of exponentials of one row, where wanted; -inf without keys. One lane of four writes."""
    if problem.lse != 0:
        if lane % 4 == 0:
            if row < problem.seqlen_q:
                offset = (
                    Int64(b) * problem.lse_stride_b + Int64(head) * problem.lse_stride_h
                    + Int64(row) * problem.lse_stride_s
                )
                value = (softmax.log2(row_sum) - shift) * LN2
                value = cutlass.select_(row_sum == 0.0, -Float32.inf, value)
                ptx.store_global_f32(problem.lse + 4 * offset, value)


@cute.jit
def load_role(tma_q, tma_k, tma_v, mbar, smem, problem):
    """Load warp, one elected thread: Q tiles and the rings of K and V blocks, last block first, K one block ahead."""
    kv_ratio = problem.num_heads_q // problem.num_heads_kv
    q_stage, q_parity = Int32(0), Int32(1)
    k_stage, k_parity = Int32(0), Int32(1)
    v_stage, v_parity = Int32(0), Int32(1)
    num_tiles = count_tiles(problem)
    tile = first_tile()
    while tile < num_tiles:
        m_block, head, b = tile_coordinates(tile, problem)
        row = m_block * ROWS_PER_TILE
        num_blocks = count_blocks(m_block, problem)
        key = (num_blocks - 1) * TILE_N
        kv_head = head // kv_ratio
        if num_blocks > 0:
            k_stage, k_parity = load_k(tma_k, mbar, smem, k_stage, k_parity, key, kv_head, b)
            ptx.mbarrier_wait(mbar + Q_EMPTY_MBAR + 8 * q_stage, q_parity)
            load_q(tma_q, mbar, smem, q_stage, row, head, b)
            q_stage, q_parity = next_stage(q_stage, q_parity, Q_STAGES)
            for _ in cutlass.range(num_blocks - 1, unroll=1):
                k_stage, k_parity = load_k(tma_k, mbar, smem, k_stage, k_parity, key - TILE_N, kv_head, b)
                v_stage, v_parity = load_v(tma_v, mbar, smem, v_stage, v_parity, key, kv_head, b)
                key = key - TILE_N
            v_stage, v_parity = load_v(tma_v, mbar, smem, v_stage, v_parity, key, kv_head, b)
        tile = next_tile(tile)


@cute.jit
def load_q(tma_q, mbar, smem, stage, row, head, b):
    """One Q tile, all warpgroups' rows."""
    full = mbar + Q_FULL_MBAR + 8 * stage
    ptx.mbarrier_arrive_expect_tx(full, Q_TILE_BYTES)
    dst = smem + SMEM_Q + stage * Q_TILE_BYTES
    for box in cutlass.range_constexpr(QK_BOXES):
        ptx.tma_load_4d(dst + box * Q_BOX_BYTES, tma_q, full, box * QK_BOX_COLS, row, head, b)


@cute.jit
def load_k(tma_k, mbar, smem, stage, parity, key, kv_head, b):
    """One K block into its ring; returns the ring's next (stage, parity)."""
    ptx.mbarrier_wait(mbar + K_EMPTY_MBAR + 8 * stage, parity)
    full = mbar + K_FULL_MBAR + 8 * stage
    ptx.mbarrier_arrive_expect_tx(full, K_BLOCK_BYTES)
    dst = smem + SMEM_K + stage * K_BLOCK_BYTES
    for box in cutlass.range_constexpr(QK_BOXES):
        ptx.tma_load_4d(dst + box * K_BOX_BYTES, tma_k, full, box * QK_BOX_COLS, key, kv_head, b)
    return next_stage(stage, parity, K_STAGES)


@cute.jit
def load_v(tma_v, mbar, smem, stage, parity, key, kv_head, b):
    """One V block into its ring; returns the ring's next (stage, parity)."""
    ptx.mbarrier_wait(mbar + V_EMPTY_MBAR + 8 * stage, parity)
    full = mbar + V_FULL_MBAR + 8 * stage
    ptx.mbarrier_arrive_expect_tx(full, V_BLOCK_BYTES)
    dst = smem + SMEM_V + stage * V_BLOCK_BYTES
    for box in cutlass.range_constexpr(V_BOXES):
        ptx.tma_load_4d(dst + box * V_BOX_BYTES, tma_v, full, box * V_BOX_COLS, key, kv_head, b)
    return next_stage(stage, parity, V_STAGES)


@cute.jit
def next_stage(stage, parity, stages: cutlass.Constexpr):
    """The (stage, parity) that follows in a ring of `stages`."""
    last = stage == stages - 1
    return cutlass.select_(last, Int32(0), stage + 1), cutlass.select_(last, parity ^ 1, parity)


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
    # As a value from a shuffle: ptxas derives the address anew wherever it is used, from a slow special register.
    smem = cute.arch.make_warp_uniform(ptx.smem_base())
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
    cute.arch.sync_threads()

    if warp < LOAD_WARP:
        ptx.set_registers(CONSUMER_REGS, LAUNCH_REGS)
        consumer_role(tma_o, mbar, smem, problem, warp // 4)
    else:
        ptx.set_registers(LOAD_REGS, LAUNCH_REGS)
        if warp == LOAD_WARP:
            if ptx.elect_one():
                load_role(tma_q, tma_k, tma_v, mbar, smem, problem)


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
