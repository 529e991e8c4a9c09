"""Warp roles and the register split.

16 warps of one CTA share 65536 registers: 128 a thread at launch. setmaxnreg then moves registers between
warpgroups: softmax takes what correction and the others give back. Each of the four warpgroups holds one count:
``q_stage * softmax + correction + (3 - q_stage) * other <= 512`` per thread of a warpgroup.
"""

from __future__ import annotations

from ..arch import Arch
from ..errors import PlanError
from ..spec import KernelSpec, Registers
from .tiles import CHUNK_COLS, MAX_TILE_N
from .types import WARP_THREADS, Role

NUM_WARPS = 16
REG_STEP, REG_MIN, REG_MAX = 8, 24, 256  # setmaxnreg takes multiples of 8 in [24, 256] (PTX ISA)
SOFTMAX_MIN, OTHER_MAX = 128, 128
# A softmax thread holds a row of S, tile_n float32 values, and beside it packed P, addresses and row state. 48 is the
# least that could do (fewer are refused); auto gives 64. Measured on the d64 causal kernel, ptxas 13.4, 2026-11-30:
# 176 registers spill 24 bytes at tile_n 128, 200 spill 32 at 160 and 168 at 192. With 64, and `exp2.WIDE_MAX`, tile_n
# 160 and 192 compile without spills for every head dim, both masks and both dtypes. The compile gate has the last word.
ROW_STATE_MIN, ROW_STATE = 48, 64

# (softmax, correction); "other" follows from the rule. With two Q tiles that is 192/72/56, which FlashAttention-4
# 4.0.0b36 uses on B200 for d128 causal and (192, 128). Its other splits were tried here too (full mask, bf16, ptxas
# 13.4.59, 2026-11-30); issue slots of the unmasked softmax, correction and MMA loops:
#   d64    200/64/48 spills in causal; 200/72/40: 579, 114, 153 (causal: MMA 177); 192/80/48: 582, 116, 149;
#          192/72/56: 579, 114, 148
#   d96    192/80/48: 558, 160, 179; 192/72/56: 555, 158, 176
#   d128   192/80/48: 510, 204, 214; 192/72/56: 507, 202, 208
SPLIT = (192, 72)
# FlashAttention-4's for d256, one Q tile: the correction warps rescale rows twice as long.
SPLITS: dict[int, tuple[int, int]] = {256: (256, 160)}


def regs_per_warpgroup_thread(arch: Arch) -> int:
    """Registers that one thread of each warpgroup can hold together: 512."""
    return arch.registers // (4 * WARP_THREADS)


def launch_regs(arch: Arch) -> int:
    """Registers per thread at launch, one CTA of 16 warps an SM: 128."""
    return arch.registers // (NUM_WARPS * WARP_THREADS)


def total_regs(regs: Registers, q_stage: int) -> int:
    """Left side of the rule."""
    return q_stage * regs.softmax + regs.correction + (3 - q_stage) * regs.other


