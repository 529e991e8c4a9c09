"""cp.async: per-thread asynchronous copies, their groups, and their mbarrier arrivals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..clocks import HB, Access
from ..findings import Fault
from ..program import Program
from ..ptx import Imm, Instr, Unsupported
from ..warp import CpAsync, Warp
from .common import Parts, address_lanes, first_lane, lane_index, scalar
from .copies import CACHE_HINTS
from .mbar import find_mbar, mbar_address
from .memory import check_shared, smem_name

Run = Callable[[Warp, int], object]


def make_cp_async(program: Program, ins: Instr, parts: Parts) -> Run:
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


def _cp_finish(w: Warp, copies: list[CpAsync]) -> None:
    for item in copies:
        item.run()
        w.vc[HB, w.comp_cp] = max(int(w.vc[HB, w.comp_cp]), item.sequence)


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
            for item in pending:
                item.run()
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
    while parts.take(*CACHE_HINTS):
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

        w.cp_open.append(CpAsync(sequence, copy))
        if machine.rng.random() < 0.5:
            machine.later("cp", copy, at)

    return run
