"""A kernel with loops of known content, for tests of the machine-code analysis. usage: sass_kernel.py FOLDER

Warps 0 to 3 (setmaxnreg 152): wait on an mbarrier, then 32 exponentials of a row in TMEM, per block; warps 4 to 7
(setmaxnreg 40): scale 32 columns of TMEM in place, per block. 256 TMEM columns. Never run.
"""

import sys
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import arch
from cutlass.experimental import primitives as prims

TMEM_COLS = 256
COLUMNS = 32


def load(address):
    outs = ", ".join(f"{{$w{i}}}" for i in range(COLUMNS))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {{{outs}}}, [{{$r0}}];"
    return arch.inline_ptx(text, write_only_types=[Float32] * COLUMNS, read_only_args=[address])


def store(address, values):
    ins = ", ".join(f"{{$r{i + 1}}}" for i in range(COLUMNS))
    text = f"tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [{{$r0}}], {{{ins}}};"
    arch.inline_ptx(text, read_only_args=[address, *values])


@cute.kernel
def kernel(out: cute.Pointer, blocks: Int32, scale: Float32):
    smem = arch.get_dyn_smem(cutlass.Int64, alignment=1024)
    warp = arch.make_warp_uniform(arch.warp_idx())
    tid, _, _ = arch.thread_idx()
    if warp == 0:
        with arch.elect_one():
            arch.mbarrier_init(smem, 1)
        arch.mbarrier_init_fence()
        prims.tcgen05_alloc((smem + 1).llvm_ptr, TMEM_COLS)
    arch.sync_threads()
    result = cute.make_tensor(out, cute.make_layout(1 << 20))
    if warp < 4:
        arch.setmaxregister_increase(152)
        total = Float32(0.0)
        for i in cutlass.range(blocks, unroll=1):
            arch.mbarrier_wait(smem, i & 1)
            row = load(Int32(warp << 21))
            arch.fence_view_async_tmem_load()
            for value in row:
                total += arch.exp2(value * scale)
        result[tid] = total
    else:
        arch.setmaxregister_decrease(40)
        for _ in cutlass.range(blocks, unroll=1):
            row = load(Int32((warp - 4) << 21))
            arch.fence_view_async_tmem_load()
            store(Int32((warp - 4) << 21), [value * scale for value in row])
            arch.fence_view_async_tmem_store()


@cute.jit
def host(out: cute.Pointer, blocks: Int32, scale: Float32):
    kernel.set_name_prefix("sass_fixture", remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(out, blocks, scale).launch(grid=(1, 1, 1), block=(256, 1, 1), smem=2048, min_blocks_per_mp=1)


def main(folder: str) -> None:
    from cutlass.cute.runtime import make_ptr

    pointer = make_ptr(Float32, 256, cute.AddressSpace.gmem, assumed_align=16)
    options = f"--gpu-arch sm_100a --keep-cubin --keep-ptx --dump-dir {folder}"
    compiled = cute.compile(host, pointer, Int32(4), Float32(1.0), options=options)
    (Path(folder) / "out.cubin").write_bytes(compiled.__cubin__)


if __name__ == "__main__":
    main(sys.argv[1])
