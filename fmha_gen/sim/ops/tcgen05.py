"""tcgen05: allocation, loads and stores, waits and fences, MMA and commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..barriers import Mbarrier
from ..clocks import ASYNC, HB, TCGEN, Access
from ..findings import Fault
from ..machine import BLOCKED, Cluster, Cta, sleep
from ..memory import TMEM_COLS
from ..program import Program
from ..ptx import Address, Imm, Instr, Reg, Unsupported, Vector
from ..tmem_shapes import LdStMap, TmemShapeError, ldst_map
from ..umma import Footprint, Mma, TmemRect, UmmaError, decode_instr_desc, execute, footprint
from ..warp import PendingLoad, PendingStore, Warp
from .common import Parts, address_scalar, first_lane, lanes_of, predicate, resolve_shared, scalar
from .memory import smem_name, store_bytes
from .sync import async_mbar, mbar_address, need_full

Run = Callable[[Warp, int], object]


def tmem_name(cta: Cta) -> Callable[[int], str]:
    return lambda cell: f"tensor memory lanes {16 * (cell // TMEM_COLS)}..+15 column {cell % TMEM_COLS} of CTA {cta.number}"


@lru_cache(maxsize=4096)
def rect_cells(lane0: int, lanes: int, col0: int, cols: int) -> NDArray[np.int64]:
    """History cells (16-lane group x column) of a rectangle."""
    groups = np.arange(lane0 // 16, (lane0 + lanes + 15) // 16, dtype=np.int64)
    return (groups[:, None] * TMEM_COLS + np.arange(col0, col0 + cols, dtype=np.int64)).reshape(-1)


def make(program: Program, ins: Instr) -> Run | None:
    parts = Parts(ins)
    op = parts.take("alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "wait::ld", "wait::st", "mma", "commit",
                    "fence::before_thread_sync", "fence::after_thread_sync")  # fmt: skip
    if op is None:
        raise Unsupported(ins, f"{ins.opcode} is not modelled")
    builders: dict[str, Callable[[Program, Instr, Parts], Run]] = {
        "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "ld": _ld, "st": _st,
        "mma": _mma, "commit": _commit,
    }  # fmt: skip
    if op in builders:
        return builders[op](program, ins, parts)
    parts.take("sync")
    parts.take("aligned")
    parts.done()
    simple = {"wait::ld": _wait_ld, "wait::st": _wait_st,
              "fence::before_thread_sync": lambda w, mask: w.fence_before(),
              "fence::after_thread_sync": lambda w, mask: w.fence_after()}  # fmt: skip
    return simple[op]


# -- allocation ---------------------------------------------------------------------------------------------------
def _group(ins: Instr, parts: Parts) -> int:
    return int(parts.need("cta_group::1", "cta_group::2")[-1])


def _columns(value: int) -> int:
    if value not in (32, 64, 128, 256, 512):
        raise Fault("tmem-alloc", f"{value} columns: a power of two from 32 to 512 is needed")
    return value


def _alloc(program: Program, ins: Instr, parts: Parts) -> Run:
    group = _group(ins, parts)
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
    group = _group(ins, parts)
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
        access = Access(w.comp_st, w.st_sequence, w.vc[HB], ins.index, comps.nothing, w.tview, "tcgen05-fence")
        cells = rect_cells(0, 128, start & 0xFFFF, n)
        if (start & 0xFFFF) + n <= TMEM_COLS:
            cta.machine.write(access, cta.tmem.history, cells, "tmem deallocation", tmem_name(cta), comps)
        cta.tmem.release(start & 0xFFFF, n)
        waiters, cta.alloc_waiters = cta.alloc_waiters, []
        cta.machine.wake(waiters)
        return None

    return run


def _relinquish(program: Program, ins: Instr, parts: Parts) -> Run:
    _group(ins, parts)
    parts.take("sync")
    parts.take("aligned")
    parts.done()

    def run(w: Warp, mask: int) -> None:
        need_full(w, mask, ins.opcode)
        w.cta.tmem.may_allocate = False

    return run


# -- load and store -----------------------------------------------------------------------------------------------
def _shape(ins: Instr, parts: Parts, pack: str) -> tuple[LdStMap, int]:
    """(layout, operands that follow the address)."""
    parts.take("sync")
    parts.take("aligned")
    shape = parts.need("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    num = int(parts.need(*(f"x{1 << k}" for k in range(8)))[1:])
    packed = bool(parts.take(pack))
    parts.take("b32")
    parts.done()
    split = 0
    if shape == "16x32bx2":
        op = ins.operands[2 if ins.parts[1] == "ld" else 1]
        if not isinstance(op, Imm):
            raise Unsupported(ins, "the half split offset must be an immediate")
        split = op.bits
    try:
        return ldst_map(shape, num, packed, split), split
    except TmemShapeError as e:
        raise Unsupported(ins, str(e)) from None


def _place(w: Warp, address: int, layout: LdStMap, what: str) -> tuple[int, int]:
    """(lane, column) of a warp's access; checks quadrant, bounds and allocation."""
    lane, col = address >> 16, address & 0xFFFF
    quadrant = 32 * (w.index % 4)
    ok = lane == quadrant or (layout.lanes == 16 and lane == quadrant + 16)
    if not ok:
        raise Fault("tmem-quadrant", f"{what} at lane {lane}: warp {w.index} reaches lanes {quadrant}..{quadrant + 31} only")
    w.cta.tmem.check(lane, layout.lanes, col, layout.cols, what)
    return lane, col


