"""One warp: register file, SIMT stack, knowledge (vector clocks), and its outstanding asynchronous work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .clocks import HB, TCGEN, Components
from .codegen.layout import PARAM_POINTER, SHARED_BASE, SPECIAL_OFFSETS
from .ptx import Instr

if TYPE_CHECKING:
    from .machine import Cta
    from .program import Program

FULL = 0xFFFFFFFF


@dataclass(eq=False, slots=True)
class PendingLoad:
    """A tcgen05.ld whose completion this warp has not observed. regs: destination bit set; run: delivers, or None."""

    regs: int
    sequence: int
    instr: Instr
    run: Callable[[], None] | None


@dataclass(eq=False, slots=True)
class PendingStore:
    """A tcgen05.st whose completion this warp has not observed."""

    sequence: int
    instr: Instr
    run: Callable[[], None] | None


@dataclass(eq=False, slots=True)
class BulkGroup:
    """A committed group of bulk stores. lanes: threads that issued it."""

    sequence: int
    lanes: int
    unread: int = 0
    unwritten: int = 0


@dataclass(eq=False, slots=True)
class CpAsync:
    """One cp.async of a warp. run: copies, once."""

    sequence: int
    run: Callable[[], None]


@dataclass(eq=False, slots=True)
class Wait:
    """Why a warp sleeps; detail: for the deadlock report. The waker clears it."""

    what: str
    detail: Callable[[], str]


class Warp:
    """A warp of a CTA. `index`: warp id in the CTA. Lane masks are 32-bit ints."""

    def __init__(self, cta: Cta, index: int, lanes: int, program: Program, comps: Components, role: str) -> None:
        self.cta, self.index, self.role = cta, index, role
        self.program = program
        backing = np.zeros(program.file_bytes + 128, np.uint8)
        start = -backing.ctypes.data % 128
        self.file = backing[start : start + program.file_bytes]
        self.base = self.file.ctypes.data
        self.words = self.file.view(np.uint32)
        self.rows = self.file[: program.file_bytes // 128 * 128].view(np.uint32).reshape(-1, 32)
        self.halfs = self.file.view(np.uint16)
        self.active = (1 << lanes) - 1
        self.exited = FULL & ~self.active
        self.pc = 0
        self.reconverge = -1
        self.stack: list[tuple[int, int, int]] = []  # (pc, lanes, reconvergence pc); the side that runs is not on it
        self.swapped = False  # the running side was taken because its sibling waits
        self.counts = [0] * (len(program.steps) + 1)
        self.taken = [0] * (len(program.steps) + 1)  # branches: times some lane took it
        self.falls = [0] * (len(program.steps) + 1)  # ... and times some lane did not
        self.executed = 0
        self.stall = 0.0  # chance to be taken away for a while instead of running
        self.done = False
        self.wait: Wait | None = None
        self.instr: Instr = program.kernel.instrs[0]
        self.step_pc = 0
        # knowledge
        prefix = self.who()
        self.comp = comps.add(prefix, generic=True)
        self.comp_ld = comps.add(f"{prefix} tcgen05.ld", tcgen=True)
        self.comp_st = comps.add(f"{prefix} tcgen05.st", tcgen=True)
        self.comp_bulk = comps.add(f"{prefix} bulk stores")
        self.comp_cp = comps.add(f"{prefix} cp.async", generic=True)
        self.vc = comps.zero()
        self.vc[HB, self.comp] = 1
        self.tview = np.zeros(comps.capacity, np.uint32)
        self.fence_vc = self.vc.copy()
        self.relaxed_vc: NDArray[np.uint32] | None = None
        # outstanding work
        self.hazard = 0
        self.loads: list[PendingLoad] = []
        self.ld_sequence = 0
        self.stores: list[PendingStore] = []
        self.st_sequence = 0
        self.bulk_open = BulkGroup(1, 0)
        self.bulk_groups: list[BulkGroup] = []
        self.cp_open: list[CpAsync] = []
        self.cp_groups: list[list[CpAsync]] = []
        self.cp_sequence = 0
        self.cluster_phase: int | None = None
        self.num_regs = 0
        self.setmaxnreg_history: list[int] = []

    # -- knowledge ------------------------------------------------------------------------------------------------
    def release(self) -> NDArray[np.uint32]:
        """Clock message of a release or of issuing asynchronous work; later accesses of the warp get a new clock."""
        message = self.vc.copy()
        self.vc[HB, self.comp] += np.uint32(1)
        return message

    def acquire(self, message: NDArray[np.uint32]) -> None:
        np.maximum(self.vc, message, out=self.vc)

    def clock(self) -> int:
        return int(self.vc[HB, self.comp])

    def learn_tcgen(self, comp: int, sequence: int) -> None:
        """The warp has observed completion of its own tensor-memory accesses up to `sequence`."""
        self.vc[HB, comp] = max(int(self.vc[HB, comp]), sequence)
        self.tview[comp] = max(int(self.tview[comp]), sequence)

    def fence_before(self) -> None:
        np.maximum(self.vc[TCGEN], self.tview, out=self.vc[TCGEN])

    def fence_after(self) -> None:
        np.maximum(self.tview, self.vc[TCGEN], out=self.tview)

    # -- registers ------------------------------------------------------------------------------------------------
    def set_header(self, param_pointer: int, shared_base: int, specials: dict[str, int | NDArray[np.uint32]]) -> None:
        self.file[PARAM_POINTER : PARAM_POINTER + 8].view(np.uint64)[0] = param_pointer
        self.words[SHARED_BASE // 4] = shared_base
        for name, value in specials.items():
            at = SPECIAL_OFFSETS[name] // 4
            self.words[at : at + 32] = value

    def who(self) -> str:
        return f"CTA {self.cta.number} warp {self.index}" + (f" ({self.role})" if self.role else "")
