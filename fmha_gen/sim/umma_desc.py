"""The 64-bit shared memory descriptor and the 32-bit instruction descriptor of tcgen05.mma.

Sources: the matrix-descriptor and instruction-descriptor tables of the PTX ISA (9.x), and the public CuTe descriptor
headers of sm_100. What the hardware may accept but the simulator does not model is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

_SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}
_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
}
_K = {"f16": 16, "tf32": 8, "f8f6f4": 32}  # 32 bytes of every kind
_ELEMENT_BYTES = {"f16": 2, "tf32": 4, "f8f6f4": 1}


class UmmaError(ValueError):
    """A descriptor or shape that tcgen05 does not accept, or that this module does not model; the text says which."""


@dataclass(frozen=True)
class SmemDesc:
    """A decoded shared memory descriptor: bytes throughout; swizzle_bytes is 0 (none), 32, 64 or 128."""

    start: int
    lbo: int
    sbo: int
    swizzle_bytes: int


@dataclass(frozen=True, eq=False)
class InstrDesc:
    """A decoded instruction descriptor; one object per value, so identity is equality.

    m, n, k: the instruction's shape (of the CTA pair under cta_group 2). Formats: "f16 bf16 tf32 e4m3 e5m2"; majors:
    "k" or "mn". The accumulator is float32.
    """

    kind: str
    cta_group: int
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    a_major: str
    b_major: str
    negate_a: bool
    negate_b: bool

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.kind]

    @property
    def rows(self) -> int:
        """Rows of A and D that one CTA holds."""
        return self.m // self.cta_group

    @property
    def b_rows(self) -> int:
        """Rows of B (columns of D) that one CTA's shared memory holds."""
        return self.n // self.cta_group


@lru_cache(maxsize=65536)
def decode_smem_desc(desc: int) -> SmemDesc:
    """Decode a 64-bit shared memory descriptor. Raises UmmaError for fields that are wrong or not modelled."""

    def field(low: int, bits: int) -> int:
        return desc >> low & ((1 << bits) - 1)

    what = f"shared memory descriptor {desc:#018x}"
    if field(46, 3) != 1:
        raise UmmaError(f"{what}: bits 46-48 are {field(46, 3):#05b}; sm_100 descriptors hold 0b001 there")
    if field(14, 2) or field(30, 2) or field(53, 8):
        raise UmmaError(f"{what}: reserved bits (14-15, 30-31, 53-60) are not zero")
    if field(52, 1):
        raise UmmaError(f"{what}: absolute leading-dimension mode (bit 52) is not modelled")
    if field(49, 3):
        raise UmmaError(f"{what}: base offset {field(49, 3)} is not modelled; align the swizzle pattern instead")
    if field(61, 3) not in _SWIZZLES:
        raise UmmaError(f"{what}: swizzle mode {field(61, 3)} is not modelled; 0 none, 2 128B, 4 64B and 6 32B are")
    return SmemDesc(field(0, 14) << 4, field(16, 14) << 4, field(32, 14) << 4, _SWIZZLES[field(61, 3)])


@lru_cache(maxsize=1024)
def decode_instr_desc(idesc: int, kind: str, cta_group: int) -> InstrDesc:
    """Decode a 32-bit instruction descriptor of ``.kind::{f16,tf32,f8f6f4}``.

    Raises UmmaError for another kind, a reserved or unmodelled field, or a shape that the kind does not have.
    """

    def field(low: int, bits: int) -> int:
        return idesc >> low & ((1 << bits) - 1)

    what = f"instruction descriptor {idesc & 0xFFFFFFFF:#010x} (kind::{kind}, cta_group::{cta_group})"
    if kind not in _FORMATS or cta_group not in (1, 2):
        raise UmmaError(f"{what}: kinds {', '.join(_FORMATS)} and cta_group 1 and 2 are modelled")
    if field(2, 1) or field(0, 2):
        raise UmmaError(f"{what}: sparse operands (bits 0-2) are not modelled")
    if field(3, 1) or field(6, 1) or field(23, 1) or field(29, 1) or field(30, 2):
        raise UmmaError(f"{what}: saturate, reserved and maximum-shift bits (3, 6, 23, 29, 30-31) must be zero here")
    if field(4, 2) != 1:
        raise UmmaError(f"{what}: accumulator format {field(4, 2)} (bits 4-5); only float32 (1) is modelled")
    formats = _FORMATS[kind]
    for name, value in (("A", field(7, 3)), ("B", field(10, 3))):
        if value not in formats:
            raise UmmaError(f"{what}: format {value} of {name}; kind::{kind} here has {formats}")
    if kind == "f16" and field(7, 3) != field(10, 3):
        raise UmmaError(
            f"{what}: A is {formats[field(7, 3)]} and B {formats[field(10, 3)]}; kind::f16 needs one format"
        )
    if kind == "tf32" and field(15, 2):
        raise UmmaError(f"{what}: MN-major 32-bit operands need the 128B/32B-atom swizzle, which is not modelled")
    m, n = field(24, 5) << 4, field(17, 6) << 3
    _check_shape(what, kind, cta_group, m, n)
    majors = ("k", "mn")
    return InstrDesc(kind, cta_group, m, n, _K[kind], formats[field(7, 3)], formats[field(10, 3)], majors[field(15, 1)],
                     majors[field(16, 1)], bool(field(13, 1)), bool(field(14, 1)))  # fmt: skip


def _check_shape(what: str, kind: str, cta_group: int, m: int, n: int) -> None:
    steps = {1: {64: 8, 128: 16}, 2: {128: 16, 256: 16}}[cta_group]
    if kind == "f8f6f4" and cta_group == 2:
        steps = {128: 32, 256: 32}
    if m not in steps:
        raise UmmaError(f"{what}: M {m}; cta_group::{cta_group} has M {' and '.join(map(str, steps))}")
    step = steps[m]
    if n % step or not step <= n <= 256:
        raise UmmaError(f"{what}: N {n}; with M {m} it must be a multiple of {step} from {step} to 256")
