"""tcgen05.ld and tcgen05.st with their waits.

A load delivers, and a store is applied, at once or as late as their wait allows; which, the seed decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..clocks import HB, Access
from ..findings import Fault
from ..machine import Cta
from ..memory import TMEM_COLS
from ..program import Program
from ..ptx import Imm, Instr, Reg, Unsupported, Vector
from ..tmem_shapes import LdStMap, TmemShapeError, ldst_map
from ..warp import PendingLoad, PendingStore, Warp
from .common import Parts, address_scalar, need_full

Run = Callable[[Warp, int], object]


def tmem_name(cta: Cta) -> Callable[[int], str]:
    return lambda cell: (
        f"tensor memory lanes {16 * (cell // TMEM_COLS)}..+15 column {cell % TMEM_COLS} of CTA {cta.number}"
    )


@lru_cache(maxsize=4096)
def rect_cells(lane0: int, lanes: int, col0: int, cols: int) -> NDArray[np.int64]:
    """History cells (16-lane group x column) of a rectangle."""
    groups = np.arange(lane0 // 16, (lane0 + lanes + 15) // 16, dtype=np.int64)
    return (groups[:, None] * TMEM_COLS + np.arange(col0, col0 + cols, dtype=np.int64)).reshape(-1)


def _shape(ins: Instr, parts: Parts, pack: str) -> tuple[LdStMap, int]:
    """(layout, operands that follow the address)."""
    parts.take("sync")
    parts.take("aligned")
    shape = parts.need("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    num = int(parts.need(*(f"x{1 << k}" for k in range(8)))[1:])
    packed = bool(parts.take(pack))
    parts.take("b32")
    parts.done()
    split = 0
    if shape == "16x32bx2":
        op = ins.operands[2 if ins.parts[1] == "ld" else 1]
        if not isinstance(op, Imm):
            raise Unsupported(ins, "the half split offset must be an immediate")
        split = op.bits
    try:
        return ldst_map(shape, num, packed, split), split
    except TmemShapeError as e:
        raise Unsupported(ins, str(e)) from None


def _place(w: Warp, address: int, layout: LdStMap, what: str) -> tuple[int, int]:
    """(lane, column) of a warp's access; checks quadrant, bounds and allocation."""
    lane, col = address >> 16, address & 0xFFFF
    quadrant = 32 * (w.index % 4)
    ok = lane == quadrant or (layout.lanes == 16 and lane == quadrant + 16)
    if not ok:
        raise Fault(
            "tmem-quadrant", f"{what} at lane {lane}: warp {w.index} reaches lanes {quadrant}..{quadrant + 31} only"
        )
    w.cta.tmem.check(lane, layout.lanes, col, layout.cols, what)
    return lane, col


def _registers(ins: Instr, op: object, count: int) -> list[Reg]:
    items = op.items if isinstance(op, Vector) else (op,)
    regs = [r for r in items if isinstance(r, Reg) and r.width == 32]
    if len(regs) != count or len(regs) != len(items):
        raise Unsupported(ins, f"{len(items)} registers; the shape needs {count} of 32 bits")
    return regs


def _row_index(regs: list[Reg]) -> NDArray[np.int64] | slice:
    rows = [r.offset // 128 for r in regs]
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows, np.int64)


def _layout_cells(layout: LdStMap, lane: int, col: int) -> NDArray[np.int64]:
    if layout.dense:
        return rect_cells(lane, layout.lanes, col, layout.cols)
    return _sparse_cells(layout, lane, col)


