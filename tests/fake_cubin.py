"""Builds small but well-formed cubins for tests: right headers and tables, no machine code worth running.

Layout as ptxas writes it (see `fmha_gen/elf.py`), for both ABI versions. Real cubins are read in `tests/compile`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_NAMES = {7: (lambda sm, a: sm | (0x800 if a else 0)), 8: (lambda sm, a: 0x6000002 | sm << 8)}


def make_cubin(
    symbols: Sequence[str] = ("k_0",),
    *,
    sm: int = 100,
    specific: bool = True,
    abi_version: int = 8,
    params: Sequence[tuple[int, int]] = ((0, 128), (128, 8), (136, 4)),
    registers: int = 128,
    stack_bytes: int = 0,
    block: tuple[int, int, int] | None = (512, 1, 1),
    code: bytes = b"\0" * 128,
    ptxas: str = "13.4.59",
) -> bytes:
    """A cubin with kernels `symbols`, each with parameter table `params` (offset, size)."""
    sections: list[tuple[str, int, bytes, int]] = [("", 0, b"", 0)]  # name, type, data, link
    strtab, offsets = b"\0", []
    for s in symbols:
        offsets.append(len(strtab))
        strtab += s.encode() + b"\0"
    symtab = bytes(24) + b"".join(struct.pack("<IBBHQQ", o, 0x12, 0x10, 0, 0, 0) for o in offsets)
    info = b""
    for i in range(1, len(symbols) + 1):
        info += struct.pack("<BBHII", 4, 0x2F, 8, i, registers) + struct.pack("<BBHII", 4, 0x11, 8, i, stack_bytes)
    options = f"-O 3 -arch sm_{sm}{'a' if specific else ''}"
    note = f"ptxas\0Cuda compilation tools, release {ptxas[:4]}, V{ptxas}\0{options}\0".encode()
    sections += [(".strtab", 3, strtab, 0), (".symtab", 2, symtab, 1), (".nv.info", 0x70000000, info, 2)]
    sections += [(".note.nv.tkinfo", 7, note, 0)]
    if abi_version == 8:
        sections.append((".nv.compat", 0x70000086, bytes((2, 9, int(specific), 0, 2, 12, 0, 0)), 0))
    for s in symbols:
        sections.append((f".nv.info.{s}", 0x70000000, _kernel_info(params, block, sm), 2))
        sections.append((f".text.{s}", 1, code, 2))
        sections.append((f".nv.shared.{s}", 8, b"\0" * 1024, 0))
    flags = _NAMES[abi_version](sm, specific)
    return _assemble(sections, flags, abi_version)


def _kernel_info(params: Sequence[tuple[int, int]], block: tuple[int, int, int] | None, sm: int) -> bytes:
    out = b""
    for i, (offset, size) in reversed(list(enumerate(params))):
        out += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, i, offset, size << 18 | 0x1F000)
    total = max((o + s for o, s in params), default=0)
    out += struct.pack("<BBH", 3, 0x19, total)
    out += struct.pack("<BBHIHH", 4, 0x0A, 8, 1, 0x380 if sm >= 100 else 0x210, total)
    if block is not None:
        out += struct.pack("<BBHIII", 4, 0x10, 12, *block)
    return out


def _assemble(sections: list[tuple[str, int, bytes, int]], flags: int, abi_version: int) -> bytes:
    names, name_offsets = b"", []
    for name, *_ in [*sections, (".shstrtab", 3, b"", 0)]:
        name_offsets.append(len(names))
        names += name.encode() + b"\0"
    everything = [*sections, (".shstrtab", 3, names, 0)]
    body, headers, at = b"", b"", 64
    for (_, kind, data, link), name_offset in zip(everything, name_offsets, strict=True):
        headers += struct.pack("<IIQQQQIIQQ", name_offset, kind, 0, 0, at, len(data), link, 0, 4, 0)
        if kind != 8:
            body += data
            at += len(data)
    ident = b"\x7fELF" + bytes((2, 1, 1, 0x41, abi_version)) + bytes(7)
    count = len(everything)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at, flags, 64, 0, 0, 64, count, count - 1)
    return header + body + headers