def auto_registers(spec: KernelSpec, arch: Arch) -> tuple[Registers, str]:
    """The split for a shape, and where it comes from. May not fit: `check_registers` says so."""
    q_stage = spec.q_stage
    assert q_stage is not None and spec.tile_n is not None
    softmax, correction = SPLITS.get(spec.head_dim_qk, SPLIT)
    source = "no spills and the fewest issue slots of the splits tried"
    if spec.head_dim_qk in SPLITS:
        source = f"FlashAttention-4's split for head_dim {spec.head_dim_qk}"
    row = min(spec.tile_n + ROW_STATE, REG_MAX)
    if row > softmax:
        softmax, source = row, f"a row of S and {ROW_STATE} more"
    pool = regs_per_warpgroup_thread(arch)
    groups = 3 - q_stage
    other = min((pool - q_stage * softmax - correction) // groups // REG_STEP * REG_STEP, OTHER_MAX)
    rest = f"other = ({pool} - {q_stage}x{softmax} - {correction}) / {groups}, at most {OTHER_MAX}"
    return Registers(softmax, correction, other), f"{source}; {rest}"


def check_registers(regs: Registers, q_stage: int, tile_n: int, arch: Arch, where: str) -> None:
    """Raises PlanError when a count is not one that setmaxnreg takes, or the split exceeds the register file."""
    label = f"registers={{softmax: {regs.softmax}, correction: {regs.correction}, other: {regs.other}}}"
    row = tile_n + ROW_STATE_MIN
    if regs.softmax < row or regs.other < REG_MIN:
        raise PlanError(
            f"{where}: tile.n={tile_n}, {label}: a softmax thread holds a row of S in {tile_n} registers and needs "
            f"{ROW_STATE_MIN} more at least, {row}; correction and the others need {REG_MIN} each, setmaxnreg gives at "
            f"most {REG_MAX}; use {_fix(regs, q_stage, tile_n, arch)}"
        )
    for name, value in zip(regs._fields, regs, strict=True):
        low = SOFTMAX_MIN if name == "softmax" else REG_MIN
        high = OTHER_MAX if name == "other" else REG_MAX
        if value % REG_STEP or not low <= value <= high:
            near = min(max(round(value / REG_STEP) * REG_STEP, low), high)
            raise PlanError(
                f"{where}: {label}: {name} {value} must be a multiple of {REG_STEP} from {low} to {high} (setmaxnreg; "
                f"a softmax thread holds a row of S, the others start from {launch_regs(arch)}); use {near}"
            )
    pool, total = regs_per_warpgroup_thread(arch), total_regs(regs, q_stage)
    if total > pool:
        cut = -(-(total - pool) // q_stage // REG_STEP) * REG_STEP
        raise PlanError(
            f"{where}: {label}: needs {q_stage}x{regs.softmax} + {regs.correction} + {3 - q_stage}x{regs.other} = "
            f"{total} registers per thread of the four warpgroups, {arch.name} has {pool} ({arch.registers} / 128); "
            f"use softmax <= {regs.softmax - cut}"
        )


def _fix(regs: Registers, q_stage: int, tile_n: int, arch: Arch) -> str:
    """What to change where a row of S does not fit a softmax thread."""
    fit = min((regs_per_warpgroup_thread(arch) - regs.correction - (3 - q_stage) * REG_MIN) // q_stage, REG_MAX)
    if regs.softmax < tile_n + ROW_STATE <= fit:
        return f"softmax {tile_n + ROW_STATE}"
    widest = (fit - ROW_STATE) // CHUNK_COLS * CHUNK_COLS
    hints = [f"tile.n <= {widest}"] if widest >= 2 * CHUNK_COLS else ["fewer correction registers"]
    if q_stage == 2 and tile_n <= MAX_TILE_N:
        hints.append("q_stage 1")
    return " or ".join(hints)


def make_roles(q_stage: int, regs: Registers, arch: Arch) -> tuple[Role, ...]:
    """The roles in warp order. With one Q tile the second softmax group stays empty and gives its registers back.

    All warps of a warpgroup hold the same count, as setmaxnreg demands.
    """
    softmax = [("softmax0", (0, 1, 2, 3), regs.softmax)]
    empty: tuple[int, ...] = (15,)
    if q_stage == 2:
        softmax.append(("softmax1", (4, 5, 6, 7), regs.softmax))
    else:
        empty = (4, 5, 6, 7, 15)
    rows = [
        *softmax,
        ("correction", (8, 9, 10, 11), regs.correction),
        ("mma", (12,), regs.other),
        ("epilogue", (13,), regs.other),
        ("load", (14,), regs.other),
        ("empty", empty, regs.other),
    ]
    start = launch_regs(arch)
    return tuple(
        Role(name, warps, num, "inc" if num > start else "dec" if num < start else "keep") for name, warps, num in rows
    )
