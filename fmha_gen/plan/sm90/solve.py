"""`make_plan` for sm_90a: warp-specialised wgmma, one CTA an SM.

Two or three consumer warpgroups own 64 query rows each and do everything for them: S = Q K^T, softmax, O += P V with P
in registers, and the epilogue. A load warpgroup of which one thread works fills sQ and separate rings of K and V.
"""

from __future__ import annotations

from ...arch import Arch, get_arch
from ...errors import PlanError
from ...spec import KernelSpec
from .. import abi, model, schedule, tiles, umma
from ..types import Exp2, KernelPlan, KvRing, ModelBound, NamedBarrier, Operand, Role, SmemBuffer, Tiles, Umma, Wgmma
from . import barriers, choices
from .choices import GROUP_ROWS, ORDERS

WARPS_PER_GROUP = 4
WARP_ROWS = 16  # rows of one warp, and of one TMA store
MMA_K = 16
REG_STEP, REG_MIN, REG_MAX = 8, 24, 240
ISSUE_SLOTS = (
    320.0,
    0,
    16,
)  # model: softmax, correction and product slots per 128 keys and warp, from the machine code


def make_plan(spec: KernelSpec) -> KernelPlan:
    """Choose every auto field, solve every budget and prove the pipelines. Raises PlanError as the other plans do."""
    where = spec.source or spec.name
    arch = get_arch(spec.arch, where)
    _check_built(spec, where)
    spec, reasons = choices.resolve(spec, where)
    _check_tiles(spec, where)
    assert spec.tile_m and spec.tile_n and spec.registers and spec.q_stage and spec.kv_stage and spec.warpgroup_order
    consumers = spec.tile_m // GROUP_ROWS
    roles = _roles(spec, consumers, arch, where)
    operands = _operands(spec)
    buffers, smem_bytes, o_piece_boxes = _smem(spec, operands, arch, where)
    table = barriers.make_barriers(spec, roles, operands)
    barriers.check(table, spec, consumers, buffers, where)
    order = schedule.make_schedule(spec, where)
    qk, pv = _products(spec, operands)
    preferred_from, rank = choices.preference(spec)
    threads = sum(r.num_threads for r in roles)
    return KernelPlan(
        spec=spec,
        reasons=tuple(reasons.items()),
        tiles=_tiles(spec),
        operands=operands,
        smem=buffers,
        smem_bytes=smem_bytes,
        smem_limit_bytes=arch.smem_bytes,
        kv_ring=_rings(spec, operands),
        tmem=(),
        tmem_alloc_cols=0,
        roles=roles,
        num_threads=threads,
        launch_regs=_launch_regs(threads, arch),
        barriers=table,
        named_barriers=_named_barriers(spec, consumers),
        umma_qk=qk,
        umma_pv=pv,
        exp2=Exp2(0, ((),), (0.0, 0.0, 0.0, 0.0)),
        schedule=order,
        params=abi.make_params(spec, operands, arch),
        grid=schedule.grid_rule(order, spec.tile_m),
        serves=schedule.serves_from(spec, preferred_from),
        rank=rank,
        model=_model(spec, arch),
        wgmma=Wgmma(
            consumers=consumers,
            overlap=bool(spec.overlap),
            order=spec.warpgroup_order,
            q_in_registers=bool(spec.q_in_registers),
            across_tiles=bool(spec.across_tiles),
            recompute_s=bool(spec.recompute_s),
            unseen_blocks=choices.unseen_blocks(spec, consumers),
            o_piece_boxes=o_piece_boxes,
        ),
    )


def _check_built(spec: KernelSpec, where: str) -> None:
    if spec.features:
        raise PlanError(f"{where}: {spec.features[0]}=true: not built yet; leave it out")
    if spec.num_ctas not in (None, 1):
        raise PlanError(f"{where}: num_ctas={spec.num_ctas}: sm_90a kernels run in one CTA; use num_ctas: 1")
    if spec.exp2_emulation not in (None, 0):
        raise PlanError(
            f"{where}: exp2_emulation={spec.exp2_emulation}: sm_90a has no packed float32 arithmetic to pay for it; "
            f"use exp2_emulation: 0"
        )


