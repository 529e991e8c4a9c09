"""What instructions are for: the unit that runs each opcode, and the role of a loop from its instruction mix.

Units name where an instruction goes after it took its issue slot. The assignment of the arithmetic pipes follows
NVIDIA's profiler documentation (pipes `alu`, `fma`, `xu`, `lsu`, `uniform`, `tensor`, `tma`); opcodes that it does not
list stand in the closest group. Issue slots do not depend on it: every instruction takes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .disasm import Instruction

_UNIT_OPCODES = {
    "xu": "MUFU F2I I2F F2F I2I FRND POPC FLO BREV",
    "fma": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 HFMA2 HADD2 HMUL2 IMAD IMUL IDP IDP4A FSWZADD",
    "alu": """FMNMX FMNMX3 FSEL FSET FSETP FCHK SEL ISETP LOP3 PLOP3 SHF SHL SHR IADD3 IADD VIADD VIADD3 VIADDMNMX
        VIMNMX VIMNMX3 IMNMX IABS PRMT LEA MOV R2P P2R BMSK SGXT HMNMX2 VHMNMX HSETP2 HSET2 CS2R I2FP CREDUX""",
    "convert": "F2FP F2IP I2IP",
    "tmem": "LDTM STTM LDT STT UTCCP UTCSHIFT UTCATOMSWS",
    "tensor": """UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCMXQMMA HGMMA QGMMA IGMMA BGMMA HMMA QMMA IMMA DMMA OMMA
        WARPGROUP""",
    "tma": "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UBLKPF",
    "lsu": """LDS STS LDSM STSM LDG STG LD ST LDL STL ATOM ATOMG ATOMS RED REDG REDAS STAS LDGSTS LDGDEPBAR SHFL MATCH
        CCTL MEMBAR QSPC""",
    "sync": """SYNCS BAR UTCBAR FENCE DEPBAR WARPSYNC ERRBAR CGAERRBAR NANOSLEEP UCGABAR_ARV UCGABAR_WAIT USETMAXREG
        UVIRTCOUNT ACQBULK ARRIVES""",
    "constant": "LDC LDCU",
    "control": """BRA BRX BRXU JMP JMX JMXU CALL RET EXIT BSSY BSYNC BREAK NOP YIELD KILL BPT RTT PREEXIT RPCMOV B2R
        BMOV R2B ENDCOLLECTIVE ELECT VOTE VOTEU REDUX S2R S2UR LEPC PMTRIG""",
}
UNITS = (*_UNIT_OPCODES, "uniform", "other")
_UNIT_OF = {opcode: unit for unit, opcodes in _UNIT_OPCODES.items() for opcode in opcodes.split()}

_UMMA = ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCMXQMMA")
_WARP_MMA = ("HGMMA", "QGMMA", "IGMMA", "BGMMA", "HMMA", "QMMA", "IMMA", "DMMA")
_BULK_LOADS = ("UTMALDG", "UBLKCP", "LDGSTS")
_STORES = ("UTMASTG", "UTMAREDG", "STG", "STS", "STSM", "ST")
_MASKED_SELECTS = 16  # selects in a softmax loop from here on are a mask; the rescale decision takes a handful
_SOFTMAX_EXPONENTIALS = 8


def unit(ins: Instruction) -> str:
    """The unit of an instruction: a member of `UNITS`."""
    base = ins.base
    if found := _UNIT_OF.get(base):
        return found
    return "uniform" if base.startswith("U") or base == "R2UR" else "other"


def is_move(ins: Instruction) -> bool:
    """Whether an instruction only moves a register or a constant into a register: MOV, or arithmetic on zeros."""
    if ins.base == "MOV" or ins.opcode.startswith("IMAD.MOV"):
        return True
    args = [a.strip() for a in ins.operands.split(",")][1:]
    if ins.opcode.startswith("IMAD.U32") or ins.base == "HFMA2":
        return len(args) >= 3 and args[0].lstrip("-") == args[1].lstrip("-") == "RZ"
    return ins.base == "FADD" and "RZ" in [a.lstrip("-") for a in args]


@dataclass(frozen=True, slots=True)
class Mix:
    """Instructions of a piece of code, counted. opcodes: by base opcode; full: with modifiers."""

    opcodes: Counter[str]
    full: Counter[str]
    units: Counter[str]
    moves: int
    total: int

    def any_of(self, names: Iterable[str]) -> int:
        """How many instructions have one of these base opcodes."""
        return sum(self.opcodes[n] for n in names)


def count(instructions: Iterable[Instruction]) -> Mix:
    """Count instructions."""
    code = list(instructions)
    return Mix(
        Counter(i.base for i in code),
        Counter(i.opcode for i in code),
        Counter(unit(i) for i in code),
        sum(is_move(i) for i in code),
        len(code),
    )


@dataclass(frozen=True, slots=True)
class Role:
    """What a loop is for. masked: of a softmax, whether it masks; None for others. evidence: the counts that say so."""

    name: str
    masked: bool | None
    evidence: str


def role(mix: Mix) -> Role:
    """The role of a loop: softmax, mma, mma_softmax, correction, epilogue, store, load or other."""
    umma, warp_mma = mix.any_of(_UMMA), mix.any_of(_WARP_MMA)
    exponentials = mix.full["MUFU.EX2"]
    selects = mix.opcodes["FSEL"] + mix.opcodes["SEL"]
    if exponentials >= _SOFTMAX_EXPONENTIALS:
        masked = selects >= _MASKED_SELECTS
        name = "mma_softmax" if umma or warp_mma else "softmax"
        tensor = _say(mix, (*_UMMA, *_WARP_MMA))
        says = [f"{exponentials} MUFU.EX2", *tensor, f"{selects} selects ({'masks' if masked else 'no mask'})"]
        return Role(name, masked, ", ".join(says))
    if umma or warp_mma:
        return Role("mma", None, ", ".join([*_say(mix, (*_UMMA, *_WARP_MMA)), f"{mix.opcodes['MUFU']} MUFU"]))
    return _moving_role(mix)


def _moving_role(mix: Mix) -> Role:
    """Roles that compute nothing but scale and move data."""
    scales = mix.any_of(("FMUL2", "FMUL"))
    if mix.opcodes["LDTM"] and mix.opcodes["STTM"] and scales >= mix.opcodes["LDTM"]:
        says = _say(mix, ("LDTM", "FMUL2", "FMUL", "STTM"))
        return Role("correction", None, ", ".join(says) + ": TMEM scaled in place")
    if mix.opcodes["LDTM"] and mix.any_of(_STORES):
        return Role("epilogue", None, ", ".join(_say(mix, ("LDTM", "F2FP", *_STORES))) + ": TMEM written out")
    if mix.any_of(_BULK_LOADS):
        return Role("load", None, ", ".join(_say(mix, _BULK_LOADS)))
    if mix.any_of(("UTMASTG", "UTMAREDG", "STG", "ST")):
        return Role("store", None, ", ".join(_say(mix, ("UTMASTG", "UTMAREDG", "STG", "ST"))))
    top = ", ".join(f"{n} {op}" for op, n in mix.opcodes.most_common(3))
    return Role("other", None, f"mostly {top}" if top else "empty")


def _say(mix: Mix, names: Iterable[str]) -> list[str]:
    return [f"{mix.opcodes[n]} {n}" for n in names if mix.opcodes[n]]
