"""`make_plan`: one spec in, one checked plan out."""

from __future__ import annotations

from collections.abc import Mapping

from ..arch import Arch, get_arch
from ..errors import PlanError
from ..spec import KernelSpec
from . import abi, barriers, exp2, model, protocol, registers, schedule, sm90, smem, tiles, tmem, umma
from .types import KernelPlan

DEFAULT_Q_STAGE = 2


def make_plan(spec: KernelSpec) -> KernelPlan:
    """Choose every auto field, solve every budget and prove the pipelines.

    Raises PlanError ``file:line: field=value: what it needs with the arithmetic, the limit; what to use instead``.
    """
    where = spec.source or spec.name
    arch = get_arch(spec.arch, where)
    if arch.tmem_cols == 0:
        return sm90.make_plan(spec)
    reasons: dict[str, str] = {}
    spec = _resolve_sizes(spec, arch, where, reasons)
    shape = tiles.shape_of(spec)
    tiles.check_shape(shape, where)
    steps = tiles.solve_tiles(shape)
    columns = tmem.solve_tmem(shape, arch, where)
    budget = smem.solve_budget(shape, spec.kv_stage, arch, where)
    spec = _resolve_rest(spec, steps, budget, arch, reasons)
    assert spec.registers and spec.exp2_emulation is not None and spec.q_stage
    registers.check_registers(spec.registers, spec.q_stage, steps.tile_n, arch, where)
    roles = registers.make_roles(spec.q_stage, spec.registers, arch)
    operands = tiles.make_operands(shape, spec.dtype)
    pipelines = barriers.Pipelines(
        roles, spec.q_stage, shape.num_ctas, budget.q_bytes // spec.q_stage, budget.ring, budget.o_aliases_q
    )
    table = barriers.make_barriers(pipelines)
    buffers, smem_bytes = smem.layout_smem(shape, budget, barriers.barrier_bytes(table), arch, where)
    map_ = protocol.map_of(steps, buffers, budget.ring, columns, table)
    barriers.check(table, pipelines, map_, where)
    order = schedule.make_schedule(spec, where)
    serves, rank = schedule.make_serves(spec)
    qk, pv = umma.make_umma(operands, steps, spec.dtype)
    return KernelPlan(
        spec=spec,
        reasons=tuple(reasons.items()),
        tiles=steps,
        operands=operands,
        smem=buffers,
        smem_bytes=smem_bytes,
        smem_limit_bytes=arch.smem_bytes,
        kv_ring=budget.ring,
        tmem=columns,
        tmem_alloc_cols=tmem.tmem_alloc_cols(arch),
        roles=roles,
        num_threads=sum(r.num_threads for r in roles),
        launch_regs=registers.launch_regs(arch),
        barriers=table,
        named_barriers=barriers.make_named_barriers(roles),
        umma_qk=qk,
        umma_pv=pv,
        exp2=exp2.make_exp2(spec.exp2_emulation, steps, where),
        schedule=order,
        params=abi.make_params(spec, operands, arch),
        grid=schedule.grid_rule(order, steps.rows_per_tile),
        serves=serves,
        rank=rank,
        model=model.predict(spec.head_dim_qk, spec.head_dim_v, steps.tile_n, spec.exp2_emulation, arch),
    )


def _resolve_sizes(spec: KernelSpec, arch: Arch, where: str, reasons: dict[str, str]) -> KernelSpec:
    """Fields that the budgets start from; and what no template can make yet."""
    if spec.features:
        raise PlanError(f"{where}: {spec.features[0]}=true: not built yet; leave it out")
    if spec.num_ctas not in (None, 1):
        raise PlanError(f"{where}: num_ctas={spec.num_ctas}: CTA pairs are not built yet; use num_ctas: 1")
    if spec.mask not in schedule.AUTO:
        raise PlanError(f"{where}: mask={spec.mask}: not built yet; use one of {', '.join(schedule.AUTO)}")
    q_stage = DEFAULT_Q_STAGE
    if spec.q_stage is None:
        reasons["q_stage"] = "two Q tiles in flight share each K and V"
        cols = tmem.S_SLOTS * (spec.tile_n or tiles.DEFAULT_TILE_N) + 2 * spec.head_dim_v
        if cols > arch.tmem_cols:
            q_stage = 1
            reasons["q_stage"] = f"two Q tiles need {cols} TMEM columns, {arch.name} has {arch.tmem_cols}"
    defaults = {
        "q_stage": (q_stage, reasons.get("q_stage", "")),
        "tile_m": (tiles.TILE_M, "one row per TMEM lane"),
        "tile_n": (tiles.DEFAULT_TILE_N, "P in 16 bits then fills half of S"),
        "num_ctas": (1, "CTA pairs are not built yet"),
    }
    return _fill(spec, defaults, reasons)


def _resolve_rest(
    spec: KernelSpec, steps: tiles.Tiles, budget: smem.SmemBudget, arch: Arch, reasons: dict[str, str]
) -> KernelSpec:
    defaults = {
        "kv_stage": (budget.ring.stages, _ring_reason(budget)),
        "registers": registers.auto_registers(spec, arch),
        "schedule": schedule.auto_schedule(spec.mask),
        "exp2_emulation": exp2.auto_exp2(spec, steps, arch),
    }
    return _fill(spec, defaults, reasons)


def _ring_reason(budget: smem.SmemBudget) -> str:
    ring, room = budget.ring, smem.PAYLOAD_BYTES - budget.qo_bytes
    if ring.kind == "uneven":
        return (
            f"{room} B beside Q and O hold large + small + large: {ring.k_bytes} + {ring.v_bytes} + {ring.k_bytes} = "
            f"{ring.size_bytes}"
        )
    return f"{room} B beside Q and O hold {ring.stages} x {ring.stage_stride_bytes}"


def _fill(spec: KernelSpec, defaults: Mapping[str, tuple[object, str]], reasons: dict[str, str]) -> KernelSpec:
    changes = {name: value for name, (value, _) in defaults.items() if getattr(spec, name) is None}
    reasons.update({name: defaults[name][1] for name in changes})
    return spec.replace(**changes)
