"""Fences, setmaxnreg, and instructions that do nothing here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..clocks import ASYNC, HB
from ..findings import Fault
from ..machine import BLOCKED, sleep
from ..program import Program
from ..ptx import Imm, Instr, Unsupported
from ..warp import Warp
from .common import Parts, need_full

Run = Callable[[Warp, int], object]


def fence_proxy_async(w: Warp) -> None:
    """Generic writes that the warp knows of become visible to the async proxy."""
    np.maximum(w.vc[ASYNC], w.vc[HB], out=w.vc[ASYNC])
    w.vc[HB, w.comp] += np.uint32(1)


def fence_memory(w: Warp) -> None:
    if w.relaxed_vc is not None:
        w.acquire(w.relaxed_vc)
        w.relaxed_vc = None
    w.fence_vc = w.release()


def make_fence(program: Program, ins: Instr) -> Run:
    parts = Parts(ins)
    if parts.take("mbarrier_init"):
        parts.take("release")
        parts.take("cluster")
        parts.done()

        def init(w: Warp, mask: int) -> None:
            np.maximum(w.vc[ASYNC], w.vc[HB], out=w.vc[ASYNC])
            fence_memory(w)

        return init
    if parts.take("proxy"):
        kind = parts.need("async", "alias", "tensormap::generic", "async::generic")
        parts.take("global", "shared::cta", "shared::cluster")
        parts.take("acquire", "release")
        parts.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        parts.take("cta", "cluster", "gpu", "sys")
        where = ins.parts[-1]
        parts.done()
        if kind == "async" and where != "global":
            return lambda w, mask: fence_proxy_async(w)
        if kind == "async":
            return lambda w, mask: None
        raise Unsupported(ins, f"fence.proxy.{kind} is not modelled")
    parts.take("sc", "acq_rel", "acquire", "release", "gl", "cta", "sys")
    parts.take("cta", "cluster", "gpu", "sys", "gl")
    parts.done()
    return lambda w, mask: fence_memory(w)


def make_setmaxnreg(program: Program, ins: Instr) -> Run:
    parts = Parts(ins)
    inc = parts.need("inc", "dec") == "inc"
    parts.take("sync")
    parts.take("aligned")
    parts.take("u32")
    parts.done()
    value = ins.operands[0]
    if not isinstance(value, Imm) or value.bits % 8 or not 24 <= value.bits <= 256:
        raise Unsupported(ins, f"register count {value!r} is not a multiple of 8 from 24 to 256")
    regs = value.bits

    def run(w: Warp, mask: int) -> object:
        cta = w.cta
        need_full(w, mask, ins.opcode)
        need = (regs - w.num_regs) * 32
        if (need < 0) if inc else (need > 0):
            raise Fault("setmaxnreg", f"setmaxnreg.{'inc' if inc else 'dec'} {regs} while the warp has {w.num_regs}")
        if need > cta.pool_free:
            cta.pool_waiters.append(w)
            total = cta.machine.registers * len(cta.warps) * 32
            sleep(w, "registers", lambda: f"{need} registers of the CTA's pool ({cta.pool_free} of {total} free)")
            return BLOCKED
        cta.pool_free -= need
        w.num_regs = regs
        w.setmaxnreg_history.append(regs)
        if need < 0 and cta.pool_waiters:
            waiters, cta.pool_waiters = cta.pool_waiters, []
            cta.machine.wake(waiters)
        return None

    return run


def make_nop(program: Program, ins: Instr) -> Run:
    return lambda w, mask: None


def make_griddepcontrol(program: Program, ins: Instr) -> Run:
    """Programmatic dependent launch: kernels run one after the other here, so both forms are no-ops."""
    parts = Parts(ins)
    parts.need("wait", "launch_dependents")
    parts.done()
    return lambda w, mask: None


TABLE: dict[str, Callable[[Program, Instr], Run]] = {
    "fence": make_fence,
    "membar": make_fence,
    "setmaxnreg": make_setmaxnreg,
    "nanosleep": make_nop,
    "griddepcontrol": make_griddepcontrol,
}
