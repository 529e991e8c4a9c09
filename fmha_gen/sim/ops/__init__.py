"""Machine operations: everything that is not arithmetic on registers. `bind` gives the executable form of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..ptx import Instr

if TYPE_CHECKING:
    from ..program import Program

Binder = Callable[["Program", Instr], Callable[..., object] | None]


def bind(program: Program, ins: Instr) -> Callable[..., object] | None:
    """``run(warp, mask)`` of a machine operation, or None when the opcode is not modelled. Raises Unsupported."""
    from . import bulk, memory, sync, tcgen05

    for table in (memory.TABLE, sync.TABLE, bulk.TABLE, tcgen05.TABLE):
        make = table.get(ins.parts[0])
        if make is not None:
            run = make(program, ins)
            if run is not None:
                return run
    return None
