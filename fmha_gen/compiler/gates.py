"""What must hold of a compiled kernel before it may be shipped.

The ELF must say what the plan decided, and the machine code must hold what the PTX asked for: ptxas drops setmaxnreg
without a word when it cannot prove the register budget, and a kernel without it deadlocks or spills on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..elf import Cubin, CubinKernel
from ..sass.disasm import disassemble

# Opcode in the PTX, and the SASS opcode that each occurrence must have become.
_PAIRED = (
    ("setmaxnreg", re.compile(r"\bsetmaxnreg\."), re.compile(r"^USETMAXREG\b")),
    ("tcgen05.mma", re.compile(r"\btcgen05\.mma\."), re.compile(r"^UTC[A-Z]*MMA\b")),
    ("wgmma", re.compile(r"\bwgmma\.mma_async\."), re.compile(r"^[A-Z]GMMA\b")),
    ("wgmma", re.compile(r"\bwgmma\.mma_async\."), re.compile(r"^HGMMA\b")),
    # ptxas serialises products by waits of its own when it sees their registers used too early.
    ("wgmma wait", re.compile(r"\bwgmma\.wait_group\."), re.compile(r"^WARPGROUP\.DEPBAR\b")),
    ("TMA load", re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.shared"), re.compile(r"^UTMALDG\b")),
    ("TMA store", re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.global"), re.compile(r"^UTMASTG\b")),
)
_LOCAL_MEMORY = ("STL", "LDL")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the plan says about a kernel.

    params: (name, offset, size) in order, bytes. registers: per thread at launch, None where the plan leaves it open.
    """

    arch: str
    symbol: str
    params: tuple[tuple[str, int, int], ...]
    threads: int
    registers: int | None


def check_elf(cubin: Cubin, expected: Expected) -> tuple[CubinKernel | None, list[str]]:
    """(the kernel, what is wrong with it). Without exactly one kernel there is nothing further to check."""
    if [k.symbol for k in cubin.kernels] != [expected.symbol]:
        found = ", ".join(k.symbol for k in cubin.kernels) or "none"
        return None, [f"kernels in the cubin: {found}; expected exactly one, {expected.symbol}"]
    return cubin.kernels[0], list(_elf_problems(cubin, cubin.kernels[0], expected))


def _elf_problems(cubin: Cubin, kernel: CubinKernel, expected: Expected) -> Iterator[str]:
    if cubin.arch != expected.arch:
        yield f"the cubin is for {cubin.arch}, expected {expected.arch}"
    yield from _param_problems(kernel, expected)
    if kernel.block != (expected.threads, 1, 1):
        yield f"required block is {kernel.block}, the plan launches ({expected.threads}, 1, 1)"
    if kernel.stack_bytes:
        yield f"{kernel.stack_bytes} bytes of stack per thread (spills or indexed local arrays); the limit is 0"
    if kernel.static_smem_bytes:
        yield f"{kernel.static_smem_bytes} bytes of static shared memory; the plan lays out all of it dynamically"
    if expected.registers is not None and kernel.registers != expected.registers:
        yield (
            f"{kernel.registers} registers per thread at launch, the plan's setmaxnreg split assumes "
            f"{expected.registers} x {expected.threads} threads"
        )


def _param_problems(kernel: CubinKernel, expected: Expected) -> Iterator[str]:
    if len(kernel.params) != len(expected.params):
        yield f"{len(kernel.params)} parameters, the plan's ABI has {len(expected.params)}"
        return
    for found, (name, offset, size) in zip(kernel.params, expected.params, strict=True):
        if (found.offset, found.size) != (offset, size):
            yield (
                f"parameter {found.index} ({name}) is {found.size} bytes at offset {found.offset}, "
                f"the plan's ABI has {size} bytes at {offset}"
            )


def check_machine_code(cubin_path: Path, ptx: str) -> tuple[int, list[str]]:
    """(instructions that touch local memory, what is wrong), from the disassembly of `cubin_path` beside its PTX.

    Raises ToolchainError when nvdisasm is missing or refuses the file.
    """
    opcodes = [i.opcode for s in disassemble(cubin_path) for i in s.instructions]
    problems = []
    spill_ops = sum(op.split(".", 1)[0] in _LOCAL_MEMORY for op in opcodes)
    if spill_ops:
        problems.append(f"{spill_ops} STL/LDL instructions; the limit is 0: lower register use or give the role more")
    for name, in_ptx, in_sass in _PAIRED:
        asked, got = len(in_ptx.findall(ptx)), sum(bool(in_sass.match(op)) for op in opcodes)
        if asked != got:
            problems.append(f"{asked} {name} in the PTX, {got} in the machine code; they must agree")
    return spill_ops, problems


def check_no_paths(data: dict[str, bytes], private: tuple[str, ...]) -> list[str]:
    """Outputs must not name folders of the machine that built them."""
    return [f"{name} contains the path {p!r}" for name, d in data.items() for p in private if p.encode() in d]
