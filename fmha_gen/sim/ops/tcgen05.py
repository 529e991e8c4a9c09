"""tcgen05: dispatch, allocation, and fences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..clocks import HB, TCGEN, Access
from ..findings import Fault
from ..machine import BLOCKED, sleep
from ..memory import TMEM_COLS
from ..program import Program
from ..ptx import Instr, Unsupported
from ..warp import Warp
from .common import Parts, address_scalar, first_lane, need_full, scalar
from .memory import store_bytes
from .mma import cta_group, make_commit, make_mma
from .tmem_access import make_ld, make_st, rect_cells, tmem_name, wait_ld, wait_st

Run = Callable[[Warp, int], object]


def make(program: Program, ins: Instr) -> Run | None:
    parts = Parts(ins)
    op = parts.take("alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "wait::ld", "wait::st", "mma", "commit",
                    "fence::before_thread_sync", "fence::after_thread_sync")  # fmt: skip
    if op is None:
        raise Unsupported(ins, f"{ins.opcode} is not modelled")
    builders: dict[str, Callable[[Program, Instr, Parts], Run]] = {
        "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "ld": make_ld, "st": make_st,
        "mma": make_mma, "commit": make_commit,
    }  # fmt: skip
    if op in builders:
        return builders[op](program, ins, parts)
    parts.take("sync")
    parts.take("aligned")
    parts.done()
    simple = {"wait::ld": wait_ld, "wait::st": wait_st,
              "fence::before_thread_sync": lambda w, mask: w.fence_before(),
              "fence::after_thread_sync": lambda w, mask: w.fence_after()}  # fmt: skip
    return simple[op]


# -- allocation ---------------------------------------------------------------------------------------------------
def _columns(value: int) -> int:
    if value not in (32, 64, 128, 256, 512):
        raise Fault("tmem-alloc", f"{value} columns: a power of two from 32 to 512 is needed")
    return value


def _alloc(program: Program, ins: Instr, parts: Parts) -> Run:
    group = cta_group(parts)
    for name in ("sync", "aligned", "b32"):
        parts.take(name)
    shared = parts.take("shared::cta", "shared")
    parts.done()
    if not shared:
        raise Unsupported(ins, "tcgen05.alloc to a generic address is not modelled")
    address = address_scalar(program, ins, ins.operands[0])
    cols = scalar(program, ins, ins.operands[1])

    def run(w: Warp, mask: int) -> object:
        need_full(w, mask, ins.opcode)
        lane = first_lane(mask)
        n = _columns(cols(w, lane))
        tmem = w.cta.tmem
        if not tmem.may_allocate:
            raise Fault("tmem-alloc", "allocation after relinquish_alloc_permit")
        if group == 2:
            met = _meet_peer(w, "alloc")
            if met is None:
                return BLOCKED
        start = tmem.allocate(n)
        if start is None:
            w.cta.alloc_waiters.append(w)
            sleep(w, "tmem", lambda: f"{n} free tensor-memory columns (allocated: {sorted(tmem.blocks.items())})")
            return BLOCKED
        at = np.array([address(w, lane)], np.int64)
        store_bytes(w, "shared::cta", at, np.array([[start]], np.uint32).view(np.uint8), ins.opcode)
        return None

    return run


def _meet_peer(w: Warp, what: str) -> bool | None:
    """cta_group::2 allocation needs a warp of the peer CTA: both run it together. None: not there yet."""
    cluster = w.cta.cluster
    pair = w.cta.rank // 2
    meetings = cluster.__dict__.setdefault("meetings", {})
    arrived = meetings.setdefault((what, pair), {})
    if w in arrived.get("released", ()):
        arrived["released"].discard(w)
        return True
    waiting = arrived.setdefault("waiting", [])
    if waiting and waiting[0].cta is not w.cta:
        peer = waiting.pop(0)
        arrived.setdefault("released", set()).add(peer)
        message = w.release()
        other = peer.release()
        peer.acquire(message)
        w.acquire(other)
        peer.fence_after()
        w.cta.machine.wake([peer])
        return True
    waiting.append(w)
    sleep(w, "pair", lambda: f"a warp of the peer CTA at tcgen05.{what}.cta_group::2")
    return None


def _dealloc(program: Program, ins: Instr, parts: Parts) -> Run:
    group = cta_group(parts)
    for name in ("sync", "aligned", "b32"):
        parts.take(name)
    parts.done()
    address, cols = scalar(program, ins, ins.operands[0]), scalar(program, ins, ins.operands[1])

    def run(w: Warp, mask: int) -> object:
        need_full(w, mask, ins.opcode)
        if group == 2 and _meet_peer(w, "dealloc") is None:
            return BLOCKED
        cta, lane = w.cta, first_lane(mask)
        n, start = _columns(cols(w, lane)), address(w, lane)
        comps = cta.cluster.comps
        # Deallocation is synchronous: it needs the ::before fences of the others, but none ::after.
        released = np.maximum(w.vc[TCGEN], w.tview)
        access = Access(w.comp_st, w.st_sequence, w.vc[HB], ins.index, comps.tcgen, released, "tcgen05-fence")
        cells = rect_cells(0, 128, start & 0xFFFF, n)
        if (start & 0xFFFF) + n <= TMEM_COLS:
            cta.machine.write(access, cta.tmem.history, cells, "tmem deallocation", tmem_name(cta), comps)
        cta.tmem.release(start & 0xFFFF, n)
        waiters, cta.alloc_waiters = cta.alloc_waiters, []
        cta.machine.wake(waiters)
        return None

    return run


def _relinquish(program: Program, ins: Instr, parts: Parts) -> Run:
    cta_group(parts)
    parts.take("sync")
    parts.take("aligned")
    parts.done()

    def run(w: Warp, mask: int) -> None:
        need_full(w, mask, ins.opcode)
        w.cta.tmem.may_allocate = False

    return run


TABLE: dict[str, Callable[[Program, Instr], Run | None]] = {"tcgen05": make}
