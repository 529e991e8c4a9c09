"""What asynchronous copies share: landing in shared memory, stores out of it, and reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..barriers import Mbarrier
from ..clocks import ASYNC, HB, TCGEN, Access
from ..findings import Fault
from ..machine import Cta
from ..ptx import Instr
from ..warp import Warp
from .common import WORDS
from .memory import smem_name

CACHE_HINTS = ("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "L2::evict_first", "L2::evict_last")


def group_progress(w: Warp) -> None:
    if w.wait is not None and w.wait.what == "bulk":
        w.cta.machine.wake([w])


def check_landing(
    target: Cta, local: int, size: int, known: NDArray[np.uint32], bar: Mbarrier, phase: int, at: tuple[Warp, Instr]
) -> None:
    machine, comps = target.machine, target.cluster.comps
    if bar.phase != phase:
        machine.report(
            "tma-phase",
            f"bytes arrive in phase {bar.phase} of {bar.where()}, the copy was issued in phase {phase}",
            at=at,
        )
    cells = WORDS[local // 4 : (local + size + 3) // 4]
    if target.smem.mbar_words[cells].any():
        machine.report("mbar-access", "an asynchronous copy overwrites an mbarrier object", at=at)
    access = Access(bar.comp, bar.phase + 1, known[HB], at[1].index, comps.nothing, known[HB], "proxy")
    machine.write(
        access, target.smem.history, cells, "smem write by an asynchronous copy", smem_name(target), comps, at
    )


def complete(cta: Cta, bar: Mbarrier, size: int, known: NDArray[np.uint32]) -> None:
    message = known.copy()
    message[TCGEN] = 0
    bar.complete_tx(size, message)
    cta.machine.settle(bar)


_DTYPES = {"f32": np.float32, "u32": np.uint32, "s32": np.int32, "f16": np.float16, "u64": np.uint64, "s64": np.int64}


def reduced(old: NDArray[np.uint8], new: NDArray[np.uint8], element: str, op: str) -> NDArray[np.uint8]:
    if element == "bf16":
        a, b = ((np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (old, new))
        bits = _combine(a, b, op).view(np.uint32)
        out = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return out.view(np.uint8)
    if element not in _DTYPES:
        raise Fault("tma-operand", f"reduction of {element} elements is not modelled")
    a, b = (np.ascontiguousarray(x).view(_DTYPES[element]) for x in (old, new))
    return _combine(a, b, op).view(np.uint8)


_REDUCTIONS: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}


def _combine(a: NDArray[np.generic], b: NDArray[np.generic], op: str) -> NDArray[np.generic]:
    return _REDUCTIONS[op](a, b)


def launch_store(
    w: Warp,
    ins: Instr,
    lanes: int,
    owner: Cta,
    local: int,
    size: int,
    fetch: Callable[[], NDArray[np.uint8]],
    put: Callable[[NDArray[np.uint8]], None],
) -> None:
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
        group_progress(w)

        def write() -> None:
            put(data)
            group.unwritten -= 1
            group_progress(w)

        machine.later("store", write, at)

    machine.later("store", read, at)
