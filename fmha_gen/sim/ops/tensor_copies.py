"""TMA: tiled tensor copies between global and shared memory, and reductions into global memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..barriers import Mbarrier
from ..codegen.layout import PARAM_WINDOW
from ..findings import Fault
from ..machine import Cta, Machine
from ..program import Program
from ..ptx import Address, Instr, Unsupported
from ..tensormap import BoxPlan, TensorMap, TensorMapError
from ..warp import Warp
from .common import Parts, Scalar, address_scalar, in_window, lanes_of, resolve_shared, scalar
from .copies import CACHE_HINTS, check_landing, complete, launch_store, reduced
from .mbar import async_mbar, mbar_address

Run = Callable[[Warp, int], object]


def tensor_map(w: Warp, address: int, ins: Instr) -> TensorMap:
    machine = w.cta.machine
    if not in_window(address, PARAM_WINDOW) or address - PARAM_WINDOW not in machine.params.maps:
        raise Fault("tensor-map", f"{ins.opcode}: address {address:#x} is no tensor map of the launch parameters")
    return machine.params.maps[address - PARAM_WINDOW]


def make_tensor(program: Program, ins: Instr, parts: Parts, reduce: bool) -> Run:
    rank = int(parts.need("1d", "2d", "3d", "4d", "5d")[0])
    parts.take("tile")
    while parts.take(*CACHE_HINTS):
        pass
    if parts.left[:1] == ["global"]:
        parts.need("global")
        parts.need("shared::cta")
        parts.need("bulk_group")
        op = parts.need("add", "min", "max") if reduce else ""
        parts.done()
        return _tensor_store(program, ins, rank, op)
    if reduce:
        raise Unsupported(ins, "a reduction needs a global destination")
    cluster = parts.need("shared::cta", "shared::cluster") == "shared::cluster"
    parts.need("global")
    parts.need("mbarrier::complete_tx::bytes")
    multicast = bool(parts.take("multicast::cluster"))
    pair = parts.take("cta_group::1", "cta_group::2") == "cta_group::2"
    parts.done()
    return _tensor_load(program, ins, rank, cluster, multicast, pair)


def _map_operand(program: Program, ins: Instr, op: object, rank: int) -> tuple[Scalar, list[Scalar]]:
    if not isinstance(op, Address) or op.coords is None or len(op.coords.items) != rank:
        raise Unsupported(ins, f"tensor operand {op!r} does not have {rank} coordinates")
    if op.extra is not None:
        raise Unsupported(ins, "im2col offsets are not modelled")
    return address_scalar(program, ins, op), [scalar(program, ins, c) for c in op.coords.items]


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _plan(tmap: TensorMap, coords: list[int], local: int, cta: Cta, what: str) -> BoxPlan:
    try:
        plan = tmap.box_plan(coords, local)
    except TensorMapError as e:
        raise Fault("tma-operand", str(e)) from None
    cta.smem.check(local, plan.box_bytes, 1, what)
    return plan


def _tensor_load(program: Program, ins: Instr, rank: int, cluster: bool, multicast: bool, pair: bool) -> Run:
    dst = address_scalar(program, ins, ins.operands[0])
    map_address, coords = _map_operand(program, ins, ins.operands[1], rank)
    bar_address = mbar_address(program, ins, ins.operands[2], True)
    mask_op = scalar(program, ins, ins.operands[3], 16) if multicast else None

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        if mask & (mask - 1):
            machine.report("tma-lanes", f"tensor load executed by lanes {mask:#010x}: one copy per lane")
        for lane in lanes_of(mask):
            tmap = tensor_map(w, map_address(w, lane), ins)
            at = [_signed(c(w, lane)) for c in coords]
            owner, local = resolve_shared(w, dst(w, lane) & 0xFFFFFFFF, cluster, ins.opcode)
            bar_at, _ = bar_address(w, lane)
            targets = [owner]
            if mask_op is not None:
                ranks = mask_op(w, lane)
                targets = [c for c in owner.cluster.ctas if ranks >> c.rank & 1]
            for target in targets:
                bar_cta, bar_local = resolve_shared(w, bar_at, True, ins.opcode)
                if multicast and not pair:
                    bar_cta = target
                elif bar_cta is not target and not pair:
                    raise Fault(
                        "tma-operand",
                        f"{ins.opcode}: the mbarrier is in CTA rank {bar_cta.rank}, the data goes to {target.rank}",
                    )
                _, bar = async_mbar(w, (bar_cta.rank << 24) | bar_local, True, ins.opcode)
                plan = _plan(tmap, at, local, target, ins.opcode)
                _launch_load(w, ins, tmap, plan, target, local, bar_cta, bar)

    return run


def _launch_load(
    w: Warp, ins: Instr, tmap: TensorMap, plan: BoxPlan, target: Cta, local: int, bar_cta: Cta, bar: Mbarrier
) -> None:
    known = w.release()
    phase = bar.phase
    machine = w.cta.machine
    at = (w, ins)
    what = f"TMA load of coordinates into shared {local:#x}"

    def land() -> None:
        data = _gather_box(machine, tmap, plan, what)
        check_landing(target, local, plan.box_bytes, known, bar, phase, at)
        if plan.unit_bytes == 16:
            target.smem.chunks[plan.smem >> 4] = np.ascontiguousarray(data).view(np.complex128)[:, 0]
        else:
            target.smem.bytes[plan.smem[:, None] + np.arange(plan.unit_bytes)] = data
        complete(bar_cta, bar, plan.box_bytes, known)

    machine.later("tma", land, at)


def _gather_box(machine: Machine, tmap: TensorMap, plan: BoxPlan, what: str) -> NDArray[np.uint8]:
    if plan.valid is None:
        return machine.memory.gather(plan.gmem, plan.unit_bytes, what)
    data = np.broadcast_to(tmap.fill_unit(plan.unit_bytes), (plan.gmem.size, plan.unit_bytes)).copy()
    data[plan.valid] = machine.memory.gather(plan.gmem[plan.valid], plan.unit_bytes, what)
    return data


def _tensor_store(program: Program, ins: Instr, rank: int, op: str) -> Run:
    map_address, coords = _map_operand(program, ins, ins.operands[0], rank)
    src = address_scalar(program, ins, ins.operands[1])

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        seen: dict[tuple[int, tuple[int, ...], int], int] = {}
        for lane in lanes_of(mask):
            key = map_address(w, lane), tuple(_signed(c(w, lane)) for c in coords), src(w, lane) & 0xFFFFFFFF
            seen[key] = seen.get(key, 0) | 1 << lane
        if mask & (mask - 1) and (op or len(seen) > 1):
            machine.report("tma-lanes", f"tensor store executed by lanes {mask:#010x}: one store per lane")
        for (where, at, source), lanes in seen.items():
            tmap = tensor_map(w, where, ins)
            owner, local = resolve_shared(w, source, False, ins.opcode)
            plan = _plan(tmap, list(at), local, owner, ins.opcode)
            launch_store(w, ins, lanes, owner, local, plan.box_bytes, *_store_steps(owner, tmap, plan, op))

    return run


def _store_steps(
    owner: Cta, tmap: TensorMap, plan: BoxPlan, op: str
) -> tuple[Callable[[], NDArray[np.uint8]], Callable[[NDArray[np.uint8]], None]]:
    """(read the box from shared memory, write it to global memory)."""
    return lambda: _box_bytes(owner, plan), lambda data: _store_box(owner.machine, tmap, plan, data, op)


def _box_bytes(owner: Cta, plan: BoxPlan) -> NDArray[np.uint8]:
    if plan.unit_bytes == 16:
        return owner.smem.chunks[plan.smem >> 4].view(np.uint8).reshape(-1, 16)
    return owner.smem.bytes[plan.smem[:, None] + np.arange(plan.unit_bytes)]


def _store_box(machine: Machine, tmap: TensorMap, plan: BoxPlan, data: NDArray[np.uint8], op: str) -> None:
    gmem = plan.gmem
    if plan.valid is not None:
        gmem, data = gmem[plan.valid], data[plan.valid]
    if op:
        data = reduced(machine.memory.gather(gmem, plan.unit_bytes, "tensor reduction"), data, tmap.element, op)
    machine.memory.scatter(gmem, np.ascontiguousarray(data), "tensor store")