def _registers(ins: Instr, op: object, count: int) -> list[Reg]:
    items = op.items if isinstance(op, Vector) else (op,)
    regs = [r for r in items if isinstance(r, Reg) and r.width == 32]
    if len(regs) != count or len(regs) != len(items):
        raise Unsupported(ins, f"{len(items)} registers; the shape needs {count} of 32 bits")
    return regs


def _row_index(regs: list[Reg]) -> NDArray[np.int64] | slice:
    rows = [r.offset // 128 for r in regs]
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows, np.int64)


def _layout_cells(layout: LdStMap, lane: int, col: int) -> NDArray[np.int64]:
    if layout.dense:
        return rect_cells(lane, layout.lanes, col, layout.cols)
    return _sparse_cells(layout, lane, col)


@lru_cache(maxsize=512)
def _sparse_cells(layout: LdStMap, lane: int, col: int) -> NDArray[np.int64]:
    cols = [layout.col, layout.col + 1] if layout.packed else [layout.col]
    cells = [((lane + layout.lane) // 16) * TMEM_COLS + col + c for c in cols]
    return np.unique(np.concatenate([c.reshape(-1) for c in cells]))


def _ld(program: Program, ins: Instr, parts: Parts) -> Run:
    if parts.take("red"):
        raise Unsupported(ins, "tcgen05.ld.red is not modelled")
    layout, _ = _shape(ins, parts, "pack::16b")
    regs = _registers(ins, ins.operands[0], layout.num_regs)
    rows = _row_index(regs)
    mask_of_regs = sum(1 << r.index for r in regs)
    address = address_scalar(program, ins, ins.operands[1])

    def run(w: Warp, mask: int) -> None:
        need_full(w, mask, ins.opcode)
        cta = w.cta
        machine, comps = cta.machine, cta.cluster.comps
        lane, col = _place(w, address(w, 0), layout, ins.opcode)
        w.ld_sequence += 1
        defer = machine.rng.random() < 0.5
        hb_row, tview = (w.vc[HB].copy(), w.tview.copy()) if defer else (w.vc[HB], w.tview)
        access = Access(w.comp_ld, w.ld_sequence, hb_row, ins.index, comps.tcgen, tview, "tcgen05-fence")

        def deliver() -> None:
            machine.read(access, cta.tmem.history, _layout_cells(layout, lane, col), "tmem read", tmem_name(cta), comps, (w, ins))
            cells = cta.tmem.cells
            if layout.dense:
                w.rows[rows] = cells[lane : lane + 32, col : col + layout.cols].T
            else:
                values = cells[lane + layout.lane, col + layout.col]
                if layout.packed:
                    values = values & np.uint32(0xFFFF) | cells[lane + layout.lane, col + layout.col + 1] << np.uint32(16)
                w.rows[rows] = values.T

        if not defer:
            deliver()
        w.loads.append(PendingLoad(mask_of_regs, w.ld_sequence, ins, deliver if defer else None))
        w.hazard |= mask_of_regs

    return run


def _wait_ld(w: Warp, mask: int) -> None:
    need_full(w, mask, "tcgen05.wait::ld")
    w.cta.machine.finish_loads(w, w.ld_sequence)


def _st(program: Program, ins: Instr, parts: Parts) -> Run:
    layout, split = _shape(ins, parts, "unpack::16b")
    source = ins.operands[2 if split or "16x32bx2" in ins.parts else 1]
    regs = _registers(ins, source, layout.num_regs)
    rows = _row_index(regs)
    address = address_scalar(program, ins, ins.operands[0])

    def run(w: Warp, mask: int) -> None:
        need_full(w, mask, ins.opcode)
        cta = w.cta
        machine, comps = cta.machine, cta.cluster.comps
        lane, col = _place(w, address(w, 0), layout, ins.opcode)
        w.st_sequence += 1
        values = w.rows[rows].T.copy()
        defer = machine.rng.random() < 0.5
        hb_row, tview = (w.vc[HB].copy(), w.tview.copy()) if defer else (w.vc[HB], w.tview)
        access = Access(w.comp_st, w.st_sequence, hb_row, ins.index, comps.tcgen, tview, "tcgen05-fence")

        def apply() -> None:
            machine.write(access, cta.tmem.history, _layout_cells(layout, lane, col), "tmem write", tmem_name(cta), comps, (w, ins))
            cells = cta.tmem.cells
            if layout.dense:
                cells[lane : lane + 32, col : col + layout.cols] = values
            elif layout.packed:
                cells[lane + layout.lane, col + layout.col] = values & np.uint32(0xFFFF)
                cells[lane + layout.lane, col + layout.col + 1] = values >> np.uint32(16)
            else:
                cells[lane + layout.lane, col + layout.col] = values

        if not defer:
            apply()
        w.stores.append(PendingStore(w.st_sequence, ins, apply if defer else None))

    return run


def _wait_st(w: Warp, mask: int) -> None:
    need_full(w, mask, "tcgen05.wait::st")
    for store in w.stores:
        if store.run is not None:
            store.run()
    w.stores = []
    w.learn_tcgen(w.comp_st, w.st_sequence)


# -- MMA ----------------------------------------------------------------------------------------------------------
class Queue:
    """Tensor-core work of one issuing warp: MMAs and commits, executed in issue order.

    The queue knows what its issuer knew at each issue. Its clock ticks at commits, which release it.
    """

    def __init__(self, cluster: Cluster, w: Warp) -> None:
        self.warp, self.cluster = w, cluster
        self.comp = cluster.comps.add(f"tensor-core queue of CTA {w.cta.number} warp {w.index}", tcgen=True)
        self.vc = cluster.comps.zero()
        self.tview = np.zeros(cluster.comps.capacity, np.uint32)
        self.clock = 1
        self.items: list[tuple[object, ...]] = []

    def learn(self) -> None:
        w = self.warp
        np.maximum(self.vc, w.release(), out=self.vc)
        np.maximum(self.tview, w.tview, out=self.tview)
        self.vc[HB, self.comp] = self.clock
        self.tview[self.comp] = self.clock

    def push_mma(self, mma: Mma, ins: Instr, ctas: list[Cta]) -> None:
        self.learn()
        access = Access(self.comp, self.clock, self.vc[HB].copy(), ins.index, self.cluster.comps.tcgen, self.tview.copy(), "tcgen05-fence")
        smem_access = Access(self.comp, self.clock, access.hb, ins.index, self.cluster.comps.generic, self.vc[ASYNC].copy(), "proxy")
        self.items.append((mma, ins, ctas, access, smem_access))
        if self.warp.cta.machine.rng.random() < 0.1:
            self.schedule(ins)

    def push_commit(self, bars: list[tuple[Cta, Mbarrier]], ins: Instr) -> None:
        self.learn()
        message = self.vc.copy()
        np.maximum(message[TCGEN], self.tview, out=message[TCGEN])
        self.clock += 1
        self.items.append((bars, message))
        self.schedule(ins)

    def schedule(self, ins: Instr) -> None:
        self.warp.cta.machine.later("mma", self.drain, (self.warp, ins))

    def drain(self) -> None:
        """Execute what is queued up to and including the first commit."""
        batch: list[tuple[object, ...]] = []
        while self.items:
            item = self.items.pop(0)
            if len(item) == 2:
                self.flush(batch)
                bars, message = item
                for cta, bar in bars:  # type: ignore[attr-defined]
                    bar.arrive(1, message)
                    cta.machine.settle(bar)
                return
            batch.append(item)
        self.flush(batch)

    def finish(self) -> None:
        """The cluster has ended: execute what no commit follows."""
        if self.items:
            ins = self.items[0][1]
            assert isinstance(ins, Instr)
            self.warp.cta.machine.report("mma-uncommitted", "the kernel ends without a tcgen05.commit after this MMA",
                                         "warning", (self.warp, ins))  # fmt: skip
        while self.items:
            self.drain()

    def flush(self, batch: list[tuple[object, ...]]) -> None:
        """Check and execute MMAs, in groups that share one instruction descriptor's CTAs."""
        start = 0
        machine = self.warp.cta.machine
        for k, item in enumerate(batch):
            mma, ins, ctas, access, smem_access = item
            assert isinstance(mma, Mma) and isinstance(ins, Instr)
            place = (self.warp, ins)
            try:
                touched = footprint(mma)
            except UmmaError as e:
                machine.event_instr = place
                raise Fault("mma-descriptor", str(e)) from None
            for cta in ctas:  # type: ignore[attr-defined]
                self.check(cta, touched, access, smem_access, place, mma)  # type: ignore[arg-type]
            if k + 1 == len(batch) or batch[k + 1][2] != ctas:
                group = [b[0] for b in batch[start : k + 1]]
                try:
                    execute(group, [c.smem.bytes for c in ctas], [c.tmem.cells for c in ctas])  # type: ignore
                except UmmaError as e:
                    machine.event_instr = place
                    raise Fault("mma-operand", str(e)) from None
                start = k + 1

    def check(self, cta: Cta, touched: Footprint, access: Access, smem_access: Access, at: tuple[Warp, Instr], mma: Mma) -> None:
        machine, comps = cta.machine, self.cluster.comps
        words = _words(touched)
        if words.size and int(words[-1]) >= cta.smem.words.size:
            machine.event_instr = at
            raise Fault("mma-operand", f"operands reach shared byte {int(words[-1]) * 4 + 3:#x}; the CTA has {cta.smem.size:#x}")
        machine.read(smem_access, cta.smem.history, words, "smem read by an MMA operand", smem_name(cta), comps, at)
        for rects, is_write in ((touched.tmem_reads, False), (touched.tmem_writes, True)):
            for rect in rects:
                what = "tmem write by an MMA" if is_write else "tmem read by an MMA"
                try:
                    cta.tmem.check(rect.lane0, rect.lanes, rect.col0, rect.cols, what)
                except Fault:
                    machine.event_instr = at
                    raise
                run = machine.write if is_write else machine.read
                run(access, cta.tmem.history, _rect(rect), what, tmem_name(cta), comps, at)


_word_cache: dict[int, tuple[Footprint, NDArray[np.int64]]] = {}


def _words(touched: Footprint) -> NDArray[np.int64]:
    found = _word_cache.get(id(touched))
    if found is None or found[0] is not touched:
        words = (touched.smem_chunks[:, None] * 4 + np.arange(4)).reshape(-1)
        if len(_word_cache) > 20000:
            _word_cache.clear()
        found = _word_cache[id(touched)] = (touched, words)
    return found[1]


def _rect(rect: TmemRect) -> NDArray[np.int64]:
    return rect_cells(rect.lane0, rect.lanes, rect.col0, rect.cols)


def queue_of(w: Warp) -> Queue:
    queues = w.cta.cluster.queues
    key = (w.cta.number, w.index)
    if key not in queues:
        queues[key] = Queue(w.cta.cluster, w)
    found = queues[key]
    assert isinstance(found, Queue)
    return found


def _pair_ctas(w: Warp, group: int, ins: Instr) -> list[Cta]:
    if group == 1:
        return [w.cta]
    if w.cta.rank % 2:
        raise Fault("mma-peer", f"{ins.opcode} issued by CTA rank {w.cta.rank}; only the even (leader) CTA of a pair issues")
    ctas = w.cta.cluster.ctas
    if w.cta.rank + 1 >= len(ctas):
        raise Fault("mma-peer", f"{ins.opcode}: the cluster has no peer CTA")
    return ctas[w.cta.rank : w.cta.rank + 2]


def _mma(program: Program, ins: Instr, parts: Parts) -> Run:
    for name in ("ws", "sp", "block_scale", "ashift"):
        if parts.take(name):
            raise Unsupported(ins, f"modifier .{name} is not modelled")
    group = _group(ins, parts)
    kind = parts.need("kind::f16", "kind::tf32", "kind::f8f6f4").split("::")[1]
    for buffer in ("a", "b"):
        parts.take(*(f"collector::{buffer}::{use}" for use in ("fill", "use", "lastuse", "discard")))
    parts.done()
    ops = ins.operands
    if len(ops) < 5 or any(isinstance(o, Vector) for o in ops[4:]):
        raise Unsupported(ins, "disable-output-lane vectors are not modelled")
    if len(ops) > 5:
        raise Unsupported(ins, "scale-input-d is not modelled")
    a_in_tmem = isinstance(ops[1], Address)
    d = address_scalar(program, ins, ops[0])
    a = address_scalar(program, ins, ops[1]) if a_in_tmem else scalar(program, ins, ops[1], 64)
    b, idesc = scalar(program, ins, ops[2], 64), scalar(program, ins, ops[3])
    enable = predicate(ins, ops[4])

    def run(w: Warp, mask: int) -> None:
        if mask & (mask - 1):
            w.cta.machine.report("mma-lanes", f"tcgen05.mma executed by lanes {mask:#010x}: one MMA per lane")
        ctas = _pair_ctas(w, group, ins)
        for lane in lanes_of(mask):
            try:
                desc = decode_instr_desc(idesc(w, lane), kind, group)
                mma = Mma(desc, d(w, lane), a(w, lane), b(w, lane), bool(enable(w) >> lane & 1), a_in_tmem)
                footprint(mma)
            except UmmaError as e:
                raise Fault("mma-descriptor", str(e)) from None
            queue_of(w).push_mma(mma, ins, ctas)

    return run


def _commit(program: Program, ins: Instr, parts: Parts) -> Run:
    _group(ins, parts)
    parts.need("mbarrier::arrive::one")
    space = parts.take("shared::cluster")
    multicast = bool(parts.take("multicast::cluster"))
    parts.take("b64")
    parts.done()
    address = mbar_address(program, ins, ins.operands[0], True if space else None)
    ranks = scalar(program, ins, ins.operands[1], 16) if multicast else None

    def run(w: Warp, mask: int) -> None:
        if mask & (mask - 1):
            w.cta.machine.report("mma-lanes", f"tcgen05.commit executed by lanes {mask:#010x}: one arrival per lane")
        for lane in lanes_of(mask):
            at, _ = address(w, lane)
            cta, local = resolve_shared(w, at, True, ins.opcode)
            targets = [cta.rank]
            if ranks is not None:
                chosen = ranks(w, lane)
                targets = [c.rank for c in w.cta.cluster.ctas if chosen >> c.rank & 1]
            bars = [async_mbar(w, rank << 24 | local, True, ins.opcode) for rank in targets]
            queue_of(w).push_commit(bars, ins)

    return run


TABLE = {"tcgen05": make}
