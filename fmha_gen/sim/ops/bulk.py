"""Asynchronous copies: TMA tensor copies, bulk copies, cp.async, and their groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..barriers import Mbarrier
from ..clocks import ASYNC, HB, TCGEN, Access
from ..codegen.builder import PARAM_WINDOW
from ..findings import Fault
from ..machine import BLOCKED, Cta, sleep
from ..program import Program
from ..ptx import Address, Imm, Instr, Unsupported
from ..tensormap import BoxPlan, TensorMap, TensorMapError
from ..warp import BulkGroup, Warp
from .common import (WORDS, Parts, Scalar, address_lanes, address_scalar, first_lane, generic_shared, in_window, lane_index,
                     lanes_of, resolve_shared, scalar)  # fmt: skip
from .memory import check_shared, smem_name
from .sync import async_mbar, find_mbar, mbar_address

Run = Callable[[Warp, int], object]
_CACHE = ("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "L2::evict_first", "L2::evict_last")


def make_cp(program: Program, ins: Instr) -> Run | None:
    parts = Parts(ins)
    reduce = bool(parts.take("reduce"))
    if not parts.take("async"):
        return None
    if not parts.take("bulk"):
        return _make_cp_async(program, ins, parts)
    if parts.take("prefetch"):
        return lambda w, mask: None
    if parts.take("commit_group"):
        parts.done()
        return _commit
    if parts.take("wait_group"):
        read = bool(parts.take("read"))
        parts.done()
        count = ins.operands[0]
        if not isinstance(count, Imm):
            raise Unsupported(ins, "wait_group needs an immediate")
        return lambda w, mask: _wait_group(w, mask, count.bits, read)
    if parts.take("tensor"):
        return _make_tensor(program, ins, parts, reduce)
    return _make_bulk(program, ins, parts, reduce)


# -- groups -------------------------------------------------------------------------------------------------------
def _commit(w: Warp, mask: int) -> None:
    group = w.bulk_open
    group.lanes |= mask
    w.bulk_groups.append(group)
    w.bulk_open = BulkGroup(group.sequence + 1, 0)


def _wait_group(w: Warp, mask: int, keep: int, read: bool) -> object:
    mine = [g for g in w.bulk_groups if g.lanes & mask]
    through = mine[: len(mine) - keep] if keep < len(mine) else []
    if any(g.unread or (not read and g.unwritten) for g in through):
        sleep(w, "bulk", lambda: f"bulk store groups: {sum(bool(g.unread) for g in mine)} not read, "
              f"{sum(bool(g.unwritten) for g in mine)} not written")  # fmt: skip
        return BLOCKED
    if through:
        last = through[-1].sequence
        w.vc[HB, w.comp_bulk] = max(int(w.vc[HB, w.comp_bulk]), last)
        w.bulk_groups = [g for g in w.bulk_groups if g.sequence > last or g.unwritten or g.unread]
    return None


def _group_progress(w: Warp) -> None:
    if w.wait is not None and w.wait.what == "bulk":
        w.cta.machine.wake([w])


# -- tensor copies ------------------------------------------------------------------------------------------------
def tensor_map(w: Warp, address: int, ins: Instr) -> TensorMap:
    machine = w.cta.machine
    if not in_window(address, PARAM_WINDOW) or address - PARAM_WINDOW not in machine.params.maps:
        raise Fault("tensor-map", f"{ins.opcode}: address {address:#x} is no tensor map of the launch parameters")
    return machine.params.maps[address - PARAM_WINDOW]


def _make_tensor(program: Program, ins: Instr, parts: Parts, reduce: bool) -> Run:
    rank = int(parts.need("1d", "2d", "3d", "4d", "5d")[0])
    parts.take("tile")
    while parts.take(*_CACHE):
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
                    raise Fault("tma-operand", f"{ins.opcode}: the mbarrier is in CTA rank {bar_cta.rank}, the data goes to rank {target.rank}")
                _, bar = async_mbar(w, (bar_cta.rank << 24) | bar_local, True, ins.opcode)
                plan = _plan(tmap, at, local, target, ins.opcode)
                _launch_load(w, ins, tmap, plan, target, local, bar_cta, bar)

    return run


def _launch_load(w: Warp, ins: Instr, tmap: TensorMap, plan: BoxPlan, target: Cta, local: int, bar_cta: Cta, bar: Mbarrier) -> None:
    known = w.release()
    phase = bar.phase
    machine = w.cta.machine
    at = (w, ins)
    what = f"TMA load of coordinates into shared {local:#x}"

    def land() -> None:
        data = _gather_box(machine, tmap, plan, what)
        _check_box_write(target, local, plan.box_bytes, known, bar, phase, at)
        if plan.unit_bytes == 16:
            target.smem.chunks[plan.smem >> 4] = np.ascontiguousarray(data).view(np.complex128)[:, 0]
        else:
            target.smem.bytes[plan.smem[:, None] + np.arange(plan.unit_bytes)] = data
        _complete(bar_cta, bar, plan.box_bytes, known)

    machine.later("tma", land, at)


def _gather_box(machine: object, tmap: TensorMap, plan: BoxPlan, what: str) -> NDArray[np.uint8]:
    from ..machine import Machine

    assert isinstance(machine, Machine)
    if plan.valid is None:
        return machine.memory.gather(plan.gmem, plan.unit_bytes, what)
    data = np.broadcast_to(tmap.fill_unit(plan.unit_bytes), (plan.gmem.size, plan.unit_bytes)).copy()
    data[plan.valid] = machine.memory.gather(plan.gmem[plan.valid], plan.unit_bytes, what)
    return data


def _check_box_write(target: Cta, local: int, size: int, known: NDArray[np.uint32], bar: Mbarrier, phase: int, at: tuple[Warp, Instr]) -> None:
    machine, comps = target.machine, target.cluster.comps
    if bar.phase != phase:
        machine.report("tma-phase", f"bytes arrive in phase {bar.phase} of {bar.where()}, the copy was issued in phase {phase}", at=at)
    cells = WORDS[local // 4 : (local + size + 3) // 4]
    if target.smem.mbar_words[cells].any():
        machine.report("mbar-access", "an asynchronous copy overwrites an mbarrier object", at=at)
    access = Access(bar.comp, bar.phase + 1, known[HB], at[1].index, comps.nothing, known[HB], "proxy")
    machine.write(access, target.smem.history, cells, "smem write by an asynchronous copy", smem_name(target), comps, at)


def _complete(cta: Cta, bar: Mbarrier, size: int, known: NDArray[np.uint32]) -> None:
    message = known.copy()
    message[TCGEN] = 0
    bar.complete_tx(size, message)
    cta.machine.settle(bar)


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
            _launch_store(w, ins, lanes, owner, local, plan.box_bytes, lambda p=plan: _box_bytes(owner, p),  # type: ignore[misc]
                          lambda data, p=plan, t=tmap: _store_box(machine, t, p, data, op))  # type: ignore[misc]

    return run


def _box_bytes(owner: Cta, plan: BoxPlan) -> NDArray[np.uint8]:
    if plan.unit_bytes == 16:
        return owner.smem.chunks[plan.smem >> 4].view(np.uint8).reshape(-1, 16)
    return owner.smem.bytes[plan.smem[:, None] + np.arange(plan.unit_bytes)]


def _store_box(machine: object, tmap: TensorMap, plan: BoxPlan, data: NDArray[np.uint8], op: str) -> None:
    from ..machine import Machine

    assert isinstance(machine, Machine)
    gmem = plan.gmem
    if plan.valid is not None:
        gmem, data = gmem[plan.valid], data[plan.valid]
    if op:
        data = _reduced(machine.memory.gather(gmem, plan.unit_bytes, "tensor reduction"), data, tmap.element, op)
    machine.memory.scatter(gmem, np.ascontiguousarray(data), "tensor store")


_DTYPES = {"f32": np.float32, "u32": np.uint32, "s32": np.int32, "f16": np.float16, "u64": np.uint64, "s64": np.int64}


def _reduced(old: NDArray[np.uint8], new: NDArray[np.uint8], element: str, op: str) -> NDArray[np.uint8]:
    if element == "bf16":
        a, b = ((np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (old, new))
        bits = _combine(a, b, op).view(np.uint32)
        out = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return out.view(np.uint8)
    if element not in _DTYPES:
        raise Fault("tma-operand", f"reduction of {element} elements is not modelled")
    a, b = (np.ascontiguousarray(x).view(_DTYPES[element]) for x in (old, new))
    return _combine(a, b, op).view(np.uint8)


def _combine(a: NDArray[np.generic], b: NDArray[np.generic], op: str) -> NDArray[np.generic]:
    return {"add": np.add, "min": np.minimum, "max": np.maximum}[op](a, b)  # type: ignore[no-any-return]


def _launch_store(w: Warp, ins: Instr, lanes: int, owner: Cta, local: int, size: int,
                  fetch: Callable[[], NDArray[np.uint8]], put: Callable[[NDArray[np.uint8]], None]) -> None:  # fmt: skip
    """A store from shared memory: read at one random time, written at a later one."""
    machine, comps = w.cta.machine, w.cta.cluster.comps
    group = w.bulk_open
    group.lanes |= lanes
    group.unread += 1
    group.unwritten += 1
    known = w.release()
    at = (w, ins)
    access = Access(w.comp_bulk, group.sequence, known[HB], ins.index, comps.generic, known[ASYNC], "proxy")

    def read() -> None:
        cells = WORDS[local // 4 : (local + size + 3) // 4]
        machine.read(access, owner.smem.history, cells, "smem read by a bulk store", smem_name(owner), comps, at)
        data = fetch()
        group.unread -= 1
        _group_progress(w)

        def write() -> None:
            put(data)
            group.unwritten -= 1
            _group_progress(w)

        machine.later("store", write, at)

    machine.later("store", read, at)


# -- bulk copies --------------------------------------------------------------------------------------------------
def _make_bulk(program: Program, ins: Instr, parts: Parts, reduce: bool) -> Run:
    spaces = [p for p in parts.left if p in ("global", "shared::cta", "shared::cluster")]
    for space in spaces:
        parts.take(space)
    while parts.take(*_CACHE):
        pass
    if len(spaces) != 2:
        raise Unsupported(ins, "a bulk copy names two state spaces")
    if spaces[0] == "global":
        parts.need("bulk_group")
        op, element = ("", "")
        if reduce:
            op, element = parts.need("add", "min", "max"), parts.left.pop()
        parts.done()
        return _bulk_store(program, ins, op, element)
    parts.need("mbarrier::complete_tx::bytes")
    parts.done()
    if reduce:
        raise Unsupported(ins, "bulk reductions into shared memory are not modelled")
    return _bulk_load(program, ins, spaces)


def _size_of(w: Warp, lane: int, size: Scalar, ins: Instr) -> int:
    n = size(w, lane)
    if n % 16 or not n:
        raise Fault("bulk-size", f"{ins.opcode}: {n} bytes; a positive multiple of 16 is needed")
    return n


def _bulk_load(program: Program, ins: Instr, spaces: list[str]) -> Run:
    """global or shared::cta -> shared, completing on an mbarrier."""
    dst, src = address_scalar(program, ins, ins.operands[0]), address_scalar(program, ins, ins.operands[1])
    size = scalar(program, ins, ins.operands[2])
    bar_address = mbar_address(program, ins, ins.operands[3], True)
    cluster = spaces[0] == "shared::cluster"

    def one(w: Warp, lane: int) -> None:
        machine, comps = w.cta.machine, w.cta.cluster.comps
        n = _size_of(w, lane, size, ins)
        target, local = resolve_shared(w, dst(w, lane) & 0xFFFFFFFF, cluster, ins.opcode)
        target.smem.check(local, n, 16, ins.opcode)
        bar_cta, bar_local = resolve_shared(w, bar_address(w, lane)[0], True, ins.opcode)
        _, bar = async_mbar(w, bar_cta.rank << 24 | bar_local, True, ins.opcode)
        known, phase, at = w.release(), bar.phase, (w, ins)
        source = src(w, lane)
        owner, from_local = (w.cta, 0)
        if spaces[1] != "global":
            owner, from_local = resolve_shared(w, source & 0xFFFFFFFF, False, ins.opcode)
            owner.smem.check(from_local, n, 16, ins.opcode)
        elif source % 16:
            raise Fault("global-misaligned", f"{ins.opcode}: source {source:#x} is not a multiple of 16")

        def land() -> None:
            if spaces[1] == "global":
                data = machine.memory.gather(np.array([source], np.int64), n, ins.opcode)[0]
            else:
                cells = WORDS[from_local // 4 : (from_local + n) // 4]
                access = Access(bar.comp, bar.phase + 1, known[HB], ins.index, comps.generic, known[ASYNC], "proxy")
                machine.read(access, owner.smem.history, cells, "smem read by a bulk copy", smem_name(owner), comps, at)
                data = owner.smem.bytes[from_local : from_local + n].copy()
            _check_box_write(target, local, n, known, bar, phase, at)
            target.smem.bytes[local : local + n] = data
            _complete(bar_cta, bar, n, known)

        machine.later("bulk", land, at)

    def run(w: Warp, mask: int) -> None:
        for lane in lanes_of(mask):
            one(w, lane)

    return run


def _bulk_store(program: Program, ins: Instr, op: str, element: str) -> Run:
    dst, src = address_scalar(program, ins, ins.operands[0]), address_scalar(program, ins, ins.operands[1])
    size = scalar(program, ins, ins.operands[2])

    def one(w: Warp, lane: int) -> None:
        memory = w.cta.machine.memory
        n = _size_of(w, lane, size, ins)
        owner, local = resolve_shared(w, src(w, lane) & 0xFFFFFFFF, False, ins.opcode)
        owner.smem.check(local, n, 16, ins.opcode)
        to = dst(w, lane)
        if to % 16:
            raise Fault("global-misaligned", f"{ins.opcode}: destination {to:#x} is not a multiple of 16")

        def put(data: NDArray[np.uint8]) -> None:
            where = np.array([to], np.int64)
            if op:
                old = memory.gather(where, n, ins.opcode)
                data = _reduced(old, data, element, op).reshape(1, n)
            memory.scatter(where, data, ins.opcode)

        _launch_store(w, ins, 1 << lane, owner, local, n, lambda: owner.smem.bytes[local : local + n].copy().reshape(1, n), put)

    def run(w: Warp, mask: int) -> None:
        for lane in lanes_of(mask):
            one(w, lane)

    return run


# -- cp.async -----------------------------------------------------------------------------------------------------
def _make_cp_async(program: Program, ins: Instr, parts: Parts) -> Run:
    if parts.take("mbarrier"):
        return _cp_mbarrier(program, ins, parts)
    if parts.take("commit_group"):
        parts.done()

        def commit(w: Warp, mask: int) -> None:
            w.cp_groups.append(w.cp_open)
            w.cp_open = []

        return commit
    if parts.take("wait_group", "wait_all"):
        parts.done()
        keep = ins.operands[0].bits if ins.operands and isinstance(ins.operands[0], Imm) else None
        return lambda w, mask: _cp_wait(w, keep)
    return _cp_copy(program, ins, parts)


def _cp_wait(w: Warp, keep: int | None) -> None:
    """Everything older than the newest `keep` groups is complete; None: everything."""
    if keep is None:
        w.cp_groups.append(w.cp_open)
        w.cp_open = []
        keep = 0
    done = w.cp_groups[: len(w.cp_groups) - keep] if keep < len(w.cp_groups) else []
    w.cp_groups = w.cp_groups[len(done) :]
    for group in done:
        _cp_finish(w, group)


def _cp_finish(w: Warp, copies: list[object]) -> None:
    for sequence, run in copies:  # type: ignore[misc]
        run()
        w.vc[HB, w.comp_cp] = max(int(w.vc[HB, w.comp_cp]), sequence)


def _cp_mbarrier(program: Program, ins: Instr, parts: Parts) -> Run:
    parts.need("arrive")
    noinc = bool(parts.take("noinc"))
    space = parts.take("shared", "shared::cta")
    parts.take("b64")
    parts.done()
    address = mbar_address(program, ins, ins.operands[0], False if space else None)

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        cta, bar = find_mbar(w, address(w, first_lane(mask))[0], False, ins.opcode)
        lanes = mask.bit_count()
        if not noinc:
            bar.pending += lanes
        pending = [c for g in w.cp_groups for c in g] + w.cp_open
        sequence = w.cp_sequence
        message = w.release()

        def done() -> None:
            for _, copy in pending:  # type: ignore[misc]
                copy()
            message[HB, w.comp_cp] = max(int(message[HB, w.comp_cp]), sequence)
            bar.arrive(lanes, message)
            machine.settle(bar)

        machine.later("cp", done, (w, ins))

    return run


def _cp_copy(program: Program, ins: Instr, parts: Parts) -> Run:
    """cp.async.{ca,cg}.shared.global [dst], [src], size{, src_size}: applied when waited for, at the latest."""
    parts.need("ca", "cg")
    parts.need("shared", "shared::cta")
    parts.need("global")
    while parts.take(*_CACHE):
        pass
    parts.done()
    dst, src = address_lanes(program, ins, ins.operands[0]), address_lanes(program, ins, ins.operands[1])
    size_op = ins.operands[2]
    if not isinstance(size_op, Imm) or size_op.bits not in (4, 8, 16):
        raise Unsupported(ins, "cp.async copies 4, 8 or 16 bytes")
    size = size_op.bits
    src_size = scalar(program, ins, ins.operands[3]) if len(ins.operands) > 3 else None

    def run(w: Warp, mask: int) -> None:
        machine, comps, cta = w.cta.machine, w.cta.cluster.comps, w.cta
        lanes = lane_index(mask)
        to = dst(w, lanes)
        if ((to >> 24) != cta.rank).any():
            raise Fault("smem-rank", f"{ins.opcode}: destination in another CTA")
        to = to & 0xFFFFFF
        check_shared(cta, to, size, ins.opcode)
        source = src(w, lanes)
        counts = np.array([src_size(w, k) for k in lanes.tolist()] if src_size else [size] * lanes.size)
        w.cp_sequence += 1
        known, sequence, at = w.release(), w.cp_sequence, (w, ins)
        state = {"done": False}

        def copy() -> None:
            if state["done"]:
                return
            state["done"] = True
            data = np.zeros((lanes.size, size), np.uint8)
            for n in np.unique(counts).tolist():
                if n:
                    pick = counts == n
                    data[pick, :n] = machine.memory.gather(source[pick], n, ins.opcode)
            cells = (to[:, None] // 4 + np.arange(size // 4)).reshape(-1)
            access = Access(w.comp_cp, sequence, known[HB], ins.index, comps.nothing, known[HB], "proxy")
            machine.write(access, cta.smem.history, cells, "smem write by cp.async", smem_name(cta), comps, at)
            cta.smem.bytes[to[:, None] + np.arange(size)] = data

        w.cp_open.append((sequence, copy))
        if machine.rng.random() < 0.5:
            machine.later("cp", copy, at)

    return run


TABLE = {"cp": make_cp}
__all__ = ["TABLE", "generic_shared"]
