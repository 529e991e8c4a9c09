"""tcgen05.mma and tcgen05.commit: one queue per issuing warp, executed in issue order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..barriers import Mbarrier
from ..clocks import ASYNC, HB, TCGEN, Access
from ..findings import Fault
from ..machine import Cluster, Cta
from ..program import Program
from ..ptx import Address, Instr, Unsupported, Vector
from ..umma import Footprint, Mma, TmemRect, UmmaError, decode_instr_desc, execute, footprint
from ..warp import Warp
from .common import Parts, address_scalar, lanes_of, predicate, resolve_shared, scalar
from .mbar import async_mbar, mbar_address
from .memory import smem_name
from .tmem_access import rect_cells, tmem_name

Run = Callable[[Warp, int], object]


def cta_group(parts: Parts) -> int:
    return int(parts.need("cta_group::1", "cta_group::2")[-1])


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
        access = Access(
            self.comp,
            self.clock,
            self.vc[HB].copy(),
            ins.index,
            self.cluster.comps.tcgen,
            self.tview.copy(),
            "tcgen05-fence",
        )
        smem_access = Access(
            self.comp, self.clock, access.hb, ins.index, self.cluster.comps.generic, self.vc[ASYNC].copy(), "proxy"
        )
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

    def check(
        self, cta: Cta, touched: Footprint, access: Access, smem_access: Access, at: tuple[Warp, Instr], mma: Mma
    ) -> None:
        machine, comps = cta.machine, self.cluster.comps
        words = _words(touched)
        if words.size and int(words[-1]) >= cta.smem.words.size:
            machine.event_instr = at
            raise Fault(
                "mma-operand", f"operands reach shared byte {int(words[-1]) * 4 + 3:#x}; the CTA has {cta.smem.size:#x}"
            )
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
        raise Fault(
            "mma-peer", f"{ins.opcode} issued by CTA rank {w.cta.rank}; only the even (leader) CTA of a pair issues"
        )
    ctas = w.cta.cluster.ctas
    if w.cta.rank + 1 >= len(ctas):
        raise Fault("mma-peer", f"{ins.opcode}: the cluster has no peer CTA")
    return ctas[w.cta.rank : w.cta.rank + 2]


def make_mma(program: Program, ins: Instr, parts: Parts) -> Run:
    for name in ("ws", "sp", "block_scale", "ashift"):
        if parts.take(name):
            raise Unsupported(ins, f"modifier .{name} is not modelled")
    group = cta_group(parts)
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


def make_commit(program: Program, ins: Instr, parts: Parts) -> Run:
    cta_group(parts)
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
