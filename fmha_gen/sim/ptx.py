"""What a PTX text is made of: modules, kernels, instructions and operands. `parser` makes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import SimError

_SIZES = {1: "b8 u8 s8", 2: "b16 u16 s16 f16 bf16", 4: "b32 u32 s32 f32 f16x2 bf16x2", 8: "b64 u64 s64 f64", 16: "b128"}
TYPE_BYTES = {name: size for size, names in _SIZES.items() for name in names.split()}


@dataclass(eq=False, slots=True)
class Reg:
    """A virtual register of one warp. width: bits per lane (1: predicate). offset: bytes into the register file."""

    name: str
    width: int
    index: int
    offset: int = -1

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate. `bits`: the integer, or the bit pattern of a float literal of `float_bits` (0: an integer)."""

    bits: int
    float_bits: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A read-only register such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand ``_``."""


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate operand ``!p``."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: either side may be a Sink."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]`` or, for tensor copies, ``[base, {coordinates}]`` with an optional second vector."""

    base: object
    offset: int = 0
    coords: Vector | None = None
    extra: Vector | None = None


Operand = Reg | Imm | Symbol | Special | Sink | Not | Pair | Vector | Address


@dataclass(eq=False, slots=True)
class Instr:
    """One instruction. line: 1-based in the PTX text. loc: (file, line) of the source, or None. target: of a branch."""

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[object, ...]
    guard: Reg | None
    guard_negated: bool
    line: int
    loc: tuple[str, int] | None
    text: str
    target: int = -1
    index: int = -1

    def where(self) -> str:
        src = f" ({self.loc[0]}:{self.loc[1]})" if self.loc else ""
        text = self.text if len(self.text) <= 100 else self.text[:97] + "..."
        return f"PTX line {self.line}{src}: {text}"


class Unsupported(SimError):
    """An instruction, modifier, operand or directive that the simulator does not model."""

    def __init__(self, instr: Instr | None, what: str) -> None:
        super().__init__(f"{instr.where()}: {what}" if instr is not None else what)


@dataclass(slots=True)
class ParamDecl:
    name: str
    type: str
    align: int
    size: int
    offset: int


@dataclass(slots=True)
class Kernel:
    """An entry. labels are resolved: Instr.target is an index into instrs."""

    name: str
    params: dict[str, ParamDecl]
    instrs: list[Instr] = field(default_factory=list)
    regs: list[Reg] = field(default_factory=list)
    reqntid: tuple[int, ...] | None = None
    maxnreg: int | None = None
    cluster: tuple[int, ...] | None = None
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (align, bytes; 0: dynamic)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params.values()), default=0)


@dataclass(slots=True)
class Module:
    version: str = ""
    target: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)

    def kernel(self, name: str | None = None) -> Kernel:
        """The entry `name`, or the only one. Raises SimError naming the entries there are."""
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise SimError(f"PTX: entry {name!r} is not one of {sorted(self.kernels)}; name one of these")
        return self.kernels[name]
