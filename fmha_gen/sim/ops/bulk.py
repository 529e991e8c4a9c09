"""cp.async.bulk: dispatch of all asynchronous copies, bulk groups, and copies of plain byte ranges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..clocks import ASYNC, HB, Access
from ..findings import Fault
from ..machine import BLOCKED, sleep
from ..program import Program
from ..ptx import Imm, Instr, Unsupported
from ..warp import BulkGroup, Warp
from .common import WORDS, Parts, Scalar, address_scalar, lanes_of, resolve_shared, scalar
from .copies import CACHE_HINTS, check_landing, complete, launch_store, reduced
from .cp_async import make_cp_async
from .mbar import async_mbar, mbar_address
from .memory import smem_name
from .tensor_copies import make_tensor

Run = Callable[[Warp, int], object]


def make_cp(program: Program, ins: Instr) -> Run | None:
    parts = Parts(ins)
    reduce = bool(parts.take("reduce"))
    if not parts.take("async"):
        return None
    if not parts.take("bulk"):
        return make_cp_async(program, ins, parts)
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
        return make_tensor(program, ins, parts, reduce)
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


# -- bulk copies --------------------------------------------------------------------------------------------------
def _make_bulk(program: Program, ins: Instr, parts: Parts, reduce: bool) -> Run:
    spaces = [p for p in parts.left if p in ("global", "shared::cta", "shared::cluster")]
    for space in spaces:
        parts.take(space)
    while parts.take(*CACHE_HINTS):
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
            check_landing(target, local, n, known, bar, phase, at)
            target.smem.bytes[local : local + n] = data
            complete(bar_cta, bar, n, known)

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
                data = reduced(old, data, element, op).reshape(1, n)
            memory.scatter(where, data, ins.opcode)

        launch_store(
            w, ins, 1 << lane, owner, local, n, lambda: owner.smem.bytes[local : local + n].copy().reshape(1, n), put
        )

    def run(w: Warp, mask: int) -> None:
        for lane in lanes_of(mask):
            one(w, lane)

    return run


TABLE: dict[str, Callable[[Program, Instr], Run | None]] = {"cp": make_cp}
