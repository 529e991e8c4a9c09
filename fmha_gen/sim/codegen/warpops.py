"""Warp operations on registers: votes, shuffles, election, reductions. Their members must be the executing lanes."""

from __future__ import annotations

from ..ptx import Imm, Instr, Pair, Sink
from .builder import FAULT_LANES, I1, I32, Fn, Mods, splat
from .ints import binary


def member_mask(fn: Fn, op: object) -> str:
    """i32 member mask; faults unless exactly the executing lanes are among its members and all members execute."""
    if isinstance(op, Imm):
        mask = str(op.bits & 0xFFFFFFFF if op.bits >= 0 else op.bits)
    else:
        mask = fn.emit(f"extractelement {I32} {fn.i(op, 32)}, i32 {_first_lane(fn)}")
    lanes = fn.exec_mask()
    extra = fn.emit(f"xor i32 {lanes}, {mask}")
    fn.fault_if(fn.emit(f"icmp ne i32 {extra}, 0"), FAULT_LANES)
    return mask


def _first_lane(fn: Fn) -> str:
    fn.helpers.add("declare i32 @llvm.cttz.i32(i32, i1)")
    return fn.emit(f"and i32 {fn.emit(f'call i32 @llvm.cttz.i32(i32 {fn.exec_mask()}, i1 false)')}, 31")


def broadcast(fn: Fn, word: str) -> str:
    one = fn.emit(f"insertelement {I32} poison, i32 {word}, i64 0")
    return fn.emit(f"shufflevector {I32} {one}, {I32} poison, {I32} zeroinitializer")


def emit_vote(fn: Fn, ins: Instr, mods: Mods) -> None:
    ty = mods.last()
    if not mods.take("sync"):
        raise fn.refuse("vote needs .sync")
    mode = mods.take("ballot", "any", "all", "uni")
    mods.done()
    member_mask(fn, ins.operands[2])
    lanes = fn.exec_mask()
    votes = fn.emit(f"and i32 {fn.pred(ins.operands[1])}, {lanes}")
    if mode == "ballot" and ty == "b32":
        fn.set_i(ins.operands[0], broadcast(fn, votes), 32)
        return
    none = fn.emit(f"icmp eq i32 {votes}, 0")
    every = fn.emit(f"icmp eq i32 {votes}, {lanes}")
    if mode == "any":
        cond = fn.emit(f"xor i1 {none}, true")
    elif mode == "all":
        cond = every
    else:
        cond = fn.emit(f"or i1 {none}, {every}")
    fn.set_pred(ins.operands[0], fn.emit(f"select i1 {cond}, i32 -1, i32 0"))


def emit_activemask(fn: Fn, ins: Instr, mods: Mods) -> None:
    mods.last()
    mods.done()
    fn.set_i(ins.operands[0], broadcast(fn, fn.exec_mask()), 32)


def emit_elect(fn: Fn, ins: Instr, mods: Mods) -> None:
    """elect.sync d|p, membermask: the lowest member lane wins."""
    mods.take("sync")
    mods.done()
    dst = ins.operands[0]
    if not isinstance(dst, Pair):
        raise fn.refuse("elect.sync needs d|p")
    member_mask(fn, ins.operands[1])
    leader = _first_lane(fn)
    if not isinstance(dst.first, Sink):
        fn.set_i(dst.first, broadcast(fn, leader), 32)
    fn.set_pred(dst.second, fn.emit(f"shl i32 1, {leader}"))