def _check_tiles(spec: KernelSpec, where: str) -> None:
    """Shapes that wgmma and the register fragments can take."""
    m, n = spec.tile_m, spec.tile_n
    assert m and n
    if m not in (2 * GROUP_ROWS, 3 * GROUP_ROWS):
        raise PlanError(f"{where}: tile.m={m}: two or three consumer warpgroups of {GROUP_ROWS} rows; use 128 or 192")
    if n % MMA_K or not 2 * MMA_K <= n <= 256:
        raise PlanError(
            f"{where}: tile.n={n}: the keys of a block are the depth of a product ({MMA_K} a step) and one TMA box "
            f"(256 rows at most); use a multiple of {MMA_K} from {2 * MMA_K} to 256"
        )
    if spec.warpgroup_order not in ORDERS:
        raise PlanError(f"{where}: warpgroup_order={spec.warpgroup_order!r}: use one of {', '.join(ORDERS)}")
    if spec.q_stage not in (1, 2):
        raise PlanError(f"{where}: q_stage={spec.q_stage}: sQ has one or two buffers; use 1 or 2")
    if spec.across_tiles and not choices.can_go_across_tiles(spec):
        raise PlanError(
            f"{where}: across_tiles=true: built for overlapped products with Q in shared memory; use overlap: true, "
            f"q_in_registers: false and warpgroup_order none or gemm"
        )
    if spec.recompute_s and (spec.q_in_registers or not spec.overlap):
        raise PlanError(
            f"{where}: recompute_s=true: built for overlapped products with Q in shared memory; use overlap: true and "
            f"q_in_registers: false"
        )
    if spec.kv_stage is None or spec.kv_stage < 2:
        raise PlanError(
            f"{where}: kv_stage={spec.kv_stage}: the next V is waited for while one is in use, so each ring needs 2 "
            f"stages; use kv_stage >= 2"
        )


def _roles(spec: KernelSpec, consumers: int, arch: Arch, where: str) -> tuple[Role, ...]:
    """Consumer warpgroups first, then the load warpgroup: its first warp works, the others only give registers."""
    assert spec.registers
    regs, other = spec.registers.softmax, spec.registers.other
    start = _launch_regs(128 * (consumers + 1), arch)
    pool = start * (consumers + 1)  # setmaxnreg moves what the launch was given, and waits for ever for more
    total = consumers * regs + other
    for name, value in (("softmax", regs), ("other", other)):
        if value % REG_STEP or not REG_MIN <= value <= REG_MAX:
            raise PlanError(
                f"{where}: registers.{name}={value}: setmaxnreg takes multiples of {REG_STEP} from {REG_MIN} to "
                f"{REG_MAX}"
            )
    if spec.registers.correction != other:
        raise PlanError(
            f"{where}: registers.correction={spec.registers.correction}: {arch.name} kernels have no correction warps; "
            f"use correction: {other}, as other"
        )
    if total > pool:
        raise PlanError(
            f"{where}: registers={{softmax: {regs}, other: {other}}}: needs {consumers}x{regs} + {other} = {total} per "
            f"thread of the {consumers + 1} warpgroups, which are launched with {pool} ({consumers + 1}x{start}) and "
            f"would wait for more for ever; use softmax <= {(pool - other) // consumers // REG_STEP * REG_STEP}"
        )
    first = WARPS_PER_GROUP * consumers

    def role(name: str, warp: int, warps: int, num: int) -> Role:
        way = "inc" if num > start else "dec" if num < start else "keep"
        return Role(name, tuple(range(warp, warp + warps)), num, way)

    groups = [role(f"consumer{i}", WARPS_PER_GROUP * i, WARPS_PER_GROUP, regs) for i in range(consumers)]
    return (*groups, role("load", first, 1, other), role("empty", first + 1, WARPS_PER_GROUP - 1, other))


def _launch_regs(threads: int, arch: Arch) -> int:
    """Registers per thread at launch, one CTA an SM: a multiple of 8."""
    return arch.registers // threads // REG_STEP * REG_STEP


def _operands(spec: KernelSpec) -> tuple[Operand, ...]:
    """q by the whole tile, o by the 16 rows of a warp, k and v by the block."""
    assert spec.tile_m and spec.tile_n
    shape = tiles.Shape(spec.head_dim_qk, spec.head_dim_v, 1, tile_m=spec.tile_m, tile_n=spec.tile_n)
    return tiles.make_operands(shape, spec.dtype, o_rows=WARP_ROWS)


