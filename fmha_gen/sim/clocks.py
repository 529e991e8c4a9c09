"""Vector clocks of a cluster: components, what a warp knows, and the check of every access against it.

A clock state is uint32 [3, components]: row HB is happens-before; row ASYNC holds the generic-proxy writes that a proxy
fence has made visible to the async proxy; row TCGEN holds the tensor-memory accesses that a
tcgen05.fence::before_thread_sync has released. Synchronisation passes all three on; a tcgen05.fence::after_thread_sync
moves row TCGEN into the warp's own tensor-memory view.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from . import hb
from .memory import History

HB, ASYNC, TCGEN = 0, 1, 2
Clock = NDArray[np.uint32]
_NO_SECOND = np.zeros(0, np.uint32)


class Components:
    """Names and kinds of the components of one cluster; index 0 is unused."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.names = ["never"]
        self.generic = np.zeros(capacity, np.bool_)  # writes through the generic proxy
        self.tcgen = np.zeros(capacity, np.bool_)  # tensor-memory accesses
        self.nothing = np.zeros(capacity, np.bool_)

    def add(self, name: str, generic: bool = False, tcgen: bool = False) -> int:
        index = len(self.names)
        if index >= self.capacity:
            raise RuntimeError(f"more than {self.capacity} clock components")
        self.names.append(name)
        self.generic[index] = generic
        self.tcgen[index] = tcgen
        return index

    def zero(self) -> Clock:
        return np.zeros((3, self.capacity), np.uint32)


def join(into: Clock, other: Clock) -> None:
    np.maximum(into, other, out=into)


Report = Callable[[str, str], None]


class Access:
    """An access in the happens-before check: who, at which clock, with which knowledge, from which instruction."""

    __slots__ = ("clock", "comp", "hb", "pc", "second", "second_kind", "second_vc")

    def __init__(
        self,
        comp: int,
        clock: int,
        hb_row: Clock,
        pc: int,
        second: NDArray[np.bool_],
        second_vc: Clock,
        second_kind: str,
    ) -> None:
        self.comp, self.clock, self.hb, self.pc = comp, clock, hb_row, pc
        self.second, self.second_vc, self.second_kind = second, second_vc, second_kind

    def read(self, history: History, cells: NDArray[np.int64]) -> tuple[int, int]:
        """Check and record; (code, cell), code 0 when fine."""
        row = history.row(self.comp)
        out = hb.check_read(cells, history.w_comp, history.w_clock, self.hb, self.second, self.second_vc,
                            history.r_clock[row], history.r_pc[row], self.clock, self.pc)  # fmt: skip
        return (out >> 32, out & 0xFFFFFFFF) if out else (0, 0)

    def write(self, history: History, cells: NDArray[np.int64]) -> tuple[int, int]:
        rows = len(history.r_comps)
        out = hb.check_write(cells, history.w_comp, history.w_clock, history.w_pc, history.r_clock[:rows],
                             np.asarray(history.r_comps, np.int64), self.hb, self.second, self.second_vc,
                             self.comp, self.clock, self.pc)  # fmt: skip
        return (out >> 32, out & 0xFFFFFFFF) if out else (0, 0)
