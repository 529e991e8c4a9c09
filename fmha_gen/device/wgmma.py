"""wgmma: descriptors, and matrix products of one warpgroup as single asm blocks.

A product is issued as one block (fence, a run of K steps, commit) and finishes with `wait`. Accumulators and operands
in registers pass through both as tied operands: to the compiler every block makes new values, so that no instruction
can touch a register between issue and wait. Of a 64-bit matrix descriptor only the low word varies with the address.

Fragments of one thread, as lists: accumulators of a 64 x N product are N/2 float32, ``[4j + 2r + e]`` holding row
``lane / 4 + 8r`` of the warp's 16 and column ``8j + 2 (lane % 4) + e``. An A operand of depth 16 is four words of two
16-bit values with the same order, so that 8 neighbouring accumulators pack into one.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_CONSTRAINTS = {"i32": "r", "i64": "l", "f32": "f"}


@dsl_user_op
def tied_asm(code, floats=(), words=(), reads=(), new_floats=0, *, loc=None, ip=None) -> tuple[list[Any], list[Any]]:
    """Inline asm on tied registers: operands are `new_floats` written ones, then `floats`, `words`, then `reads`.

    Returns (float32 results, 32-bit results): new and tied ones. The DSL's own `inline_ptx` has read-write operands
    too, but crashes on them (nvidia-cutlass-dsl 4.8.1).
    """
    tied = [Float32(x).ir_value(loc=loc, ip=ip) for x in floats] + [Int32(x).ir_value(loc=loc, ip=ip) for x in words]
    inputs = [Int32(x).ir_value(loc=loc, ip=ip) for x in reads]
    num_floats = new_floats + len(floats)
    types = [Float32.mlir_type] * num_floats + [Int32.mlir_type] * len(words)
    constraints = ["=&f"] * new_floats + ["=f"] * len(floats) + ["=r"] * len(words)
    constraints += [str(new_floats + i) for i in range(len(tied))] + ["r"] * len(inputs)
    results = llvm.inline_asm(
        llvm.StructType.get_literal(types) if len(types) > 1 else types[0],
        [*tied, *inputs],
        code,
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    values = [llvm.extractvalue(t, results, [i], loc=loc, ip=ip) for i, t in enumerate(types)]
    return [Float32(v) for v in values[:num_floats]], [Int32(v) for v in values[num_floats:]]


def desc_low(addr: Int32, desc: int) -> Int32:
    """Low word of the matrix descriptor `desc` with its operand at shared address `addr`, 16-byte aligned."""
    return (addr >> 4) | Int32(desc & 0xFFFFFFFF)


def desc_address(low: Int32) -> Int32:
    """Shared address in the low word of a matrix descriptor."""
    return (low & 0x3FFF) << 4


def wait(pending: int, floats=(), words=()) -> tuple[list[Any], list[Any]]:
    """Wait until at most `pending` products of this warpgroup are in flight; the registers passed are then complete."""
    return tied_asm(f"wgmma.wait_group.sync.aligned {pending};", floats=floats, words=words)


def product_ss(n: int, fmt: str, a_low: Int32, b_low: Int32, desc_a: int, desc_b: int, a_steps, b_steps) -> list[Any]:
    """D = A B^T of 64 rows, both K-major in shared memory, started: N/2 accumulators.

    a_steps, b_steps: byte offset of every step of depth 16. desc_a, desc_b: descriptors without addresses.
    """
    num_acc = n // 2
    steps = []
    for step, (a_step, b_step) in enumerate(zip(a_steps, b_steps, strict=True)):
        steps.append(
            f"add.s32 t, ${num_acc}, {a_step // 16}; mov.b64 da, {{t, {desc_a >> 32:#x}}};\n"
            f"add.s32 t, ${num_acc + 1}, {b_step // 16}; mov.b64 db, {{t, {desc_b >> 32:#x}}};\n"
            f"{_mma(n, fmt)} {_operands(0, num_acc)}, da, db, {_scale_d(step)}, 1, 1, 0, 0;"
        )
    return tied_asm(_block(steps), reads=[a_low, b_low], new_floats=num_acc)[0]


def product_rs(
    n: int, fmt: str, acc: list[Any] | None, a_words: list[Any], b_low: Int32, desc_b: int, b_steps, b_mn_major: bool
) -> tuple[list[Any], list[Any]]:
    """D (+)= A B of 64 rows with A in registers, started; acc is None for D = A B.

    Returns (accumulators, A words): both belong to the product until `wait`. B is in shared memory, K-major or, with
    `b_mn_major`, MN-major.
    """
    num_acc, num_words = n // 2, len(a_words)
    tied = num_words + (num_acc if acc is not None else 0)
    b_low_operand = f"${num_acc + num_words + tied}"
    steps = []
    for step, b_step in enumerate(b_steps):
        fresh = acc is None and step == 0
        steps.append(
            f"add.s32 t, {b_low_operand}, {b_step // 16}; mov.b64 db, {{t, {desc_b >> 32:#x}}};\n"
            f"{_mma(n, fmt)} {_operands(0, num_acc)}, {_operands(num_acc + 4 * step, 4)}, db,"
            f" {_scale_d(0 if fresh else 1)}, 1, 1, {int(b_mn_major)};"
        )
    new = num_acc if acc is None else 0
    return tied_asm(_block(steps), floats=acc or (), words=a_words, reads=[b_low], new_floats=new)


def _block(steps: list[str]) -> str:
    """A fence for the registers of the first step, the steps, and their commit."""
    head = "{ .reg .b64 da, db; .reg .b32 t; .reg .pred zero, one;\nsetp.ne.b32 zero, 0, 0; setp.eq.b32 one, 0, 0;"
    return "\n".join([head, "wgmma.fence.sync.aligned;", *steps, "wgmma.commit_group.sync.aligned; }"])


def _mma(n: int, fmt: str) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{fmt}.{fmt}"


def _scale_d(step: int) -> str:
    return "one" if step else "zero"


def _operands(first: int, count: int) -> str:
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"
