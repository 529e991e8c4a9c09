"""What to change in a spec when a compiled kernel does not pass a gate: said by the build, which knows the plan."""

from __future__ import annotations

from ..plan import KernelPlan, registers
from ..plan.sm90 import solve as sm90

_WARPS_PER_GROUP, _THREADS_PER_GROUP = 4, 128
# How the gates name local memory; it counts whole kernels, so that which role spills is not known here.
SPILLS = ("STL/LDL instructions", "bytes of stack per thread")


def spec_hint(plan: KernelPlan, problem: str) -> str:
    """`problem`, with what the spec can do about it if it is a spill."""
    return f"{problem}; {spill_hint(plan)}" if any(words in problem for words in SPILLS) else problem


def spill_hint(plan: KernelPlan) -> str:
    """The register fields of the spec with the roles that each feeds, what is free, and what else lowers register use."""
    spec = plan.spec
    roles: dict[str, list[str]] = {}
    used = 0
    for role in plan.roles:
        used += len(role.warp_ids) * role.num_regs
        if role.name != "empty":
            roles.setdefault(_field(role.name), []).append(role.name)
    used //= _WARPS_PER_GROUP
    fields = ", ".join(f"{name} {getattr(spec.registers, name)} ({' '.join(fed)})" for name, fed in roles.items())
    pool = plan.launch_regs * plan.num_threads // _THREADS_PER_GROUP  # setmaxnreg moves what a launch was given
    most = sm90.REG_MAX if plan.wgmma else registers.REG_MAX
    room = f"{pool - used} are free" if used < pool else "so lower another"
    return (
        f"{spec.source}: registers: {fields}: raise the field of the role that spills, most often softmax (at most "
        f"{most}); the warpgroups hold {used} of {pool} per thread, {room}; or {_else(plan)}; no option "
        f"lets spills pass"
    )


def _else(plan: KernelPlan) -> str:
    """What else lowers register use."""
    spec = plan.spec
    less = [f"lower tile.n ({spec.tile_n})"]
    less += [f"lower exp2_emulation ({spec.exp2_emulation})"] if spec.exp2_emulation else []
    less += ["use q_in_registers: false"] if spec.q_in_registers else []
    if plan.wgmma and plan.wgmma.overlap and not spec.q_in_registers:
        less.append(f"try recompute_s: {str(not spec.recompute_s).lower()}")
    return " or ".join(less)


def _field(role: str) -> str:
    """Which field of the spec's `registers` sets a role's count."""
    if role.startswith(("softmax", "consumer")):
        return "softmax"
    return "correction" if role == "correction" else "other"
