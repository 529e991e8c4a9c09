"""A reader for cubins: architecture, symbols, resources and parameter tables, from the ELF alone.

Standard library only. The layout was established by reading cubins of ptxas 12.9 and 13.4 (ABI versions 7 and 8, sm_80
to sm_120) beside what cuobjdump prints of them; `tests/unit/test_elf.py` repeats that comparison.

Attributes live in ``.nv.info`` (per module: registers, frame sizes, keyed by symbol) and ``.nv.info.<kernel>``
(parameters, block size). Each is ``format, attribute, payload``: formats 1 to 3 take four bytes in all, format 4 has a
16-bit size and that many bytes.

Anything malformed raises BundleError that names `where`: input is a file that someone may have damaged.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

from .errors import BundleError

EM_CUDA = 190
RESERVED_SMEM_BYTES = 1024  # of every CTA from sm_90 on; ptxas counts it in .nv.shared.<kernel>, the driver does not

_EIATTR_MAX_THREADS = 0x05
_EIATTR_PARAM_CBANK = 0x0A
_EIATTR_REQNTID = 0x10
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_MIN_STACK_SIZE = 0x12
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_CBANK_PARAM_SIZE = 0x19
_EIATTR_REGCOUNT = 0x2F
_PER_SYMBOL_ATTRIBUTES = frozenset((_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE))
_KERNEL_ATTRIBUTES = frozenset((_EIATTR_KPARAM_INFO, _EIATTR_CBANK_PARAM_SIZE, _EIATTR_PARAM_CBANK, _EIATTR_REQNTID))
_EICOMPAT_ARCH_SPECIFIC = 0x09  # value 1: the "a" of sm_90a, sm_100a (toolkit 13)

_COMPAT_ATTRIBUTES = frozenset((_EICOMPAT_ARCH_SPECIFIC,))

_SHT_SYMTAB = 2
_SHT_NOBITS = 8
_HEADER = struct.Struct("<18xH20xQI6xHHH")  # machine; of the section table: offset; flags; entry bytes, entries, names
_SECTION = struct.Struct("<II16xQQI20x")  # name, type, start, size, link
_SYMBOL = struct.Struct("<IBB18x")  # name, info, other
_ATTRIBUTE = struct.Struct("<BBH")
_PER_SYMBOL = struct.Struct("<II")
_KPARAM = struct.Struct("<IHHI")
_STT_FUNC = 2
_STO_ENTRY = 0x10


class KernelParam(NamedTuple):
    """One entry of a kernel's parameter table; offset and size in bytes, offset from the first parameter."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class CubinKernel:
    """What a cubin says about one kernel.

    registers: per thread at launch. stack_bytes: local memory per thread (spills, indexed local arrays).
    static_smem_bytes: without the KiB that the hardware reserves, as the driver reports it.
    code_bytes: size of the machine code. param_bytes: size of the parameter buffer.
    block: required block size, or None. param_base: address of the first parameter in constant bank 0.
    """

    symbol: str
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    code_bytes: int
    params: tuple[KernelParam, ...]
    param_bytes: int
    param_base: int
    block: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Cubin:
    """A whole cubin. arch: ``sm_100a``. ptxas, ptxas_options: tool version and command line, if noted."""

    arch: str
    abi_version: int
    ptxas: str | None
    ptxas_options: str | None
    kernels: tuple[CubinKernel, ...]

    def kernel(self, symbol: str, where: str) -> CubinKernel:
        """The kernel called `symbol`. Raises BundleError naming those that are there."""
        for k in self.kernels:
            if k.symbol == symbol:
                return k
        names = ", ".join(k.symbol for k in self.kernels) or "none"
        raise BundleError(f"{where}: no kernel {symbol!r} in the cubin, which has: {names}; rebuild the bundle")


# Compiled at import: opening a bundle up to the first launch takes less than these do.
_ARCH_OPTION = re.compile(r"-arch\s+sm_(\d+)([af]?)\b")
_RELEASE = re.compile(r"release [\d.]+, V([\d.]+)")
_TEXT = re.compile(rb"[\x20-\x7e]{2,}")


