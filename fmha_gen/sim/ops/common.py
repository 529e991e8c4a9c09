"""Operand access of machine operations, bound once per instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..codegen.layout import PARAM_WINDOW, SHARED_BASE, SHARED_WINDOW, SPECIAL_OFFSETS, WINDOW_BYTES
from ..findings import Fault
from ..machine import Cta
from ..program import Program
from ..ptx import Address, Imm, Instr, Not, Reg, Special, Symbol, Unsupported
from ..warp import FULL, Warp

Scalar = Callable[[Warp, int], int]
Lanes = Callable[[Warp], NDArray[np.int64]]
LANE_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
ADDRESS_MASK = (1 << 24) - 1
WORDS = np.arange(1 << 16, dtype=np.int64)  # slices of it are cell ranges


class Parts:
    """Modifiers of an opcode, consumed one by one; `done` refuses what is left."""

    def __init__(self, ins: Instr, skip: int = 1) -> None:
        self.ins = ins
        self.left = list(ins.parts[skip:])

    def take(self, *names: str) -> str | None:
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        return None

    def need(self, *names: str) -> str:
        found = self.take(*names)
        if found is None:
            raise Unsupported(self.ins, f"needs one of .{', .'.join(names)}")
        return found

    def done(self) -> None:
        if self.left:
            raise Unsupported(self.ins, f"modifier .{self.left[0]} is not modelled")


def need_full(w: Warp, mask: int, what: str) -> None:
    """Aligned instructions need every live lane of the warp."""
    if mask | w.exited != FULL:
        raise Fault(
            "partial-warp", f"{what} executed by lanes {mask:#010x} only; every lane of the warp must take part"
        )


def first_lane(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def lanes_of(mask: int) -> list[int]:
    return [k for k in range(32) if mask >> k & 1]


def lane_index(mask: int) -> NDArray[np.int64]:
    """Indices of the lanes in `mask`."""
    if mask == 0xFFFFFFFF:
        return WORDS[:32]
    return np.nonzero(np.uint32(mask) & LANE_BITS)[0]


def scalar(program: Program, ins: Instr, op: object, width: int = 32) -> Scalar:
    """Unsigned value of an operand in one lane."""
    if isinstance(op, Imm):
        value = op.bits & ((1 << width) - 1)
        return lambda w, lane: value
    if isinstance(op, Reg):
        at = op.offset // 4
        if op.width == 64:
            return lambda w, lane: int(w.words[at + lane]) | int(w.words[at + 32 + lane]) << 32
        if op.width == 32:
            return lambda w, lane: int(w.words[at + lane])
        if op.width == 16:
            half = op.offset // 2
            return lambda w, lane: int(w.halfs[half + lane])
    if isinstance(op, Special) and op.name in SPECIAL_OFFSETS:
        slot = SPECIAL_OFFSETS[op.name] // 4
        return lambda w, lane: int(w.words[slot + lane])
    if isinstance(op, Symbol):
        space, offset = _symbol(program, ins, op)
        if space == "param":
            return lambda w, lane: PARAM_WINDOW + offset
        return lambda w, lane: int(w.words[SHARED_BASE // 4]) + offset
    raise Unsupported(ins, f"operand {op!r} is not a value")


def is_uniform(op: object) -> Callable[[Warp, int], bool]:
    """Whether an operand (or the base of an address) has one value in all lanes of a mask."""
    if isinstance(op, Address):
        return is_uniform(op.base)
    if not isinstance(op, Reg):
        return lambda w, mask: not isinstance(op, Special)
    at = op.offset // 4

    def check(w: Warp, mask: int) -> bool:
        if mask & (mask - 1) == 0:
            return True
        lanes = lane_index(mask)
        for start in (at, at + 32)[: max(1, op.width // 32)]:
            words = w.words[start : start + 32][lanes]
            if (words != words[0]).any():
                return False
        return True

    return check


def _symbol(program: Program, ins: Instr, op: Symbol) -> tuple[str, int]:
    if op.name not in program.symbols:
        raise Unsupported(ins, f"unknown symbol {op.name!r}")
    return program.symbols[op.name]


def predicate(ins: Instr, op: object) -> Callable[[Warp], int]:
    """Lane mask of a predicate operand."""
    if isinstance(op, Not):
        inner = predicate(ins, op.reg)
        return lambda w: ~inner(w) & 0xFFFFFFFF
    if isinstance(op, Reg) and op.width == 1:
        at = op.offset // 4
        return lambda w: int(w.words[at])
    if isinstance(op, Imm):
        value = 0xFFFFFFFF if op.bits else 0
        return lambda w: value
    raise Unsupported(ins, f"operand {op!r} is not a predicate")


def set_predicate(w: Warp, reg: Reg, mask: int, value: int) -> None:
    at = reg.offset // 4
    w.words[at] = (int(w.words[at]) & ~mask | value & mask) & 0xFFFFFFFF


def address_scalar(program: Program, ins: Instr, op: object) -> Scalar:
    """Address of an Address operand in one lane."""
    if not isinstance(op, Address):
        raise Unsupported(ins, f"operand {op!r} is not an address")
    offset = op.offset
    if op.base is None:
        return lambda w, lane: offset
    base = scalar(program, ins, op.base, 64)
    bits = 0xFFFFFFFF if isinstance(op.base, Reg) and op.base.width == 32 else (1 << 64) - 1
    if not offset:
        return base
    return lambda w, lane: (base(w, lane) + offset) & bits


def address_lanes(program: Program, ins: Instr, op: object) -> Callable[[Warp, NDArray[np.int64]], NDArray[np.int64]]:
    """Addresses of an Address operand in the given lanes, int64."""
    if not isinstance(op, Address):
        raise Unsupported(ins, f"operand {op!r} is not an address")
    offset = op.offset
    if isinstance(op.base, Reg):
        at = op.base.offset // 4
        if op.base.width == 64:

            def get64(w: Warp, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
                lo = w.words[at : at + 32][lanes].astype(np.int64)
                return (w.words[at + 32 : at + 64][lanes].astype(np.int64) << 32 | lo) + offset

            return get64
        return lambda w, lanes: w.words[at : at + 32][lanes].astype(np.int64) + offset
    one = address_scalar(program, ins, op)
    return lambda w, lanes: np.full(lanes.size, one(w, 0), np.int64)


def resolve_shared(w: Warp, address: int, cluster: bool, what: str) -> tuple[Cta, int]:
    """CTA and CTA-local address of a shared-space address. Raises Fault for a rank that is not there or not ours."""
    rank, local = address >> 24, address & ADDRESS_MASK
    if rank == w.cta.rank:
        return w.cta, local
    if rank < len(w.cta.cluster.ctas) and cluster and not w.cta.cluster.ctas[rank].live:
        w.cta.machine.report("peer-exited", f"{what}: shared memory of CTA rank {rank}, whose warps have all ended")
    if rank >= len(w.cta.cluster.ctas):
        raise Fault(
            "smem-bounds", f"{what}: shared address {address:#x} names CTA rank {rank} of {len(w.cta.cluster.ctas)}"
        )
    if not cluster:
        raise Fault(
            "smem-rank", f"{what}: shared::cta address {address:#x} lies in CTA rank {rank}, this is rank {w.cta.rank}"
        )
    return w.cta.cluster.ctas[rank], local


def in_window(address: int, base: int) -> bool:
    return base <= address < base + WINDOW_BYTES


def generic_shared(address: int) -> int | None:
    """Shared-space address of a generic one, or None."""
    return address - SHARED_WINDOW if in_window(address, SHARED_WINDOW) else None


def dst_regs(ins: Instr, items: Sequence[object]) -> list[Reg | None]:
    out: list[Reg | None] = []
    for item in items:
        out.append(item if isinstance(item, Reg) else None)
    return out
