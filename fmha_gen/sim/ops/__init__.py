"""Machine operations: everything that is not arithmetic on registers. `bind` gives the executable form of one."""

from __future__ import annotations

from collections.abc import Callable

from ..program import Program
from ..ptx import Instr
from ..warp import Warp
from . import bulk, fences, mbar, memory, named, tcgen05

Run = Callable[[Warp, int], object]
TABLE: dict[str, Callable[[Program, Instr], Run | None]] = {
    **memory.TABLE,
    **named.TABLE,
    **mbar.TABLE,
    **fences.TABLE,
    **bulk.TABLE,
    **tcgen05.TABLE,
}


def bind(program: Program, ins: Instr) -> Run | None:
    """``run(warp, mask)`` of a machine operation, or None when the opcode is not modelled. Raises Unsupported."""
    make = TABLE.get(ins.parts[0])
    return make(program, ins) if make is not None else None