def read_cubin(data: bytes, where: str, tools: bool = True) -> Cubin:
    """Parse a cubin. `where` names it in errors. Raises BundleError for anything that is not a whole, sane cubin.

    tools: whether to read what made it; a launcher does not ask.
    """
    try:
        elf = _Elf(data)
        per_symbol = _per_symbol(elf)
        kernels = tuple([_read_kernel(elf, index, name, per_symbol) for index, name in elf.kernels])
        ptxas, options = _toolchain(elf) if tools else (None, None)
        return Cubin(_arch(elf), elf.abi_version, ptxas, options, kernels)
    except (struct.error, IndexError, UnicodeDecodeError, _Malformed) as e:
        raise BundleError(f"{where}: not a whole cubin ({e}; {len(data)} bytes); rebuild or copy it again") from None


_BAD_NAME = "a name lies outside its string table"


class _Malformed(Exception):
    pass


class _Section(NamedTuple):
    type: int
    start: int
    size: int
    link: int


class _Elf:
    """Header, sections by name, and kernels, (symbol index, name), of a little-endian ELF64."""

    def __init__(self, data: bytes) -> None:
        if data[:4] != b"\x7fELF":
            raise _Malformed(f"starts with {data[:4]!r}, not with the ELF magic")
        if len(data) < _HEADER.size:
            raise _Malformed("shorter than an ELF header")
        if data[4] != 2 or data[5] != 1:
            raise _Malformed("not a little-endian 64-bit ELF")
        machine, offset, self.flags, entsize, count, names = _HEADER.unpack_from(data)
        if machine != EM_CUDA:
            raise _Malformed(f"machine {machine}, a cubin has {EM_CUDA}")
        if entsize != _SECTION.size or names >= count:
            raise _Malformed("its section table is damaged")
        if offset + entsize * count > len(data):
            raise _Malformed(f"cut off: its section table ends at byte {offset + entsize * count}")
        self.abi_version = data[8]
        self.data = data
        raw = list(_SECTION.iter_unpack(data[offset : offset + entsize * count]))
        strings = data[raw[names][2] : raw[names][2] + raw[names][3]]
        self.sections: dict[bytes, _Section] = {}
        for name, kind, start, size, link in raw:
            if start + size > len(data) and kind != _SHT_NOBITS:
                raise _Malformed(f"cut off: a section ends at byte {start + size}")
            self.sections[_string(strings, name)] = _new(_Section, (kind, start, size, link))
        self.kernels = self._read_kernels(raw)

    def _read_kernels(self, raw: list[tuple[int, ...]]) -> list[tuple[int, str]]:
        table = next((s for s in self.sections.values() if s.type == _SHT_SYMTAB), None)
        if table is None or table.size % _SYMBOL.size or table.link >= len(raw):
            raise _Malformed("no symbol table")
        _, kind, start, size, _ = raw[table.link]
        strings = b"" if kind == _SHT_NOBITS else self.data[start : start + size]
        last_end = strings.rfind(b"\0")
        found = []
        for index, (name, info, other) in enumerate(_SYMBOL.iter_unpack(self.content(table))):
            if name > last_end:
                raise _Malformed(_BAD_NAME)
            if info & 15 == _STT_FUNC and other & _STO_ENTRY:
                found.append((index, _string(strings, name).decode()))
        return found

    def section(self, name: str) -> _Section:
        found = self.sections.get(name.encode())
        if found is None:
            raise _Malformed(f"no section {name}")
        return found

    def content(self, section: _Section) -> bytes:
        """The bytes of one section: most are code, which nobody asks for."""
        return b"" if section.type == _SHT_NOBITS else self.data[section.start : section.start + section.size]


_new = tuple.__new__


def _string(table: bytes, offset: int) -> bytes:
    end = table.find(b"\0", offset)
    if end < 0:
        raise _Malformed(_BAD_NAME)
    return table[offset:end]


def _attributes(data: bytes, wanted: frozenset[int]) -> list[tuple[int, bytes]]:
    """(attribute, payload) of those attributes of an .nv.info or .nv.compat section that are `wanted`."""
    found = []
    at, last, unpack = 0, len(data) - 4, _ATTRIBUTE.unpack_from
    while at <= last:
        form, attribute, size = unpack(data, at)
        at += 4
        if form == 4:
            if attribute in wanted:
                found.append((attribute, data[at : at + size]))
            at += size
        elif not 1 <= form <= 3:
            raise _Malformed(f"attribute format {form} is unknown")
        elif attribute in wanted:
            found.append((attribute, data[at - 2 : at]))
    if at > len(data):
        raise _Malformed("an attribute is longer than its section")
    return found


