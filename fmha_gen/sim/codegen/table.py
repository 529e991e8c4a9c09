"""Which instructions are register instructions, and the emitter of each."""

from __future__ import annotations

from ..ptx import Instr
from . import floats, ints, moves, warpops
from .builder import Fn, Mods
from .floats import Emitter

_BY_NAME: dict[str, Emitter] = {
    "ex2": floats.emit_unary("ex2"), "lg2": floats.emit_unary("lg2"), "rcp": floats.emit_unary("rcp"),
    "rsqrt": floats.emit_unary("rsqrt"), "tanh": floats.emit_unary("tanh"), "sqrt": floats.emit_unary("sqrt"),
    "setp": floats.emit_setp, "selp": moves.emit_selp, "mov": moves.emit_mov, "cvt": moves.emit_cvt,
    "cvta": moves.emit_cvta, "mapa": moves.emit_mapa, "mad": ints.emit_mad,
    "shl": ints.emit_shift("shl"), "shr": ints.emit_shift("shr"), "shf": ints.emit_shf,
    "and": ints.emit_binary("and"), "or": ints.emit_binary("or"), "xor": ints.emit_binary("xor"), "not": ints.emit_not,
    "rem": ints.emit_divrem("rem"), "popc": ints.emit_count("popc"), "clz": ints.emit_count("clz"),
    "brev": ints.emit_count("brev"), "bfind": ints.emit_count("bfind"), "bfe": ints.emit_bfe, "bfi": ints.emit_bfi,
    "lop3": ints.emit_lop3, "prmt": ints.emit_prmt, "vote": warpops.emit_vote, "activemask": warpops.emit_activemask,
    "elect": warpops.emit_elect, "shfl": warpops.emit_shfl, "redux": warpops.emit_redux,
}  # fmt: skip
_FLOAT: dict[str, Emitter] = {
    "add": floats.emit_arith("add"), "sub": floats.emit_arith("sub"), "mul": floats.emit_arith("mul"),
    "fma": floats.emit_arith("fma"), "min": floats.emit_minmax("min"), "max": floats.emit_minmax("max"),
    "neg": floats.emit_unary("neg"), "abs": floats.emit_unary("abs"), "div": floats.emit_div,
}  # fmt: skip
_INT: dict[str, Emitter] = {
    "add": ints.emit_binary("add"), "sub": ints.emit_binary("sub"), "mul": ints.emit_mul,
    "min": ints.emit_int_minmax("min"), "max": ints.emit_int_minmax("max"), "neg": ints.emit_neg_abs("neg"),
    "abs": ints.emit_neg_abs("abs"), "div": ints.emit_divrem("div"),
}  # fmt: skip
_FLOAT_TYPES = frozenset({"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"})


def emitter(ins: Instr) -> Emitter | None:
    """The emitter of a register instruction; None for every other instruction."""
    name = ins.parts[0]
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name == "ld":
        return moves.emit_ld_param if ins.parts[1].startswith("param") and moves.is_static_param(ins) else None
    if name in ("fma", "add", "sub", "mul", "min", "max", "neg", "abs", "div"):
        return (_FLOAT if ins.parts[-1] in _FLOAT_TYPES else _INT).get(name)
    return None


def emit(fn: Fn, ins: Instr, index: int) -> None:
    """Emit one register instruction into `fn`. Raises Unsupported naming what is not modelled."""
    run = emitter(ins)
    assert run is not None
    fn.begin(ins, index)
    mods = Mods(fn, ins)
    if ins.parts[0] in ("min", "max") and ins.parts[-1] in _FLOAT_TYPES:
        ty = mods.last()
        if ty != "f32":
            raise fn.refuse(f"type .{ty} is not modelled for {ins.parts[0]}")
    run(fn, ins, mods)
