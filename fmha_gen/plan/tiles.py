"""Tile sizes, the steps in which roles walk them, and operands as TMA sees them."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError
from ..manifest import MapAxis, TensorMapRecord
from ..spec import KernelSpec
from .types import Operand, Tiles

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1}
TILE_M = 128  # one row of S per TMEM lane, and per softmax thread
DEFAULT_TILE_N = 128
MAX_TILE_N = 192  # a row of S and 64 registers more are the 256 that setmaxnreg gives at most: see `registers`
CHUNK_COLS = 32  # keys that a softmax thread loads, exponentiates and stores at a time
MMA_K_BYTES = 32  # depth of one tcgen05.mma of 16- or 8-bit operands (PTX ISA)
MAX_UMMA_N = 256  # largest N of a tcgen05.mma, and largest extent of a TMA box
CORRECTION_CHUNK_COLS = 16
SWIZZLE_BYTES = {"128B": 128, "64B": 64, "32B": 32}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the budget solvers need to know of a variant, whether or not its kernel is built yet.

    element_bytes: of q, k, v and P. out_bytes: of out. split: partial results of split-KV, which leave in float32.
    """

    head_dim_qk: int
    head_dim_v: int
    q_stage: int
    num_ctas: int = 1
    tile_m: int = TILE_M
    tile_n: int = DEFAULT_TILE_N
    element_bytes: int = 2
    out_bytes: int = 2
    split: bool = False

    @property
    def dims(self) -> str:
        return str(self.head_dim_qk) if self.head_dim_qk == self.head_dim_v else f"{self.head_dim_qk}x{self.head_dim_v}"


def shape_of(spec: KernelSpec) -> Shape:
    """The shape of a spec whose tile sizes, q_stage and num_ctas are resolved."""
    assert spec.q_stage and spec.tile_m and spec.tile_n and spec.num_ctas
    element_bytes = ELEMENT_BYTES[spec.dtype]
    return Shape(
        spec.head_dim_qk,
        spec.head_dim_v,
        spec.q_stage,
        spec.num_ctas,
        spec.tile_m,
        spec.tile_n,
        element_bytes,
        out_bytes=max(2, element_bytes),
        split=spec.split_kv,
    )


def check_shape(shape: Shape, where: str) -> None:
    """Refuse dimensions that no tcgen05 tiling of this kernel can take; every reason at its first cause."""
    if shape.tile_m != TILE_M:
        raise PlanError(
            f"{where}: tile.m={shape.tile_m}: a softmax thread owns one of {TILE_M} TMEM lanes; use tile.m: {TILE_M}"
        )
    if shape.q_stage not in (1, 2):
        raise PlanError(
            f"{where}: q_stage={shape.q_stage}: two softmax warpgroups serve at most 2 Q tiles of {TILE_M} rows; "
            f"use q_stage 1 or 2"
        )
    n = shape.tile_n
    if n % CHUNK_COLS or not 2 * CHUNK_COLS <= n <= MAX_UMMA_N:
        raise PlanError(
            f"{where}: tile.n={n}: softmax walks {CHUNK_COLS} keys at a time and hands P over in two parts, one "
            f"tcgen05.mma has at most {MAX_UMMA_N} columns, and a softmax thread has registers for a row of "
            f"{MAX_TILE_N}; use a multiple of {CHUNK_COLS} from {2 * CHUNK_COLS} to {MAX_TILE_N}"
        )
    for name, d in (("head_dim_qk", shape.head_dim_qk), ("head_dim_v", shape.head_dim_v)):
        if d % 32 or not 32 <= d <= MAX_UMMA_N:
            raise PlanError(
                f"{where}: {name}={d}: rows are moved in swizzle atoms of 32 or 64 elements and one tcgen05.mma has at "
                f"most {MAX_UMMA_N} columns; use a multiple of 32 from 32 to {MAX_UMMA_N}, or pad"
            )


def solve_tiles(shape: Shape) -> Tiles:
    """Steps of every role for one shape. P's first part is three quarters of the keys, rounded down to a chunk."""
    mma_k = MMA_K_BYTES // shape.element_bytes
    p_first = shape.tile_n * 3 // 4 // CHUNK_COLS * CHUNK_COLS
    return Tiles(
        tile_m=shape.tile_m,
        tile_n=shape.tile_n,
        rows_per_tile=shape.q_stage * shape.tile_m,
        s_slots=2,
        chunk_cols=CHUNK_COLS,
        num_chunks=shape.tile_n // CHUNK_COLS,
        p_first_cols=p_first,
        p_first_chunks=p_first // CHUNK_COLS,
        p_step_cols=MMA_K_BYTES // 4,
        mma_k=mma_k,
        qk_k_steps=shape.head_dim_qk // mma_k,
        pv_k_steps=shape.tile_n // mma_k,
        pv_k_steps_first=p_first // mma_k,
        correction_chunk_cols=CORRECTION_CHUNK_COLS,
        epilogue_chunk_cols=256 // (8 * shape.out_bytes),
    )


def swizzle_of(head_dim: int, element_bytes: int) -> str:
    """The widest TMA swizzle whose span divides a row: ``128B``, else ``64B``, else ``32B``."""
    for name, span in SWIZZLE_BYTES.items():
        if head_dim * element_bytes % span == 0:
            return name
    raise PlanError(
        f"head dimension {head_dim} x {element_bytes} B: not a multiple of the smallest swizzle span, 32 B; pad it"
    )


# tensor -> (head dimension, sequence extent, head extent)
_EXTENTS = {
    "q": ("head_dim_qk", "seqlen_q", "num_heads_q"),
    "k": ("head_dim_qk", "seqlen_k", "num_heads_kv"),
    "v": ("head_dim_v", "seqlen_k", "num_heads_kv"),
    "o": ("head_dim_v", "seqlen_q", "num_heads_q"),
}


def make_operands(shape: Shape, dtype: str, o_rows: int | None = None) -> tuple[Operand, ...]:
    """q, k, v, o: boxes of one swizzle span by the tile's rows, and their tensor maps, axes (d, s, h, b).

    o_rows: rows of one store of o where it is not the whole tile.
    """
    out = []
    for name, (dim, seqlen, heads) in _EXTENTS.items():
        head_dim = shape.head_dim_qk if dim == "head_dim_qk" else shape.head_dim_v
        rows = shape.tile_m if name in "qo" else shape.tile_n
        if name == "o" and o_rows is not None:
            rows = o_rows
        element_bytes = shape.out_bytes if name == "o" else shape.element_bytes
        swizzle = swizzle_of(head_dim, element_bytes)
        box = SWIZZLE_BYTES[swizzle] // element_bytes
        axes = (
            MapAxis("d", dim, box),
            MapAxis("s", seqlen, rows),
            MapAxis("h", heads, 1),
            MapAxis("b", "batch", 1),
        )
        out.append(
            Operand(
                name=name,
                head_dim=head_dim,
                rows=rows,
                element_bytes=element_bytes,
                swizzle=swizzle,
                swizzle_bytes=SWIZZLE_BYTES[swizzle],
                box_elems=box,
                num_boxes=head_dim // box,
                box_bytes=rows * SWIZZLE_BYTES[swizzle],
                tile_bytes=rows * head_dim * element_bytes,
                tensor_map=TensorMapRecord(tensor=name, element=dtype, axes=axes, swizzle=swizzle),
            )
        )
    return tuple(out)
