"""mbarrier instructions, and the look-up of mbarriers for everything that arrives on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..barriers import MAX_COUNT, Mbarrier
from ..clocks import ASYNC, HB, TCGEN
from ..findings import Fault
from ..machine import BLOCKED, Cta, sleep
from ..program import Program
from ..ptx import Address, Instr, Reg, Sink, Unsupported
from ..warp import FULL, Warp
from .common import (  # fmt: skip
    Parts,
    address_scalar,
    first_lane,
    generic_shared,
    is_uniform,
    lanes_of,
    resolve_shared,
    scalar,
    set_predicate,
)

Run = Callable[[Warp, int], object]


def find_mbar(w: Warp, address: int, cluster: bool, what: str) -> tuple[Cta, Mbarrier]:
    """The mbarrier at a shared address; checks that its initialisation is ordered before this use."""
    cta, local = resolve_shared(w, address, cluster, what)
    bar = cta.mbars.get(local)
    if bar is None:
        raise Fault(
            "mbar-unknown", f"{what}: no mbarrier was initialised at shared address {local:#x} of CTA {cta.number}"
        )
    if bar.init_clock > w.vc[HB, bar.init_comp]:
        cta.machine.report("mbar-init-order", f"{what} of {bar.where()} is not ordered after its mbarrier.init")
    return cta, bar


def async_mbar(w: Warp, address: int, cluster: bool, what: str) -> tuple[Cta, Mbarrier]:
    """As find_mbar, for use by an asynchronous unit: the initialisation must be fenced for it too."""
    cta, bar = find_mbar(w, address, cluster, what)
    if bar.init_clock > w.vc[ASYNC, bar.init_comp] and bar.init_clock <= w.vc[HB, bar.init_comp]:
        cta.machine.report(
            "mbar-init-fence",
            f"{what} of {bar.where()}: no fence.mbarrier_init or fence.proxy.async after its mbarrier.init",
        )
    return cta, bar


def _space(parts: Parts) -> bool | None:
    """True for shared::cluster, False for shared::cta, None for generic."""
    space = parts.take("shared", "shared::cta", "shared::cluster")
    return None if space is None else space == "shared::cluster"


def mbar_address(
    program: Program, ins: Instr, op: object, cluster: bool | None
) -> Callable[[Warp, int], tuple[int, bool]]:
    """(shared-space address, may be remote) of an mbarrier operand."""
    address = address_scalar(program, ins, op)
    if cluster is not None:
        return lambda w, lane: (address(w, lane) & 0xFFFFFFFF, cluster)

    def generic(w: Warp, lane: int) -> tuple[int, bool]:
        shared = generic_shared(address(w, lane))
        if shared is None:
            raise Fault("mbar-unknown", f"{ins.opcode}: generic address {address(w, lane):#x} is not in shared memory")
        return shared, True

    return generic


def make_mbarrier(program: Program, ins: Instr) -> Run:
    parts = Parts(ins)
    op = parts.need(
        "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count"
    )
    expect = op in ("arrive", "arrive_drop") and bool(parts.take("expect_tx"))
    nocomplete = bool(parts.take("noComplete"))
    parity = bool(parts.take("parity"))
    relaxed = bool(parts.take("relaxed"))
    parts.take("release", "acquire")
    parts.take("cta", "cluster")
    space = _space(parts)
    parts.take("b64")
    parts.done()
    if op == "pending_count":
        raise Unsupported(ins, f"mbarrier.{op} is not modelled")
    if op in ("init", "inval"):
        return _init(program, ins, space, op == "inval")
    if op in ("test_wait", "try_wait"):
        return _wait(program, ins, space, parity, relaxed, op == "try_wait")
    return _arrive(program, ins, space, op, expect, relaxed, nocomplete)


def _init(program: Program, ins: Instr, space: bool | None, invalidate: bool) -> Run:
    address = mbar_address(program, ins, ins.operands[0], space)
    count = None if invalidate else scalar(program, ins, ins.operands[1])

    def run(w: Warp, mask: int) -> None:
        for lane in lanes_of(mask):
            at, remote = address(w, lane)
            cta, local = resolve_shared(w, at, remote, ins.opcode)
            cta.smem.check(local, 8, 8, ins.opcode)
            old = cta.mbars.pop(local, None)
            cta.smem.mbar_words[local // 4 : local // 4 + 2] = not invalidate
            if count is None:
                if old is None:
                    raise Fault("mbar-unknown", f"mbarrier.inval: no mbarrier at {local:#x}")
                continue
            if old is not None:
                cta.machine.report("mbar-init", f"mbarrier.init over a live {old.state()}")
            n = count(w, lane)
            if not 1 <= n <= MAX_COUNT:
                raise Fault("mbar-count", f"mbarrier.init with count {n}; 1 to {MAX_COUNT} are allowed")
            comps = cta.cluster.comps
            comp = old.comp if old is not None else comps.add(f"phase of mbarrier {local:#x}")
            cta.mbars[local] = Mbarrier(local, n, comp, comps, w.comp, w.clock())

    return run


def _arrive(
    program: Program, ins: Instr, space: bool | None, op: str, expect: bool, relaxed: bool, nocomplete: bool
) -> Run:
    operands = list(ins.operands)
    state = operands.pop(0) if not isinstance(operands[0], Address) else None
    address = mbar_address(program, ins, operands[0], space)
    same = is_uniform(operands[0])
    extra = scalar(program, ins, operands[1]) if len(operands) > 1 else None
    if (expect or op in ("expect_tx", "complete_tx")) and extra is None:
        raise Unsupported(ins, "transaction count missing")

    def run(w: Warp, mask: int) -> None:
        lanes = lanes_of(mask)
        message = None
        if op in ("arrive", "arrive_drop"):
            message = w.fence_vc.copy() if relaxed else w.release()
            if relaxed:
                message[TCGEN] = w.vc[TCGEN]
        groups: dict[tuple[int, bool], list[int]] = {}
        if same(w, mask):
            groups[address(w, lanes[0])] = lanes
        else:
            for lane in lanes:
                groups.setdefault(address(w, lane), []).append(lane)
        for (at, remote), members in groups.items():
            cta, bar = find_mbar(w, at, remote, ins.opcode)
            phase = bar.phase
            values = [extra(w, lane) for lane in members] if extra is not None else []
            if op == "complete_tx":
                bar.complete_tx(sum(values), w.release())
            elif expect or op == "expect_tx":
                bar.expect(sum(v - (1 << 32) if v >> 31 else v for v in values))
            if op in ("arrive", "arrive_drop"):
                count = len(members) if expect or extra is None else sum(values)
                bar.arrive(count, message)
                if op == "arrive_drop":
                    bar.expected -= count
                if nocomplete and bar.pending == 0:
                    raise Fault("mbar-nocomplete", f"arrive.noComplete would complete {bar.state()}")
            cta.machine.settle(bar)
            if isinstance(state, Reg):
                for lane in members:
                    w.words[state.offset // 4 + lane] = phase & 0xFFFFFFFF
                    w.words[state.offset // 4 + 32 + lane] = 0

    if state is not None and not isinstance(state, Reg | Sink):
        raise Unsupported(ins, f"state operand {state!r} is not a register")
    return run


def _wait(program: Program, ins: Instr, space: bool | None, parity: bool, relaxed: bool, blocking: bool) -> Run:
    dst = ins.operands[0]
    if not isinstance(dst, Reg) or dst.width != 1:
        raise Unsupported(ins, "a wait needs a predicate destination")
    address = mbar_address(program, ins, ins.operands[1], space)
    token = scalar(program, ins, ins.operands[2], 32 if parity else 64)
    same_bar, same_token = is_uniform(ins.operands[1]), is_uniform(ins.operands[2])

    def run(w: Warp, mask: int) -> object:
        machine = w.cta.machine
        lane = first_lane(mask)
        if not (same_bar(w, mask) and same_token(w, mask)):
            run_lanes(w, mask)
            return None
        at, remote = address(w, lane)
        cta, bar = find_mbar(w, at, remote, ins.opcode)
        value = token(w, lane)
        if parity and value > 1:
            raise Fault("mbar-parity", f"parity operand {value}; 0 or 1 are allowed ({bar.state()})")
        done = bar.passed(value) if parity else bar.phase != value
        if done and machine.spurious and blocking and machine.rng.random() < machine.spurious:
            set_predicate(w, dst, mask, 0)
            return None
        if not done and blocking:
            bar.waiters.append(w)
            want = f"parity {value}" if parity else f"phase {value}"
            sleep(w, "mbar", lambda: f"{want} of CTA {cta.number} {bar.state()}")
            return BLOCKED
        if done:
            _acquire(w, bar, relaxed)
        set_predicate(w, dst, mask, FULL if done else 0)
        return None

    def run_lanes(w: Warp, mask: int) -> None:
        for lane in lanes_of(mask):
            at, remote = address(w, lane)
            _, bar = find_mbar(w, at, remote, ins.opcode)
            value = token(w, lane)
            done = bar.passed(value) if parity else bar.phase != value
            if done:
                _acquire(w, bar, relaxed)
            set_predicate(w, dst, 1 << lane, FULL if done else 0)

    return run


def _acquire(w: Warp, bar: Mbarrier, relaxed: bool) -> None:
    if not relaxed:
        w.acquire(bar.completed)
        return
    np.maximum(w.vc[TCGEN], bar.completed[TCGEN], out=w.vc[TCGEN])
    pending = bar.completed if w.relaxed_vc is None else np.maximum(w.relaxed_vc, bar.completed)
    w.relaxed_vc = pending.copy()


TABLE: dict[str, Callable[[Program, Instr], Run | None]] = {"mbarrier": make_mbarrier}