def _arch(elf: _Elf) -> str:
    """Name of the target, e.g. ``sm_100a``; a family target ("f") is known only from the noted command line."""
    if elf.abi_version == 7:
        sm, specific = elf.flags & 0xFF, bool(elf.flags & 0x800)
    elif elf.abi_version == 8:
        sm, specific = elf.flags >> 8 & 0xFF, bool(elf.flags & 0x8)
    else:
        raise _Malformed(f"ABI version {elf.abi_version}; this reader knows 7 and 8")
    compat = elf.sections.get(b".nv.compat")
    if compat is not None:
        specific |= any(p[0] == 1 for _, p in _attributes(elf.content(compat), _COMPAT_ATTRIBUTES))
    if specific:
        return f"sm_{sm}a"
    noted = _ARCH_OPTION.search(_toolchain(elf)[1] or "")
    family = noted is not None and noted[1] == str(sm) and noted[2] == "f"
    return f"sm_{sm}{'f' if family else ''}"


def _toolchain(elf: _Elf) -> tuple[str | None, str | None]:
    """(ptxas version as in ``13.4.59``, command line) from .note.nv.tkinfo."""
    note = elf.sections.get(b".note.nv.tkinfo")
    if note is None:
        return None, None
    texts = [t.decode("ascii", "replace") for t in _TEXT.findall(elf.content(note))]
    version = next((m[1] for t in texts if (m := _RELEASE.search(t))), None)
    options = next((t.strip() for t in texts if "-arch" in t), None)
    return version, options


def _per_symbol(elf: _Elf) -> dict[tuple[int, int], int]:
    """Module-level attributes of kernels: (attribute, symbol index) -> value."""
    found: dict[tuple[int, int], int] = {}
    for attribute, payload in _attributes(elf.content(elf.section(".nv.info")), _PER_SYMBOL_ATTRIBUTES):
        symbol, value = _PER_SYMBOL.unpack(payload)
        found.setdefault((attribute, symbol), value)
    return found


def _read_kernel(elf: _Elf, symbol: int, name: str, per_symbol: dict[tuple[int, int], int]) -> CubinKernel:
    params: list[KernelParam] = []
    unpack = _KPARAM.unpack
    block: tuple[int, int, int] | None = None
    param_bytes = param_base = 0
    for attribute, payload in _attributes(elf.content(elf.section(f".nv.info.{name}")), _KERNEL_ATTRIBUTES):
        if attribute == _EIATTR_KPARAM_INFO:
            _, index, offset, bits = unpack(payload)
            params.append(_new(KernelParam, (index, offset, bits >> 18 & 0x3FFF)))
        elif attribute == _EIATTR_CBANK_PARAM_SIZE:
            param_bytes = struct.unpack("<H", payload)[0]
        elif attribute == _EIATTR_PARAM_CBANK:
            param_base = struct.unpack("<IHH", payload)[1]
        else:
            block = struct.unpack("<III", payload)
    params.sort()
    for position, (index, offset, size) in enumerate(params):
        if index != position or offset + size > param_bytes:
            raise _Malformed(f"the parameter table of {name} is damaged")
    shared = elf.sections.get(f".nv.shared.{name}".encode())
    static_smem = shared.size if shared else 0
    if static_smem >= RESERVED_SMEM_BYTES and _sm(elf) >= 90:
        static_smem -= RESERVED_SMEM_BYTES
    return CubinKernel(
        symbol=name,
        registers=per_symbol.get((_EIATTR_REGCOUNT, symbol), 0),
        stack_bytes=max(
            per_symbol.get((_EIATTR_FRAME_SIZE, symbol), 0), per_symbol.get((_EIATTR_MIN_STACK_SIZE, symbol), 0)
        ),
        static_smem_bytes=static_smem,
        code_bytes=elf.section(f".text.{name}").size,
        params=tuple(params),
        param_bytes=param_bytes,
        param_base=param_base,
        block=block,
    )


def _sm(elf: _Elf) -> int:
    return elf.flags & 0xFF if elf.abi_version == 7 else elf.flags >> 8 & 0xFF
