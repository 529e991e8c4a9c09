"""ld, st, atom, red: shared, global, parameter and generic address spaces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..clocks import ASYNC, HB, Access
from ..codegen.layout import PARAM_WINDOW
from ..findings import Fault
from ..machine import Cta
from ..program import Program
from ..ptx import TYPE_BYTES, Imm, Instr, Reg, Sink, Unsupported, Vector
from ..warp import Warp
from .common import Parts, address_lanes, generic_shared, in_window, lane_index, resolve_shared  # fmt: skip

Run = Callable[[Warp, int], object]
_ORDER = ("relaxed", "acquire", "release", "weak", "volatile", "nc", "sys", "gpu", "cta", "cluster", "unified")
_CACHE = (
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::no_allocate",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
)
_EVICT = tuple(f"L{k}::evict_{how}" for k in (1, 2) for how in ("first", "last", "normal", "unchanged"))
_SPACES = ("shared", "shared::cta", "shared::cluster", "global", "param", "param::entry", "const", "local")


def smem_name(cta: Cta) -> Callable[[int], str]:
    return lambda cell: f"shared bytes {cell * 4:#x}..{cell * 4 + 3:#x} of CTA {cta.number}"


def generic_access(w: Warp) -> Access:
    nothing = w.cta.cluster.comps.nothing
    return Access(w.comp, w.clock(), w.vc[HB], w.instr.index, nothing, w.vc[ASYNC], "proxy")


def touch_shared(w: Warp, cta: Cta, cells: NDArray[np.int64], write: bool) -> None:
    """Happens-before check of a generic access to words of shared memory."""
    machine, comps = cta.machine, cta.cluster.comps
    if cta.smem.mbar_words[cells].any():
        machine.report("mbar-access", f"generic {'write' if write else 'read'} of an mbarrier object")
        return
    access = generic_access(w)
    if write:
        machine.write(access, cta.smem.history, cells, "smem write", smem_name(cta), comps)
    else:
        machine.read(access, cta.smem.history, cells, "smem read", smem_name(cta), comps)


def _cells(addresses: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    if size <= 4:
        return addresses >> 2
    return ((addresses >> 2)[:, None] + np.arange(size // 4)).reshape(-1)


def check_shared(cta: Cta, addresses: NDArray[np.int64], size: int, what: str) -> None:
    low, high = int(addresses.min()), int(addresses.max())
    cta.smem.check(low, size, 1, what)
    cta.smem.check(high, size, 1, what)
    if (addresses % size).any():
        bad = int(addresses[addresses % size != 0][0])
        raise Fault("smem-misaligned", f"{what} at shared address {bad:#x}: not a multiple of {size}")


def shared_lanes(
    w: Warp, addresses: NDArray[np.int64], cluster: bool, what: str
) -> list[tuple[Cta, NDArray[np.int64], NDArray[np.int64]]]:
    """Split lanes by CTA: (CTA, positions in `addresses`, CTA-local addresses)."""
    ranks = addresses >> 24
    if (ranks == w.cta.rank).all():
        return [(w.cta, np.arange(addresses.size), addresses & 0xFFFFFF)]
    out = []
    for rank in np.unique(ranks).tolist():
        at = np.nonzero(ranks == rank)[0]
        cta, _ = resolve_shared(w, int(addresses[at[0]]), cluster, what)
        out.append((cta, at, addresses[at] & 0xFFFFFF))
    return out


def load_bytes(w: Warp, space: str, addresses: NDArray[np.int64], size: int, what: str) -> NDArray[np.uint8]:
    """uint8 [n, size] of each lane's address."""
    if space == "generic":
        space, addresses = _generic(addresses, what)
    if space == "param":
        offset = addresses - PARAM_WINDOW if in_window(int(addresses[0]), PARAM_WINDOW) else addresses
        data = w.cta.machine.params.data
        if int(offset.min()) < 0 or int(offset.max()) + size > data.size or (offset % size).any():
            raise Fault("param-bounds", f"{what}: parameter bytes {offset.tolist()[:4]}, +{size} of {data.size}")
        return data[offset[:, None] + np.arange(size)]
    if space == "global":
        if (addresses % size).any():
            raise Fault(
                "global-misaligned",
                f"{what} at {int(addresses[addresses % size != 0][0]):#x}: not a multiple of {size}",
            )
        return w.cta.machine.memory.gather(addresses, size, what)
    out = np.empty((addresses.size, size), np.uint8)
    for cta, at, local in shared_lanes(w, addresses, space == "shared::cluster", what):
        check_shared(cta, local, size, what)
        touch_shared(w, cta, _cells(local, size), False)
        out[at] = cta.smem.bytes[local[:, None] + np.arange(size)]
    return out


