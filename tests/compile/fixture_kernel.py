"""A small sm_100a kernel with the whole parameter list, for tests of the compiler: a TMA load, setmaxnreg, an exp2.

Obeys the contract of rendered modules: `KERNEL_NAME`, `host_entry`, `trace_arguments`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Int32, Int64
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

KERNEL_NAME = "fixture_sm100a_bf16"
NUM_THREADS = 512
TILE_BYTES = 64 * 128 * 2
SMEM_BYTES = 1024 + TILE_BYTES


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
    smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    full_mbar = cute.recast_ptr(smem, dtype=Int64)
    tile = cute.recast_ptr(smem + 1024, dtype=cutlass.BFloat16)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    if tid == 0:
        cute.arch.mbarrier_init(full_mbar, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp >= 4:
        cute.arch.setmaxregister_decrease(48)
        if warp == 4:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_mbar, TILE_BYTES)
                prims.cp_async_bulk_tensor_shared_cta_global(
                    tile.llvm_ptr, tma_q.get_ptr(), [Int32(0), bid * 128, Int32(0), Int32(0)], full_mbar.llvm_ptr
                )
    else:
        cute.arch.setmaxregister_increase(200)
        cute.arch.mbarrier_wait(full_mbar, 0)
        row = bid * 128 + tid
        if row < seqlen_q:
            if lse.toint() != Int64(0):
                x = cute.arch.exp2(Float32(tile[tid * 64]) * softmax_scale_log2)
                out = cute.make_tensor(lse, cute.make_layout(1 << 20))
                out[Int64(row) * lse_stride_s] = x


@cute.jit
def host_entry(lse: cute.Pointer, n64: Int64, n32: Int32, scale: Float32):
    tma = create_tensor_map_tiled(
        n64, cutlass.BFloat16, [64, n32, n32, n32], [n64, n64, n64], [64, 128, 1, 1], swizzle=TensorMapSwizzle.s128b
    )
    kernel.set_name_prefix(KERNEL_NAME, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(tma, tma, tma, tma, lse, n64, n64, n64, n32, n32, n32, n32, n32, scale).launch(
        grid=(n32, 1, 1), block=(NUM_THREADS, 1, 1), cluster=(1, 1, 1), smem=SMEM_BYTES, min_blocks_per_mp=1
    )


def trace_arguments():
    from cutlass.cute.runtime import make_ptr

    return make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=4), Int64(16), Int32(1), Float32(1.0)
