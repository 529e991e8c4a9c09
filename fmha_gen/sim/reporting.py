"""Findings of a run: where they are recorded, and the wording of the happens-before check's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from . import hb
from .clocks import Access, Components
from .findings import Fault, Finding
from .memory import History
from .program import Program
from .ptx import Instr
from .warp import Warp

_MISSING = {
    "proxy": "no fence.proxy.async covers it",
    "tcgen05-fence": "tcgen05.fence::before_thread_sync and ::after_thread_sync do not both lie between",
}


class Reporter:
    """Base of the machine: findings, once per kind, place and role."""

    def __init__(self, program: Program, isa: bool) -> None:
        self.program, self.isa = program, isa
        self.findings: dict[tuple[str, int, str], Finding] = {}
        self.current: Warp | None = None
        self.event_instr: tuple[Warp, Instr] | None = None

    def report(self, kind: str, message: str, severity: str = "error", at: tuple[Warp, Instr] | None = None) -> None:
        """Record a finding at `at` (default: the running instruction), once per kind, place and role."""
        warp, instr = at or self.place()
        line = instr.line if instr is not None else 0
        key = (kind, line, (warp.role or str(warp.index)) if warp is not None else "")
        if key in self.findings:
            self.findings[key].count += 1
            return
        self.findings[key] = Finding(
            kind, message, severity, warp.cta.number if warp else -1, warp.index if warp else -1,
            warp.role if warp else "", line, instr.loc if instr else None, instr.text if instr else "")  # fmt: skip

    def place(self) -> tuple[Warp, Instr]:
        if self.event_instr is not None:
            return self.event_instr
        assert self.current is not None
        return self.current, self.current.instr

    def relaxed(self) -> str:
        """Severity of what the ISA asks for but register dependencies give: an error in profile "isa"."""
        return "error" if self.isa else "warning"

    # -- access checks --------------------------------------------------------------------------------------------
    def read(self, access: Access, history: History, cells: NDArray[np.int64], what: str, name: Callable[[int], str],
             comps: Components, at: tuple[Warp, Instr] | None = None) -> None:  # fmt: skip
        code, cell = access.read(history, cells)
        if code:
            self._describe(code, cell, access, history, what, name, comps, at)

    def write(self, access: Access, history: History, cells: NDArray[np.int64], what: str, name: Callable[[int], str],
              comps: Components, at: tuple[Warp, Instr] | None = None) -> None:  # fmt: skip
        code, cell = access.write(history, cells)
        if code:
            self._describe(code, cell, access, history, what, name, comps, at)
            history.w_comp[cells], history.w_clock[cells], history.w_pc[cells] = access.comp, access.clock, access.pc

    def _describe(self, code: int, cell: int, access: Access, history: History, what: str, name: Callable[[int], str],
                  comps: Components, at: tuple[Warp, Instr] | None) -> None:  # fmt: skip
        if code == hb.UNINIT:
            self.report(f"{what.split()[0]}-uninit", f"{what} of {name(cell)}, which was never written", at=at)
            return
        instrs = self.program.kernel.instrs
        if code in (hb.RACE, hb.UNFENCED):
            other = f"the write by {comps.names[history.w_comp[cell]]} at {instrs[history.w_pc[cell]].where()}"
        else:
            second = code == hb.UNFENCED_READ
            known = access.second_vc if second else access.hb
            rows = [
                r
                for r, c in enumerate(history.r_comps)
                if history.r_clock[r][cell] > known[c] and (not second or access.second[c])
            ]
            r = rows[0] if rows else 0
            other = f"the read by {comps.names[history.r_comps[r]]} at {instrs[history.r_pc[r][cell]].where()}"
        if code in (hb.RACE, hb.RACE_READ):
            self.report("race", f"{what} of {name(cell)} is not ordered after {other}", at=at)
        else:
            severity = self.relaxed() if access.second_kind == "tcgen05-fence" else "error"
            self.report(
                access.second_kind,
                f"{what} of {name(cell)} comes after {other}, but {_MISSING[access.second_kind]}",
                severity,
                at,
            )

    def fault(self, fault: Fault) -> Finding:
        """The finding of what stopped the run."""
        warp, instr = self.place()
        return Finding(
            fault.kind, str(fault), "fault", warp.cta.number, warp.index, warp.role, instr.line, instr.loc, instr.text
        )
