"""Happens-before checks over an access history, as compiled loops.

Each check returns 0, or ``code << 32 | cell`` of the worst problem: RACE before UNINIT before UNFENCED.
A second vector clock applies to the components marked in `second`: what is ordered but not in it is UNFENCED (a generic
write that no proxy fence covers, a tensor-memory access that no tcgen05.fence pair covers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

RACE = 1
UNINIT = 2
UNFENCED = 3
RACE_READ = 4  # a write that is not ordered after an earlier read
UNFENCED_READ = 5


def _jit(f: Callable[..., Any]) -> Callable[..., Any]:
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, nogil=True)(f)
    except RuntimeError:  # no folder to keep the compiled code in: compile in every process
        compiled = numba.njit(nogil=True)(f)
    return compiled


@_jit
def check_read(idx, w_comp, w_clock, vc, second, second_vc, r_clock, r_pc, clock, pc):  # type: ignore[no-untyped-def]
    """Check and record a read of cells `idx` by the component whose rows are r_clock, r_pc."""
    worst = 0
    for k in range(idx.size):
        cell = idx[k]
        comp = w_comp[cell]
        if comp == 0:
            if worst == 0 or worst >> 32 > UNINIT:
                worst = (UNINIT << 32) | cell
        else:
            at = w_clock[cell]
            if at > vc[comp]:
                if worst >> 32 != RACE:
                    worst = (RACE << 32) | cell
            elif second[comp] and at > second_vc[comp] and worst == 0:
                worst = (UNFENCED << 32) | cell
        r_clock[cell] = clock
        r_pc[cell] = pc
    return worst


@_jit
def check_write(idx, w_comp, w_clock, w_pc, r_clock, r_comps, vc, second, second_vc, comp, clock, pc):  # type: ignore[no-untyped-def]
    """Check a write of cells `idx` by component `comp`, and record it when there is no problem.

    r_clock: [rows, cells]; r_comps: component of each row.
    """
    worst = 0
    for k in range(idx.size):
        cell = idx[k]
        other = w_comp[cell]
        if other != 0:
            at = w_clock[cell]
            if at > vc[other]:
                if worst >> 32 != RACE:
                    worst = (RACE << 32) | cell
            elif second[other] and at > second_vc[other] and worst == 0:
                worst = (UNFENCED << 32) | cell
    for row in range(r_comps.size):
        c = r_comps[row]
        limit = vc[c]
        limit2 = second_vc[c] if second[c] else np.uint32(0xFFFFFFFF)
        line = r_clock[row]
        for k in range(idx.size):
            at = line[idx[k]]
            if at > limit:
                if worst == 0 or (worst >> 32 != RACE and worst >> 32 != RACE_READ):
                    worst = (RACE_READ << 32) | idx[k]
            elif at > limit2 and worst == 0:
                worst = (UNFENCED_READ << 32) | idx[k]
    if worst == 0:
        for k in range(idx.size):
            cell = idx[k]
            w_comp[cell] = comp
            w_clock[cell] = clock
            w_pc[cell] = pc
    return worst
