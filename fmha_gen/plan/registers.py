"""Warp roles and the register split.

16 warps of one CTA share 65536 registers: 128 a thread at launch. setmaxnreg then moves registers between
warpgroups: softmax takes what correction and the others give back. Each of the four warpgroups holds one count:
``q_stage * softmax + correction + (3 - q_stage) * other <= 512`` per thread of a warpgroup.
"""

from __future__ import annotations

from ..arch import Arch
from ..errors import PlanError
from ..spec import KernelSpec, Registers
from .types import WARP_THREADS, Role

NUM_WARPS = 16
REG_STEP, REG_MIN, REG_MAX = 8, 24, 256  # setmaxnreg takes multiples of 8 in [24, 256] (PTX ISA)
SOFTMAX_MIN, OTHER_MAX = 128, 128
# A softmax thread holds a row of S, tile_n float32 values, and beside it packed P, addresses and row state. 48 is the
# least that could do (fewer are refused); auto gives 64. Measured on the d64 causal kernel, ptxas 13.4, 2026-11-30:
# 176 registers spill 24 bytes at tile_n 128, 200 spill 32 at 160 and 168 at 192. The compile gate has the last word.
ROW_STATE_MIN, ROW_STATE = 48, 64

# (softmax, correction) that FlashAttention-4 4.0.0b36 uses on B200, one CTA, TMA loads; "other" follows from the rule.
# Keys: (head_dim_qk, mask), with None for any mask; DEFAULT_SPLIT is its "other head_dim >= 96". Its row for (192, 128)
# says causal; full has the same loops and takes it too.
# Below 96 it has 200/64/48. With 64 for correction the kernel here spills 2 to 10 times, by the number of emulated
# exponentials; with 72, and 40 for the others, never (ptxas 13.4.59, d64 causal and full, bf16 and fp16, 2026-11-30).
BELOW_96 = (200, 72)
DEFAULT_SPLIT = (192, 80)
SPLITS: dict[tuple[int, str | None], tuple[int, int]] = {
    (128, "causal"): (192, 72),
    (192, None): (192, 72),
    (256, None): (256, 160),
}


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
    if spec.head_dim_qk < 96:
        softmax, correction = BELOW_96
        source = "FlashAttention-4's softmax share for head_dim below 96; correction has 72, as 64 spill"
    else:
        d = spec.head_dim_qk
        key = next((k for k in ((d, spec.mask), (d, None)) if k in SPLITS), None)
        softmax, correction = SPLITS[key] if key else DEFAULT_SPLIT
        source = f"FlashAttention-4's split for head_dim {d}" if key else "FlashAttention-4's split for head_dim >= 96"
    source += " (B200, one CTA)"
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
        fit = (regs_per_warpgroup_thread(arch) - regs.correction - (3 - q_stage) * REG_MIN) // q_stage
        widest = (min(fit, REG_MAX) - ROW_STATE) // 32 * 32
        raise PlanError(
            f"{where}: tile.n={tile_n}, {label}: a softmax thread holds a row of S in {tile_n} registers and needs "
            f"{ROW_STATE_MIN} more at least, {row}; correction and the others need {REG_MIN} each, setmaxnreg gives at "
            f"most {REG_MAX}; use tile.n <= {widest}" + (" or q_stage 1" if q_stage == 2 else "")
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
