"""A kernel with the launcher's dense ABI that moves data instead of computing attention, for real GPUs.

It runs on any architecture with TMA. What it writes shows whether every argument arrived:

    out[b, i, h, :] = (q, k, v)[h % 3][b, i, h or h // ratio, :]   (zero beyond seqlen_k)
    lse[b, h, i]    = softmax_scale_log2 * i + seqlen_k            (where lse is not null)

head_dim_qk and head_dim_v are 128. Compiled by the DSL; a test on a GPU needs only the cubin.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from fmha_gen.device import ptx, tiles

KERNEL_NAME = "launcher_probe"
ROWS = 128
BOX_BYTES = 128 * 64 * 2
SMEM_MBAR = 2 * BOX_BYTES
SMEM_BYTES = 100 * 1024  # more than a launch gets without opting in


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
    smem = ptx.smem_base()
    full = smem + SMEM_MBAR
    lane = cute.arch.thread_idx()[0]
    if lane == 0:
        ptx.mbarrier_init(full, 1)
        ptx.mbarrier_init_fence()
    cute.arch.sync_threads()

    num_m_blocks = tiles.ceil_div(seqlen_q, ROWS)
    num_tiles = num_m_blocks * num_heads_q * batch
    tile = cute.arch.block_idx()[0]
    parity = Int32(0)
    while tile < num_tiles:
        row = (tile % num_m_blocks) * ROWS
        head = (tile // num_m_blocks) % num_heads_q
        b = tile // (num_m_blocks * num_heads_q)
        kv_head = head // (num_heads_q // num_heads_kv)
        if lane == 0:
            ptx.mbarrier_arrive_expect_tx(full, 2 * BOX_BYTES)
            for box in cutlass.range_constexpr(2):
                dst = smem + box * BOX_BYTES
                if head % 3 == 0:
                    ptx.tma_load_4d(dst, tma_q, full, box * 64, row, head, b)
                elif head % 3 == 1:
                    ptx.tma_load_4d(dst, tma_k, full, box * 64, row, kv_head, b)
                else:
                    ptx.tma_load_4d(dst, tma_v, full, box * 64, row, kv_head, b)
        ptx.mbarrier_wait(full, parity)
        if lane == 0:
            for box in cutlass.range_constexpr(2):
                ptx.tma_store_4d(tma_o, smem + box * BOX_BYTES, box * 64, row, head, b)
            ptx.bulk_commit_group()
            ptx.bulk_wait_group(0)
        if lse.toint() != 0:
            for i in cutlass.range(ROWS // 32, unroll=1):
                r = row + i * 32 + lane
                if r < seqlen_q:
                    offset = b * lse_stride_b + head * lse_stride_h + r * lse_stride_s
                    ptx.store_global_f32(lse.toint() + offset * 4, softmax_scale_log2 * r + seqlen_k)
        cute.arch.sync_threads()
        parity = parity ^ 1
        tile = tile + cute.arch.grid_dim()[0]


@cute.jit
def host_entry(lse: cute.Pointer, i64: Int64, i32: Int32, f32: Float32):
    any_map = create_tensor_map_tiled(
        i64, cutlass.BFloat16, [64, i32, i32, i32], [i64, i64, i64], [64, 128, 1, 1], swizzle=TensorMapSwizzle.s128b
    )
    kernel.set_name_prefix(KERNEL_NAME, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(any_map, any_map, any_map, any_map, lse, i64, i64, i64, i32, i32, i32, i32, i32, f32).launch(
        grid=(i32, 1, 1), block=(32, 1, 1), smem=SMEM_BYTES, min_blocks_per_mp=1
    )


def trace_arguments():
    return make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=4), Int64(16), Int32(1), Float32(1.0)
