"""What a cubin's machine code says: resources, loops by role, issue slots and counts by unit. Any cubin is read."""

from .disasm import Instruction, Section, disassemble, find_nvdisasm, parse
from .report import KernelReport, LoopReport, RegisterChange, SpinReport, read_kernels

__all__ = [
    "Instruction",
    "KernelReport",
    "LoopReport",
    "RegisterChange",
    "Section",
    "SpinReport",
    "disassemble",
    "find_nvdisasm",
    "parse",
    "read_kernels",
]
