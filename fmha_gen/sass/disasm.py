"""A cubin's machine code as data: run nvdisasm, parse its listing into functions, instructions and labels.

The listing is that of ``nvdisasm -c`` (CUDA 12.8 to 13.5 were read). A line is an instruction
(``/*0070*/ @P0 BRA `(.L_x_0) ;``), a label (``.L_x_0:``), or a directive; anything else that looks like an
instruction and does not parse is an error, so that no code is lost silently.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ToolchainError

NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_OTHER_SECTION = re.compile(r"^\s*\.section\s+(?!\.text\.)")
_LABEL = re.compile(r"^([.$\w][^\s:]*):\s*$")
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*)$")
_INSTRUCTION = re.compile(r"^(?:\{\s*)?(?:@(!?U?P(?:\d+|T))\s+)?([A-Z][A-Za-z0-9_.]*)(?:\s+(.*?))?\s*;?\s*\}?\s*$")
_TARGET = re.compile(r"`\(([^)]*)\)")
_BRANCH_TABLE = re.compile(r"BRANCH_TARGETS\s+([^\"]*)")
_COMMENT = re.compile(r"\(\*.*?\*\)")
_ERROR_LINE = re.compile(r"\b(?:fatal|error)\s*:", re.I)
_WARNING_LINE = re.compile(r"\b(?:warning|info|note)\s*:", re.I)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One SASS instruction.

    address: byte offset in its section. predicate: ``P0``, ``!P0``, ``UP1`` or None. opcode: with all modifiers, as
    ``SYNCS.PHASECHK.TRANS64.TRYWAIT``. operands: the text after it. targets: labels that it names.
    """

    address: int
    predicate: str | None
    opcode: str
    operands: str
    targets: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The opcode without modifiers: ``SYNCS``."""
        return self.opcode.split(".", 1)[0]


@dataclass(slots=True)
class Section:
    """The code section of one kernel, with the device functions that it calls. labels: name -> index of instruction."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def find_nvdisasm() -> str:
    """Path of nvdisasm: on PATH, or in the installed package nvidia-cuda-nvdisasm. Raises ToolchainError if absent."""
    if found := shutil.which("nvdisasm"):
        return found
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for tool in sorted(Path(root).glob("*/bin/nvdisasm")):
            return str(tool)
    raise ToolchainError(
        f"nvdisasm: not on PATH and the package {NVDISASM_PACKAGE} is not installed; analysing machine code needs it; "
        f"pip install {NVDISASM_PACKAGE}"
    )


def disassemble(cubin: str | Path, where: str | None = None) -> list[Section]:
    """Code sections of the cubin at path `cubin`, in file order; `where` names it in errors, by default its path.

    Raises ToolchainError if nvdisasm is missing or refuses the file.
    """
    where = where or str(cubin)
    tool = find_nvdisasm()
    try:
        run = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, errors="replace", check=False)
    except OSError as e:
        raise ToolchainError(
            f"nvdisasm: {tool} cannot be run ({e.strerror}); pip install {NVDISASM_PACKAGE}, or correct PATH"
        ) from None
    if run.returncode:
        ended = f"exit code {run.returncode}" if run.returncode > 0 else f"signal {-run.returncode}"
        raise ToolchainError(
            f"{where}: nvdisasm failed with {ended}: {_complaint(run.stderr, run.stdout)}; "
            f"is it a cubin, and is nvdisasm as new as the toolkit that made it?"
        )
    return parse(run.stdout, where)


def _complaint(stderr: str, stdout: str) -> str:
    """The line that says why: the first that calls itself fatal or an error, else the last that is no warning."""
    errors, output = ([line.strip() for line in text.splitlines() if line.strip()] for text in (stderr, stdout))
    fatal = [line for line in errors + output if _ERROR_LINE.search(line)]
    plain = [line for line in errors if not _WARNING_LINE.search(line)]
    return (fatal[:1] or plain[-1:] or errors[-1:] or output[-1:] or ["no message"])[0]


def parse(text: str, where: str) -> list[Section]:
    """Parse a listing of ``nvdisasm -c``. Raises ToolchainError naming `where` and the line that does not parse."""
    sections: list[Section] = []
    current: Section | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if m := _SECTION.match(line):
            current = Section(m.group(1))
            sections.append(current)
        elif _OTHER_SECTION.match(line):
            current = None
        elif current is not None:
            _parse_line(current, line, f"{where}: line {number} of the listing")
    return sections


def _parse_line(section: Section, line: str, where: str) -> None:
    if m := _LABEL.match(line):
        section.labels[m.group(1)] = len(section.instructions)
        return
    m = _ADDRESS.match(line)
    if not m:
        return
    body = m.group(2)
    parsed = _INSTRUCTION.match(_COMMENT.sub("", body).strip())
    if not parsed:
        raise ToolchainError(f"{where}: {body.strip()!r} is not an instruction as this reader knows them; report it")
    table = _BRANCH_TABLE.search(body)
    named = table.group(1).split(",") if table else _TARGET.findall(body)
    targets = tuple(t.strip() for t in named if t.strip())
    predicate, opcode, operands = parsed.group(1), parsed.group(2), parsed.group(3) or ""
    section.instructions.append(Instruction(int(m.group(1), 16), predicate, opcode, operands.strip(), targets))