def store_bytes(w: Warp, space: str, addresses: NDArray[np.int64], values: NDArray[np.uint8], what: str) -> None:
    size = values.shape[1]
    if space == "generic":
        space, addresses = _generic(addresses, what)
    if space == "global":
        if (addresses % size).any():
            raise Fault(
                "global-misaligned",
                f"{what} at {int(addresses[addresses % size != 0][0]):#x}: not a multiple of {size}",
            )
        w.cta.machine.memory.scatter(addresses, values, what)
        return
    if space == "param":
        raise Fault("param-bounds", f"{what}: parameters are read-only")
    for cta, at, local in shared_lanes(w, addresses, space == "shared::cluster", what):
        check_shared(cta, local, size, what)
        touch_shared(w, cta, _cells(local, size), True)
        cta.smem.bytes[local[:, None] + np.arange(size)] = values[at]


def _generic(addresses: NDArray[np.int64], what: str) -> tuple[str, NDArray[np.int64]]:
    first = int(addresses[0])
    shared = generic_shared(first)
    space = "shared::cluster" if shared is not None else "param" if in_window(first, PARAM_WINDOW) else "global"
    for a in addresses.tolist():
        other = (
            "shared::cluster" if generic_shared(a) is not None else "param" if in_window(a, PARAM_WINDOW) else "global"
        )
        if other != space:
            raise Fault("generic-mixed", f"{what}: lanes address different state spaces, which is not modelled")
    return space, addresses - (first - shared) if shared is not None else addresses


def _shape(ins: Instr) -> tuple[str, str, int, int]:
    """(space, type, vector count, element bytes); refuses other modifiers."""
    parts = Parts(ins)
    ty = parts.left.pop()
    space = parts.take(*_SPACES) or "generic"
    count = int((parts.take("v2", "v4", "v8") or "v1")[1:])
    while parts.take(*_ORDER, *_CACHE, *_EVICT):
        pass
    parts.done()
    if ty not in TYPE_BYTES or ty == "b128":
        raise Unsupported(ins, f"type .{ty} is not modelled")
    if space in ("const", "local"):
        raise Unsupported(ins, f"state space .{space} is not modelled")
    return {"shared": "shared::cta", "param::entry": "param"}.get(space, space), ty, count, TYPE_BYTES[ty]


def make_ld(program: Program, ins: Instr) -> Run:
    space, ty, count, size = _shape(ins)
    dst = ins.operands[0]
    items = dst.items if isinstance(dst, Vector) else (dst,)
    if len(items) != count:
        raise Unsupported(ins, f"{len(items)} destinations for .v{count}")
    address = address_lanes(program, ins, ins.operands[1])
    what = f"ld.{space}"

    def run(w: Warp, mask: int) -> None:
        lanes = lane_index(mask)
        data = load_bytes(w, space, address(w, lanes), size * count, what)
        for k, item in enumerate(items):
            if isinstance(item, Reg):
                put(w, item, lanes, data[:, k * size : (k + 1) * size], ty)

    return run