def _smem(
    spec: KernelSpec, operands: tuple[Operand, ...], arch: Arch, where: str
) -> tuple[tuple[SmemBuffer, ...], int, int]:
    """(buffers, bytes, boxes of O that its buffer holds at a time): O leaves whole where there is room, else in pieces.

    A box is 32 or 64 columns of all rows; pieces have as many boxes each.
    """
    q, k, v, o = operands
    assert spec.q_stage and spec.kv_stage and spec.tile_m
    box_bytes = spec.tile_m * o.swizzle_bytes
    mbars = barriers.num_mbarriers(spec) * barriers.MBARRIER_BYTES
    sizes = [spec.q_stage * q.tile_bytes, spec.kv_stage * k.tile_bytes, spec.kv_stage * v.tile_bytes]
    free = arch.smem_bytes - sum(sizes) - mbars
    pieces = [n for n in range(1, o.num_boxes + 1) if o.num_boxes % n == 0 and n * box_bytes <= free]
    if not pieces:
        raise PlanError(
            f"{where}: needs {sum(sizes) + box_bytes + mbars} B SMEM (q {sizes[0]} + k {sizes[1]} + v {sizes[2]} + "
            f"{o.box_elems} columns of o {box_bytes} + mbarriers {mbars}), {arch.name} allows {arch.smem_bytes}; use a "
            f"smaller tile.n, kv_stage or q_stage"
        )
    out, end = [], 0
    for name, size, stages, note in (
        ("sQ", sizes[0], spec.q_stage, "Q tiles, all consumers' rows"),
        ("sK", sizes[1], spec.kv_stage, "ring of K blocks"),
        ("sV", sizes[2], spec.kv_stage, "ring of V blocks"),
        ("sO", pieces[-1] * box_bytes, 1, _note_of_o(pieces[-1], o)),
    ):
        out.append(SmemBuffer(name, end, size, stages, size // stages, note=note))
        end += size
    out.append(SmemBuffer("mbarriers", end, mbars, align_bytes=8, note="8 bytes each"))
    return tuple(out), end + mbars, pieces[-1]


def _note_of_o(piece_boxes: int, o: Operand) -> str:
    columns = "" if piece_boxes == o.num_boxes else f", {piece_boxes * o.box_elems} columns at a time"
    return f"output rows, each warp its own{columns}"


def _rings(spec: KernelSpec, operands: tuple[Operand, ...]) -> KvRing:
    """K and V have a ring each; offsets of V are from the start of K's ring."""
    _, k, v, _ = operands
    assert spec.kv_stage
    stages = range(spec.kv_stage)
    k_size = spec.kv_stage * k.tile_bytes
    own = tuple((s,) for s in stages)
    return KvRing(
        kind="separate",
        stages=spec.kv_stage,
        size_bytes=k_size + spec.kv_stage * v.tile_bytes,
        k_bytes=k.tile_bytes,
        v_bytes=v.tile_bytes,
        stage_stride_bytes=k.tile_bytes,
        odd_shift_bytes=0,
        k_offset_bytes=tuple(s * k.tile_bytes for s in stages),
        v_offset_bytes=tuple(k_size + s * v.tile_bytes for s in stages),
        k_waits=own,
        v_waits=own,
    )


def _tiles(spec: KernelSpec) -> Tiles:
    assert spec.tile_m and spec.tile_n
    return Tiles(
        tile_m=spec.tile_m,
        tile_n=spec.tile_n,
        rows_per_tile=spec.tile_m,
        s_slots=1,
        chunk_cols=spec.tile_n,
        num_chunks=1,
        p_first_cols=spec.tile_n,
        p_first_chunks=1,
        p_step_cols=0,
        mma_k=MMA_K,
        qk_k_steps=spec.head_dim_qk // MMA_K,
        pv_k_steps=spec.tile_n // MMA_K,
        pv_k_steps_first=spec.tile_n // MMA_K,
        correction_chunk_cols=0,
        epilogue_chunk_cols=MMA_K,
    )


def _named_barriers(spec: KernelSpec, consumers: int) -> tuple[NamedBarrier, ...]:
    """Ids from 1, one a consumer warpgroup: its turn."""
    if spec.warpgroup_order == "none":
        return ()
    roles = tuple(f"consumer{i}" for i in range(consumers))
    note = f"the warpgroup's turn ({spec.warpgroup_order}): the one before arrives, it syncs"
    return (NamedBarrier("turn", 1, consumers, 256, roles, note),)


def _products(spec: KernelSpec, operands: tuple[Operand, ...]) -> tuple[Umma, Umma]:
    """Descriptors of S = Q K^T and O += P V, 64 rows each; wgmma has no instruction descriptor (0)."""
    q, k, v, _ = operands
    assert spec.tile_n
    a = None if spec.q_in_registers else umma.wgmma_descriptor(q, "K", MMA_K)
    qk = Umma(
        "qk", GROUP_ROWS, spec.tile_n, MMA_K, spec.head_dim_qk // MMA_K, 0, a, umma.wgmma_descriptor(k, "K", MMA_K)
    )
    pv = Umma(
        "pv", GROUP_ROWS, spec.head_dim_v, MMA_K, spec.tile_n // MMA_K, 0, None, umma.wgmma_descriptor(v, "MN", MMA_K)
    )
    return qk, pv


def _model(spec: KernelSpec, arch: Arch) -> ModelBound:
    """Clocks of two 128-row tiles: of four warps of a sub-core, each with the softmax of 16 x 4 rows."""
    assert spec.tile_n
    softmax, correction, mma = ISSUE_SLOTS
    return model.bound(
        spec.head_dim_qk,
        spec.head_dim_v,
        spec.tile_n,
        spec.tile_n + 1,
        2 * softmax * spec.tile_n / 128,
        correction,
        mma,
        arch,
    )
