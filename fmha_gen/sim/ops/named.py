"""bar, barrier, bar.warp and barrier.cluster."""

from __future__ import annotations

from collections.abc import Callable

from ..barriers import NamedBarrier
from ..findings import Fault
from ..machine import BLOCKED, SLEEP, sleep
from ..program import Program
from ..ptx import Instr, Reg, Unsupported
from ..warp import FULL, Warp
from .common import Parts, first_lane, lane_index, need_full, predicate, scalar, set_predicate

Run = Callable[[Warp, int], object]


def make_bar(program: Program, ins: Instr) -> Run | None:
    parts = Parts(ins)
    if parts.take("cluster"):
        return make_cluster_barrier(ins, parts)
    if parts.take("warp"):
        return make_warp_barrier(program, ins, parts)
    parts.take("cta")
    op = parts.need("sync", "arrive", "red")
    aligned = bool(parts.take("aligned")) or ins.parts[0] == "bar"
    reduce = parts.need("popc", "and", "or") if op == "red" else ""
    parts.take("u32", "pred")
    parts.done()
    operands = list(ins.operands)
    put = _reduction(ins, reduce, operands.pop(0)) if reduce else None
    source = predicate(ins, operands.pop()) if reduce else None
    number = scalar(program, ins, operands[0])
    count = scalar(program, ins, operands[1]) if len(operands) > 1 else None
    if op == "arrive" and count is None:
        raise Unsupported(ins, "arrive needs a thread count")

    def run(w: Warp, mask: int) -> object:
        cta = w.cta
        if aligned:
            need_full(w, mask, ins.opcode)
        lane = first_lane(mask)
        n = number(w, lane)
        if n > 15:
            raise Fault("bar-count", f"named barrier {n}: a CTA has 16")
        bar = cta.named.setdefault(n, NamedBarrier(n))
        whole = mask | w.exited == FULL
        threads = 32 if whole else mask.bit_count()
        expected = count(w, lane) if count is not None else -(-cta.machine.threads // 32) * 32
        if source is not None and put is not None:
            bar.votes.append((w, mask, source(w), put))
        if bar.join(w, threads, expected, op != "arrive"):
            bar.reduce()
            woken = bar.complete()
            cta.machine.wake([x for x in woken if x is not w])
            return None
        if op == "arrive":
            return None
        sleep(w, "bar", bar.state)
        return SLEEP

    return run


def _reduction(ins: Instr, op: str, dst: object) -> Callable[[Warp, int, list[tuple[int, int]]], None]:
    """Writer of bar.red's result: gets the warp, its lanes, and (lanes, predicate) of every warp."""
    if not isinstance(dst, Reg) or dst.width != (32 if op == "popc" else 1):
        raise Unsupported(ins, f"destination {dst!r} does not fit the reduction")

    def put(w: Warp, mask: int, votes: list[tuple[int, int]]) -> None:
        if op == "popc":
            w.words[dst.offset // 4 : dst.offset // 4 + 32][lane_index(mask)] = sum(
                (v & m).bit_count() for m, v in votes
            )
        else:
            pick = all(v & m == m for m, v in votes) if op == "and" else any(v & m for m, v in votes)
            set_predicate(w, dst, mask, FULL if pick else 0)

    return put


def make_warp_barrier(program: Program, ins: Instr, parts: Parts) -> Run:
    parts.need("sync")
    parts.done()
    members = scalar(program, ins, ins.operands[0])

    def run(w: Warp, mask: int) -> None:
        want = members(w, first_lane(mask)) & ~w.exited
        if want != mask:
            raise Fault("partial-warp", f"bar.warp.sync of lanes {want:#010x} executed by lanes {mask:#010x}")

    return run


def make_cluster_barrier(ins: Instr, parts: Parts) -> Run:
    op = parts.need("arrive", "wait")
    relaxed = parts.take("relaxed")
    parts.take("release", "acquire")
    aligned = parts.take("aligned")
    parts.done()

    def arrive(w: Warp, mask: int) -> None:
        need_full(w, mask, ins.opcode)
        bar = w.cta.cluster.barrier
        bar.arrive(w, w.fence_vc if relaxed else w.release())
        w.cta.machine.wake(bar.settle(w.cta.cluster.live_warps()))

    def wait(w: Warp, mask: int) -> object:
        need_full(w, mask, ins.opcode)
        bar = w.cta.cluster.barrier
        if w.cluster_phase is None:
            raise Fault("cluster-barrier", f"wait without an arrive; {bar.state()}")
        if bar.phase == w.cluster_phase:
            bar.waiting.append(w)
            sleep(w, "cluster barrier", bar.state)
            return BLOCKED
        w.cluster_phase = None
        assert bar.completed is not None
        w.acquire(bar.completed)
        return None

    del aligned
    return arrive if op == "arrive" else wait


TABLE: dict[str, Callable[[Program, Instr], Run | None]] = {"bar": make_bar, "barrier": make_bar}