def put(w: Warp, reg: Reg, lanes: NDArray[np.int64], data: NDArray[np.uint8], ty: str) -> None:
    """Write little-endian values [lanes, bytes] to a register, extended to its width."""
    size = data.shape[1]
    data = np.ascontiguousarray(data)
    if reg.width == 64:
        wide = (
            data.view(f"<{'i' if ty[0] == 's' else 'u'}{size}")[:, 0]
            .astype(np.int64 if ty[0] == "s" else np.uint64)
            .view(np.uint64)
        )
        at = reg.offset // 4
        w.words[at : at + 32][lanes] = (wide & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        w.words[at + 32 : at + 64][lanes] = (wide >> np.uint64(32)).astype(np.uint32)
        return
    value = data.view(f"<{'i' if ty[0] == 's' else 'u'}{size}")[:, 0]
    if reg.width == 32:
        at = reg.offset // 4
        w.words[at : at + 32][lanes] = value.astype(np.int32 if ty[0] == "s" else np.uint32).view(np.uint32)
    else:
        at = reg.offset // 2
        w.halfs[at : at + 32][lanes] = value.astype(np.int16 if ty[0] == "s" else np.uint16).view(np.uint16)


def take(w: Warp, op: object, lanes: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """uint8 [lanes, size]: the low bytes of a register or immediate."""
    if isinstance(op, Imm):
        one = np.frombuffer((op.bits & ((1 << 8 * size) - 1)).to_bytes(size, "little"), np.uint8)
        return np.broadcast_to(one, (lanes.size, size))
    assert isinstance(op, Reg)
    if op.width == 64:
        at = op.offset // 4
        both = np.stack([w.words[at : at + 32][lanes], w.words[at + 32 : at + 64][lanes]], axis=1)
        return both.view(np.uint8)[:, :size]
    if op.width == 32:
        at = op.offset // 4
        return w.words[at : at + 32][lanes].reshape(-1, 1).view(np.uint8)[:, :size]
    at = op.offset // 2
    return w.halfs[at : at + 32][lanes].reshape(-1, 1).view(np.uint8)[:, :size]


def make_st(program: Program, ins: Instr) -> Run:
    space, ty, count, size = _shape(ins)
    src = ins.operands[1]
    items = src.items if isinstance(src, Vector) else (src,)
    if len(items) != count or any(isinstance(i, Sink) or not isinstance(i, Reg | Imm) for i in items):
        raise Unsupported(ins, f"source {src!r} is not {count} registers or immediates")
    address = address_lanes(program, ins, ins.operands[0])
    what = f"st.{space}"

    def run(w: Warp, mask: int) -> None:
        lanes = lane_index(mask)
        data = np.empty((lanes.size, size * count), np.uint8)
        for k, item in enumerate(items):
            data[:, k * size : (k + 1) * size] = take(w, item, lanes, size)
        store_bytes(w, space, address(w, lanes), data, what)

    return run


_ATOMIC_INT: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "exch": lambda a, b: b,
    "inc": lambda a, b: 0 if a >= b else a + 1, "dec": lambda a, b: b if a == 0 or a > b else a - 1,
}  # fmt: skip


def make_atomic(program: Program, ins: Instr) -> Run:
    """atom and red of 32- and 64-bit integers (and f32 add); lanes in ascending order."""
    parts = Parts(ins)
    ty = parts.left.pop()
    if ty not in ("u32", "s32", "b32", "u64", "s64", "b64", "f32"):
        raise Unsupported(ins, f"type .{ty} is not modelled")
    space = parts.take(*_SPACES) or "generic"
    op = parts.need(*_ATOMIC_INT, "cas")
    while parts.take("relaxed", "acquire", "release", "acq_rel", "gpu", "sys", "cta", "cluster"):
        pass
    parts.done()
    if ty == "f32" and op != "add":
        raise Unsupported(ins, f"{op} of .f32 is not modelled")
    returns = ins.parts[0] == "atom"
    dst = ins.operands[0] if returns else None
    address = address_lanes(program, ins, ins.operands[1 if returns else 0])
    sources = ins.operands[2 if returns else 1 :]
    size = TYPE_BYTES[ty]
    space = "shared::cta" if space == "shared" else space
    dtype = np.dtype("<f4") if ty == "f32" else np.dtype(f"<{'i' if ty[0] == 's' else 'u'}{size}")

    def run(w: Warp, mask: int) -> None:
        lanes = lane_index(mask)
        addresses = address(w, lanes)
        values = [np.ascontiguousarray(take(w, s, lanes, size)).view(dtype)[:, 0].tolist() for s in sources]
        old = np.empty((lanes.size, 1), dtype)
        for k in range(lanes.size):
            at = addresses[k : k + 1]
            before = load_bytes(w, space, at, size, "atom").view(dtype)[0, 0].item()
            old[k] = before
            if op == "cas":
                after = values[1][k] if before == values[0][k] else before
            elif ty == "f32":
                after = float(np.float32(before) + np.float32(values[0][k]))
            else:
                after = int(_ATOMIC_INT[op](before, values[0][k])) & ((1 << 8 * size) - 1)
                after = after - (1 << 8 * size) if ty[0] == "s" and after >> (8 * size - 1) else after
            store_bytes(w, space, at, np.array([[after]], dtype).view(np.uint8), "atom")
        if isinstance(dst, Reg):
            put(w, dst, lanes, old.view(np.uint8), ty if ty != "f32" else "b32")

    return run


def make_prefetch(program: Program, ins: Instr) -> Run:
    return lambda w, mask: None


TABLE: dict[str, Callable[[Program, Instr], Run]] = {
    "ld": make_ld,
    "st": make_st,
    "atom": make_atomic,
    "red": make_atomic,
    "prefetch": make_prefetch,
    "prefetchu": make_prefetch,
}
