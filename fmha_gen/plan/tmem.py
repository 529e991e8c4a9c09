"""Tensor memory: S, P and O of the tiles in flight, in columns of 128 lanes x 32 bits.

S slots come first, then O; P reuses the upper part of its own S slot (16-bit P of n keys fills n/2 columns, which is
the second half of S exactly). Always all 512 columns are allocated: one CTA runs on an SM, and a fixed base keeps
every column a constant.
"""

from __future__ import annotations

from ..arch import Arch
from ..errors import PlanError
from .tiles import CHUNK_COLS, DEFAULT_TILE_N, MAX_TILE_N, Shape
from .types import TmemRegion

S_SLOTS = 2  # two Q tiles, or the two ping-pong slots of one


def tmem_needed_cols(shape: Shape) -> int:
    """Columns of S and O: ``2 * tile_n + q_stage * head_dim_v``."""
    return S_SLOTS * shape.tile_n + shape.q_stage * shape.head_dim_v


def solve_tmem(shape: Shape, arch: Arch, where: str) -> tuple[TmemRegion, ...]:
    """The column map. Raises PlanError with the arithmetic when S and O do not fit."""
    n, dv = shape.tile_n, shape.head_dim_v
    needed = tmem_needed_cols(shape)
    if needed > arch.tmem_cols:
        raise PlanError(
            f"{where}: q_stage={shape.q_stage}, head_dim_v={dv}, tile.n={n}: needs {needed} TMEM columns "
            f"(S {S_SLOTS}x{n} + O {shape.q_stage}x{dv}), {arch.name} has {arch.tmem_cols}; {_advice(shape, arch)}"
        )
    s = [TmemRegion(f"s{i}", i * n, n, note=f"scores, float32, {n} keys") for i in range(S_SLOTS)]
    p_cols = n * shape.element_bytes // 4
    p = [
        TmemRegion(f"p{i}", r.col + n // 2, p_cols, inside=r.name, note=f"probabilities, {8 * shape.element_bytes}-bit")
        for i, r in enumerate(s)
    ]
    o = [
        TmemRegion(f"o{i}", S_SLOTS * n + i * dv, dv, note="output accumulator, float32") for i in range(shape.q_stage)
    ]
    return (*s, *p, *o)


def _advice(shape: Shape, arch: Arch) -> str:
    fit_n = (arch.tmem_cols - shape.q_stage * shape.head_dim_v) // S_SLOTS // CHUNK_COLS * CHUNK_COLS
    fit_n = min(fit_n, MAX_TILE_N if shape.q_stage == 1 else DEFAULT_TILE_N)  # what registers hold: see `registers`
    hints = []
    one = S_SLOTS * shape.tile_n + shape.head_dim_v
    if shape.q_stage == 2 and one <= arch.tmem_cols and shape.tile_n <= MAX_TILE_N:
        hints.append("q_stage 1")
    if fit_n >= 64:
        hints.append(f"tile.n <= {fit_n}")
    return "use " + " or ".join(hints) if hints else "use a smaller head_dim_v"


def tmem_alloc_cols(arch: Arch) -> int:
    """Columns that the kernel allocates: a power of two; all of them."""
    return arch.tmem_cols


def free_ranges(regions: tuple[TmemRegion, ...], alloc_cols: int) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of what no region of its own covers."""
    out, col = [], 0
    for r in sorted((r for r in regions if r.inside is None), key=lambda r: r.col):
        if r.col > col:
            out.append((col, r.col - col))
        col = r.col + r.num_cols
    if col < alloc_cols:
        out.append((col, alloc_cols - col))
    return tuple(out)
