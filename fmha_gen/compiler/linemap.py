"""PTX line -> source line, for a PTX text that carries no debug information itself.

A kernel is compiled twice, with and without line information; the two PTX texts are the same apart from debug lines
(`build` proves that for every kernel, and fails otherwise), so the positions of one hold for the other. The plain
PTX and cubin ship, with this map beside them.

File format (JSON): ``{"files": [...], "spans": [[ptx_line, file, source_line], ...]}``; a span holds from its
1-based PTX line up to the next span's; source_line 0 means that nothing is known. Names in `files` are relative:
the rendered source is `SOURCE_NAME`, helpers are ``fmha_gen/device/...``, the compiler's own files ``cutlass/...``.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

SOURCE_NAME = "kernel.py"

_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"')
_ASM_BEGIN, _ASM_END = "// begin inline asm", "// end inline asm"
_ROOTS = ("fmha_gen", "cutlass")


@dataclass(frozen=True, slots=True)
class LineMap:
    """files: relative names. spans: (first PTX line, index into files, source line), in PTX order."""

    files: tuple[str, ...]
    spans: tuple[tuple[int, int, int], ...]

    def lookup(self, ptx_line: int) -> tuple[str, int] | None:
        """(file, line) of a 1-based PTX line, or None where nothing is known."""
        i = bisect.bisect_right(self.spans, ptx_line, key=lambda s: s[0]) - 1
        if i < 0 or self.spans[i][2] == 0:
            return None
        return self.files[self.spans[i][1]], self.spans[i][2]

    def to_json(self) -> str:
        """Deterministic text, one span per line."""
        spans = ",\n".join(json.dumps(s) for s in self.spans)
        return f'{{"files": {json.dumps(self.files)},\n"spans": [\n{spans}\n]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> LineMap:
        data: dict[str, Any] = json.loads(text)
        return cls(tuple(data["files"]), tuple((int(a), int(b), int(c)) for a, b, c in data["spans"]))


def build(plain: str, with_lines: str, source_path: str) -> LineMap:
    """The map of `plain`, from the PTX of the same kernel `with_lines`; `source_path` is the rendered source.

    Raises ValueError if the texts differ in anything but debug lines.
    """
    paths = {int(m[1]): m[2] for line in with_lines.splitlines() if (m := _FILE.match(line))}
    numbers = {n: i for i, n in enumerate(sorted(paths))}
    files = tuple(_relative(paths[n], source_path) for n in sorted(paths))
    code = [(n, text) for n, line in enumerate(plain.splitlines(), 1) if (text := line.strip())]
    spans: list[tuple[int, int, int]] = []
    at, here = 0, (0, 0)
    in_asm = False  # positions in there count the lines of the assembly text on from the line that wrote it
    for number, line in enumerate(with_lines.splitlines(), 1):
        text = line.strip()
        if m := _LOC.match(line):
            if int(m[3]) and int(m[1]) in numbers and not in_asm:  # column 0: compiler's own, it stays where it was
                here = (numbers[int(m[1])], int(m[2]))
        elif text and not _FILE.match(line):
            in_asm = text == _ASM_BEGIN or (in_asm and text != _ASM_END)
            if at >= len(code) or code[at][1] != text:
                other = f"line {code[at][0]}: {code[at][1]!r}" if at < len(code) else "its end"
                raise ValueError(f"line {number} with line information is {text!r}, without it is {other}")
            if not spans or spans[-1][1:] != here:
                spans.append((code[at][0], *here))
            at += 1
    if at != len(code):
        raise ValueError(f"with line information the PTX ends before line {code[at][0]}: {code[at][1]!r}")
    return LineMap(files, tuple(spans))


def _relative(path: str, source_path: str) -> str:
    """A name without the machine's folders."""
    if path == source_path:
        return SOURCE_NAME
    parts = PurePosixPath(path).parts
    for root in _ROOTS:
        if root in parts:
            last = len(parts) - 1 - parts[::-1].index(root)
            return "/".join(parts[last:])
    return parts[-1] if parts else path
