"""Limits per GPU architecture, as data with their source. Standard library only.

Rates are per SM and clock. Sources: CUDA C++ Programming Guide (compute capabilities: shared memory, registers),
PTX ISA (tensor memory, setmaxnreg), NVIDIA's published peak rates divided by SMs and clock (MMA, MUFU).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import SpecError


@dataclass(frozen=True, slots=True)
class Arch:
    """One compilation target.

    smem_bytes: dynamic shared memory that a CTA can opt in to (227 KiB of the SM's 228: one KiB is the system's).
    tmem_cols: columns of tensor memory, 128 lanes x 32 bits each; 0 where there is none.
    mma_flop_per_clk: dense 16-bit. mufu_per_clk: exponentials. smem_bytes_per_clk: shared-memory bandwidth.
    param_base_bytes: where kernel parameters start in the constant bank; the assembler aligns absolute addresses, so
    offsets of 64-byte aligned parameters depend on it (measured with ptxas 12.9 and 13.4).
    """

    name: str
    compute_capability: tuple[int, int]
    smem_bytes: int
    smem_align_bytes: int
    tmem_cols: int
    registers: int
    max_registers_per_thread: int
    mma_flop_per_clk: int
    mufu_per_clk: int
    smem_bytes_per_clk: int
    num_sms: int
    param_base_bytes: int
    sub_cores: int = 4

    @property
    def id(self) -> str:
        """The name as kernel ids write it: ``sm100a``."""
        return self.name.replace("_", "")


_SM_100A = Arch(
    name="sm_100a",
    compute_capability=(10, 0),
    smem_bytes=232448,
    smem_align_bytes=1024,
    tmem_cols=512,
    registers=65536,
    max_registers_per_thread=255,
    mma_flop_per_clk=8192,
    mufu_per_clk=16,
    smem_bytes_per_clk=128,
    num_sms=148,
    param_base_bytes=0x380,
)

ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        _SM_100A,
        # B300: twice the exponential rate of B200, and the rest alike.
        replace(_SM_100A, name="sm_103a", compute_capability=(10, 3), mufu_per_clk=32),
        replace(
            _SM_100A,
            name="sm_90a",
            compute_capability=(9, 0),
            tmem_cols=0,
            mma_flop_per_clk=4096,
            num_sms=132,
            param_base_bytes=0x210,
        ),
    )
}

# Spellings that people use for a target. Every one is listed: nothing is derived by comparing numbers.
ALIASES: dict[str, str] = {
    "sm_100a": "sm_100a",
    "sm100a": "sm_100a",
    "100a": "sm_100a",
    "10.0a": "sm_100a",
    "sm_103a": "sm_103a",
    "sm103a": "sm_103a",
    "103a": "sm_103a",
    "10.3a": "sm_103a",
    "sm_90a": "sm_90a",
    "sm90a": "sm_90a",
    "90a": "sm_90a",
    "9.0a": "sm_90a",
}


def get_arch(name: str, where: str = "arch") -> Arch:
    """The limits of `name`, one of `ALIASES`. Raises SpecError that lists what is accepted."""
    target = ALIASES.get(name)
    if target is None:
        raise SpecError([f"{where}: arch={name!r}: not a known target; use one of {', '.join(ARCHS)}"])
    return ARCHS[target]


def arch_of_device(compute_capability: tuple[int, int]) -> Arch | None:
    """The target whose cubins run on a device of that compute capability; None if there is none."""
    for arch in ARCHS.values():
        if arch.compute_capability == compute_capability:
            return arch
    return None