def emit_shfl(fn: Fn, ins: Instr, mods: Mods) -> None:
    """shfl.sync.{idx,up,down,bfly}.b32 d|p, a, b, c, membermask."""
    mods.last()
    if not mods.take("sync"):
        raise fn.refuse("shfl needs .sync")
    mode = mods.take("idx", "up", "down", "bfly")
    mods.done()
    dst = ins.operands[0]
    member_mask(fn, ins.operands[4])
    a, b, c = (fn.i(o, 32) for o in ins.operands[1:4])
    lane = "<" + ", ".join(f"i32 {k}" for k in range(32)) + ">"
    b31 = binary(fn, "and", 32, b, splat(32, 31))
    clamp = binary(fn, "and", 32, c, splat(32, 31))
    seg = binary(fn, "and", 32, binary(fn, "lshr", 32, c, splat(32, 8)), splat(32, 31))
    inv = binary(fn, "xor", 32, seg, splat(32, 31))
    low = binary(fn, "and", 32, lane, seg)
    limit = binary(fn, "or", 32, low, binary(fn, "and", 32, clamp, inv))
    if mode == "idx":
        target = binary(fn, "or", 32, low, binary(fn, "and", 32, b31, inv))
    elif mode == "bfly":
        target = binary(fn, "xor", 32, lane, b31)
    else:
        target = binary(fn, "sub" if mode == "up" else "add", 32, lane, b31)
    cmp = "sge" if mode == "up" else "sle"
    inside = fn.emit(f"icmp {cmp} {I32} {target}, {limit}")
    source = fn.emit(f"select {I1} {inside}, {I32} {target}, {I32} {lane}")
    source = binary(fn, "and", 32, source, splat(32, 31))
    slot = fn.emit("alloca [32 x i32], align 64")
    fn.lines.append(f"store {I32} {a}, ptr {slot}, align 64")
    ptrs = fn.emit(f"getelementptr i32, ptr {slot}, {I32} {source}")
    fn.helpers.add(f"declare {I32} @llvm.masked.gather.v32i32.v32p0(<32 x ptr>, i32, {I1}, {I32})")
    out = fn.emit(
        f"call {I32} @llvm.masked.gather.v32i32.v32p0(<32 x ptr> {ptrs}, i32 4, {I1} splat (i1 true), {I32} poison)"
    )
    lanes = fn.exec_mask()
    bits = fn.emit(f"bitcast {I1} {fn.lanes(lanes)} to i32")
    word = broadcast(fn, bits)
    reads = binary(fn, "and", 32, binary(fn, "lshr", 32, word, source), splat(32, 1))
    idle = fn.mask(fn.emit(f"icmp eq {I32} {reads}, zeroinitializer"))
    fn.fault_if(fn.emit(f"icmp ne i32 {fn.emit(f'and i32 {idle}, {lanes}')}, 0"), FAULT_LANES)
    if isinstance(dst, Pair):
        fn.set_i(dst.first, out, 32)
        fn.set_lanes(dst.second, inside)
    else:
        fn.set_i(dst, out, 32)


def emit_redux(fn: Fn, ins: Instr, mods: Mods) -> None:
    """redux.sync of integers."""
    ty = mods.last()
    if not mods.take("sync"):
        raise fn.refuse("redux needs .sync")
    op = mods.take("add", "min", "max", "and", "or", "xor")
    mods.done()
    if ty not in ("u32", "s32", "b32") or op is None:
        raise fn.refuse(f"redux of .{ty} is not modelled")
    member_mask(fn, ins.operands[2])
    identity = {"and": -1, "min": 0x7FFFFFFF if ty == "s32" else -1, "max": -(1 << 31) if ty == "s32" else 0}.get(op, 0)
    name = op if op not in ("min", "max") else ("s" if ty == "s32" else "u") + op
    lanes = fn.lanes(fn.exec_mask())
    masked = fn.emit(f"select {I1} {lanes}, {I32} {fn.i(ins.operands[1], 32)}, {I32} {splat(32, identity)}")
    fn.helpers.add(f"declare i32 @llvm.vector.reduce.{name}.v32i32({I32})")
    out = fn.emit(f"call i32 @llvm.vector.reduce.{name}.v32i32({I32} {masked})")
    fn.set_i(ins.operands[0], broadcast(fn, out), 32)