@lru_cache(maxsize=512)
def _sparse_cells(layout: LdStMap, lane: int, col: int) -> NDArray[np.int64]:
    cols = [layout.col, layout.col + 1] if layout.packed else [layout.col]
    cells = [((lane + layout.lane) // 16) * TMEM_COLS + col + c for c in cols]
    return np.unique(np.concatenate([c.reshape(-1) for c in cells]))


def make_ld(program: Program, ins: Instr, parts: Parts) -> Run:
    if parts.take("red"):
        raise Unsupported(ins, "tcgen05.ld.red is not modelled")
    layout, _ = _shape(ins, parts, "pack::16b")
    regs = _registers(ins, ins.operands[0], layout.num_regs)
    rows = _row_index(regs)
    mask_of_regs = sum(1 << r.index for r in regs)
    address = address_scalar(program, ins, ins.operands[1])

    def run(w: Warp, mask: int) -> None:
        need_full(w, mask, ins.opcode)
        cta = w.cta
        machine, comps = cta.machine, cta.cluster.comps
        lane, col = _place(w, address(w, 0), layout, ins.opcode)
        w.ld_sequence += 1
        defer = machine.rng.random() < 0.5
        hb_row, tview = (w.vc[HB].copy(), w.tview.copy()) if defer else (w.vc[HB], w.tview)
        access = Access(w.comp_ld, w.ld_sequence, hb_row, ins.index, comps.tcgen, tview, "tcgen05-fence")

        def deliver() -> None:
            machine.read(
                access, cta.tmem.history, _layout_cells(layout, lane, col), "tmem read", tmem_name(cta), comps, (w, ins)
            )
            cells = cta.tmem.cells
            if layout.dense:
                w.rows[rows] = cells[lane : lane + 32, col : col + layout.cols].T
            else:
                values = cells[lane + layout.lane, col + layout.col]
                if layout.packed:
                    values = values & np.uint32(0xFFFF) | cells[lane + layout.lane, col + layout.col + 1] << np.uint32(
                        16
                    )
                w.rows[rows] = values.T

        if not defer:
            deliver()
        w.loads.append(PendingLoad(mask_of_regs, w.ld_sequence, ins, deliver if defer else None))
        w.hazard |= mask_of_regs

    return run


def wait_ld(w: Warp, mask: int) -> None:
    need_full(w, mask, "tcgen05.wait::ld")
    w.cta.machine.finish_loads(w, w.ld_sequence)


def make_st(program: Program, ins: Instr, parts: Parts) -> Run:
    layout, split = _shape(ins, parts, "unpack::16b")
    source = ins.operands[2 if split or "16x32bx2" in ins.parts else 1]
    regs = _registers(ins, source, layout.num_regs)
    rows = _row_index(regs)
    address = address_scalar(program, ins, ins.operands[0])

    def run(w: Warp, mask: int) -> None:
        need_full(w, mask, ins.opcode)
        cta = w.cta
        machine, comps = cta.machine, cta.cluster.comps
        lane, col = _place(w, address(w, 0), layout, ins.opcode)
        w.st_sequence += 1
        values = w.rows[rows].T.copy()
        defer = machine.rng.random() < 0.5
        hb_row, tview = (w.vc[HB].copy(), w.tview.copy()) if defer else (w.vc[HB], w.tview)
        access = Access(w.comp_st, w.st_sequence, hb_row, ins.index, comps.tcgen, tview, "tcgen05-fence")

        def apply() -> None:
            machine.write(
                access,
                cta.tmem.history,
                _layout_cells(layout, lane, col),
                "tmem write",
                tmem_name(cta),
                comps,
                (w, ins),
            )
            cells = cta.tmem.cells
            if layout.dense:
                cells[lane : lane + 32, col : col + layout.cols] = values
            elif layout.packed:
                cells[lane + layout.lane, col + layout.col] = values & np.uint32(0xFFFF)
                cells[lane + layout.lane, col + layout.col + 1] = values >> np.uint32(16)
            else:
                cells[lane + layout.lane, col + layout.col] = values

        if not defer:
            apply()
        w.stores.append(PendingStore(w.st_sequence, ins, apply if defer else None))

    return run


def wait_st(w: Warp, mask: int) -> None:
    need_full(w, mask, "tcgen05.wait::st")
    for store in w.stores:
        if store.run is not None:
            store.run()
    w.stores = []
    w.learn_tcgen(w.comp_st, w.st_sequence)
