"""PTX text -> modules, kernels and instructions.

A line tokenizer for what NVVM and inline assembly write: nested ``{ }`` scopes with registers and labels that repeat,
``.reg`` ranges, vector and predicate-pair operands, tensor-copy addresses, ``.loc`` line information. What a construct
means is decided elsewhere; what cannot be parsed is refused with its line.
"""

from __future__ import annotations

import re
import struct

from ..errors import SimError
from .ptx import (  # fmt: skip
    TYPE_BYTES,
    Address,
    Imm,
    Instr,
    Kernel,
    Module,
    Not,
    Pair,
    ParamDecl,
    Reg,
    Sink,
    Special,
    Symbol,
    Unsupported,
    Vector,
)

_TOKEN = re.compile(
    r"\s*(?:(?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?\d+\.\d*(?:[eE][-+]?\d+)?)"
    r"|(?P<int>-?(?:0[xX][0-9a-fA-F]+|\d+))U?(?![\w.])"
    r"|(?P<name>[%$_a-zA-Z][\w$%.]*|_)"
    r"|(?P<punct>[{}\[\],|!+()<>-]))"
)
_LABEL = re.compile(r"\s*([$%\w]+)\s*:(?!:)")
_OPCODE = re.compile(r"\s*(?:@(!?)\s*([%$\w]+)\s+)?([a-zA-Z_][\w.:]*)")


class _Scope:
    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.names: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[str, int]] = {}
        self.labels: dict[str, int] = {}
        self.branches: list[tuple[Instr, str]] = []


class Parser:
    """Parses one PTX text; `parse` returns the module."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.module = Module()
        self.files: dict[int, str] = {}
        self.kernel: Kernel | None = None
        self.scope: _Scope | None = None
        self.loc: tuple[str, int] | None = None
        self.line = 0

    def error(self, what: str) -> SimError:
        return SimError(f"PTX line {self.line}: {what}")

    def parse(self) -> Module:
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), self.text, flags=re.S)
        header = ""  # of a multi-line statement
        start = 0
        skip_depth = 0
        for number, raw in enumerate(text.split("\n"), 1):
            line = raw.split("//", 1)[0] if "//" in raw else raw
            if not line or line.isspace():
                continue
            if skip_depth or line.lstrip().startswith(".section"):
                if not skip_depth and "{" not in line:
                    skip_depth = -1
                elif skip_depth < 0 and "{" in line:
                    skip_depth = line.count("{") - line.count("}")
                elif skip_depth >= 0:
                    skip_depth += line.count("{") - line.count("}")
                continue
            if not header:
                start = number
            self.line = start
            header = self.statements(header + " " + line if header else line)
        if header.strip():
            raise self.error(f"unfinished statement {header.strip()[:60]!r}")
        return self.module

    def statements(self, text: str) -> str:
        """Consume complete statements of `text`; return what is left over for the next line."""
        while True:
            text = text.lstrip()
            if not text:
                return ""
            if self.kernel is None:
                rest = self.module_statement(text)
            else:
                rest = self.body_statement(text)
            if rest is None:
                return text
            text = rest

    # -- module level ---------------------------------------------------------------------------------------------
    def module_statement(self, text: str) -> str | None:
        if m := re.match(r"\.(version|target|address_size)\b([^\n.]*(?:\.\d+)?)", text):
            if m[1] == "version":
                self.module.version = m[2].strip()
            elif m[1] == "target":
                self.module.target = m[2].split(",")[0].strip()
            return text[m.end() :] if m[1] != "target" else ""
        if text.startswith(".file"):
            m = re.match(r'\.file\s+(\d+)\s+"([^"]*)"[^;]*$', text)
            if not m:
                raise self.error(f"cannot read {text!r}")
            self.files[int(m[1])] = m[2]
            return ""
        if re.match(r"(\.visible\s+|\.weak\s+)?\.entry\b", text):
            if "{" not in text.split(")", 1)[-1]:
                return None
            return self.entry(text)
        if m := re.match(r"(?:\.extern\s+|\.visible\s+)?\.shared\b([^;]*);", text):
            self.shared_decl(m[1], self.module.shared)
            return text[m.end() :]
        if re.match(r"(?:\.\w+\s+)*\.(func|global|const|alias)\b", text):
            raise Unsupported(None, f"PTX line {self.line}: module-level {text.split('(')[0][:60]!r} is not modelled")
        raise self.error(f"cannot read {text[:60]!r}")

    def shared_decl(self, text: str, into: dict[str, tuple[int, int]]) -> None:
        m = re.match(r"\s*(?:\.align\s+(\d+)\s*)?\.(\w+)\s+([%$\w]+)\s*(?:\[\s*(\d*)\s*\])?\s*$", text)
        if not m or m[2] not in TYPE_BYTES:
            raise self.error(f"cannot read shared declaration {text!r}")
        size = TYPE_BYTES[m[2]]
        count = 1 if "[" not in text else int(m[4] or 0)
        into[m[3]] = (int(m[1] or size), count * size)

    def entry(self, text: str) -> str:
        m = re.match(r"(?:\.\w+\s+)?\.entry\s+([%$\w]+)\s*(?:\((.*?)\))?([^{]*)\{", text, re.S)
        if not m:
            raise self.error(f"cannot read entry {text[:80]!r}")
        params: dict[str, ParamDecl] = {}
        offset = 0
        for decl in filter(str.strip, (m[2] or "").split(",")):
            d = re.match(
                r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s*(?:\.\w+\s*)?(?:\.align\s+\d+\s+)?)?([%$\w]+)"
                r"\s*(?:\[(\d+)\])?\s*$", decl)  # fmt: skip
            if not d or d[2] not in TYPE_BYTES:
                raise self.error(f"cannot read parameter {decl.strip()!r}")
            size = TYPE_BYTES[d[2]] * int(d[4] or 1)
            align = int(d[1] or TYPE_BYTES[d[2]])
            offset = -(-offset // align) * align
            params[d[3]] = ParamDecl(d[3], d[2], align, size, offset)
            offset += size
        kernel = Kernel(m[1], params)
        for name, value in re.findall(r"\.(\w+)([^.]*)", m[3]):
            numbers = tuple(int(x) for x in re.findall(r"\d+", value))
            if name in ("reqntid", "maxntid"):
                kernel.reqntid = numbers if name == "reqntid" else kernel.reqntid
            elif name == "maxnreg":
                kernel.maxnreg = numbers[0]
            elif name == "reqnctapercluster":
                kernel.cluster = numbers
            elif name not in ("minnctapersm", "maxnctapersm", "explicitcluster", "noreturn", "blocksareclusters"):
                raise Unsupported(None, f"PTX line {self.line}: directive .{name} of entry {m[1]} is not modelled")
        kernel.shared = dict(self.module.shared)
        self.kernel = kernel
        self.scope = _Scope(None)
        return text[m.end() :]

    # -- kernel body ----------------------------------------------------------------------------------------------
    def body_statement(self, text: str) -> str | None:
        assert self.kernel is not None and self.scope is not None
        first = text[0]
        if first == "{":
            self.scope = _Scope(self.scope)
            return text[1:]
        if first == "}":
            self.close_scope()
            return text[1:]
        if first == ";":
            return text[1:]
        if m := _LABEL.match(text):
            self.scope.labels[m[1]] = len(self.kernel.instrs)
            return text[m.end() :]
        if text.startswith(".loc"):
            m = re.match(r"\.loc\s+(\d+)\s+(\d+)", text)
            if not m:
                raise self.error(f"cannot read {text!r}")
            self.loc = (self.files.get(int(m[1]), f"file{m[1]}"), int(m[2])) if int(m[2]) else None
            return ""
        end = text.find(";")
        if end < 0:
            return None
        statement, rest = text[:end], text[end + 1 :]
        if first == ".":
            self.directive(statement)
        else:
            self.instruction(statement)
        return rest

    def close_scope(self) -> None:
        assert self.kernel is not None and self.scope is not None
        scope, parent = self.scope, self.scope.parent
        for instr, name in scope.branches:
            if name in scope.labels:
                instr.target = scope.labels[name]
            elif parent is not None:
                parent.branches.append((instr, name))
            else:
                raise SimError(f"{instr.where()}: no label {name!r} in scope")
        if parent is None:
            self.module.kernels[self.kernel.name] = self.kernel
            self.kernel = None
            self.loc = None
        self.scope = parent

    def directive(self, text: str) -> None:
        assert self.scope is not None and self.kernel is not None
        if text.startswith(".reg"):
            m = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.S)
            if not m or (m[1] != "pred" and m[1] not in TYPE_BYTES):
                raise self.error(f"cannot read {text!r}")
            for name in m[2].split(","):
                name = name.strip()
                if r := re.match(r"([%$\w]+)<(\d+)>$", name):
                    self.scope.ranges[r[1]] = (m[1], int(r[2]))
                else:
                    self.scope.names[name] = self.new_reg(name, m[1])
        elif text.startswith(".shared"):
            self.shared_decl(text[len(".shared") :], self.kernel.shared)
        elif not text.startswith(".pragma"):
            raise Unsupported(None, f"PTX line {self.line}: directive {text[:60]!r} is not modelled")

    def new_reg(self, name: str, type_: str) -> Reg:
        assert self.kernel is not None
        width = 1 if type_ == "pred" else max(16, 8 * TYPE_BYTES[type_])
        reg = Reg(name, width, len(self.kernel.regs))
        self.kernel.regs.append(reg)
        return reg

    def find_reg(self, name: str) -> Reg | None:
        scope = self.scope
        m = re.match(r"(.*?)(\d+)$", name)
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            if m and m[1] in scope.ranges and int(m[2]) < scope.ranges[m[1]][1]:
                reg = scope.names[name] = self.new_reg(name, scope.ranges[m[1]][0])
                return reg
            scope = scope.parent
        return None

    def instruction(self, text: str) -> None:
        assert self.kernel is not None and self.scope is not None
        m = _OPCODE.match(text)
        if not m:
            raise self.error(f"cannot read {text!r}")
        guard = None
        if m[2]:
            guard = self.find_reg(m[2])
            if guard is None or guard.width != 1:
                raise self.error(f"guard {m[2]} is not a declared predicate")
        parts = tuple(m[3].split("."))
        rest = text[m.end() :]
        instr = Instr(m[3], parts, (), guard, bool(m[1]), self.line, self.loc, " ".join(text.split()))
        if parts[0] == "bra":
            self.scope.branches.append((instr, rest.strip()))
        elif parts[0] in ("call", "brx"):
            raise Unsupported(instr, f"{parts[0]} is not modelled")
        else:
            instr.operands = self.operands(rest)
        instr.index = len(self.kernel.instrs)
        self.kernel.instrs.append(instr)

    def operands(self, text: str) -> tuple[object, ...]:
        tokens: list[tuple[str, str]] = []
        pos, end = 0, len(text.rstrip())
        while pos < end:
            m = _TOKEN.match(text, pos)
            if not m or m.lastgroup is None:
                raise self.error(f"cannot read operand text {text[pos:]!r}")
            tokens.append((m.lastgroup, m[m.lastgroup]))
            pos = m.end()
        self.tokens, self.pos = tokens, 0
        out = []
        while self.pos < len(tokens):
            out.append(self.operand())
            if self.pos < len(tokens):
                self.expect(",")
        return tuple(out)

    def peek(self) -> str:
        return self.tokens[self.pos][1] if self.pos < len(self.tokens) else ""

    def expect(self, punct: str) -> None:
        if self.peek() != punct:
            raise self.error(f"expected {punct!r} before {self.peek()!r}")
        self.pos += 1

    def operand(self) -> object:
        first = self.atom()
        if self.peek() == "|":
            self.pos += 1
            return Pair(first, self.atom())
        return first

    def vector(self) -> Vector:
        items = []
        while self.peek() != "}":
            items.append(self.atom())
            if self.peek() == ",":
                self.pos += 1
        self.pos += 1
        return Vector(tuple(items))

    def address(self) -> Address:
        base = self.atom()
        offset, vectors = 0, []
        while self.peek() != "]":
            token = self.peek()
            if token in ("+", "-"):
                self.pos += 1
                offset += self.integer() * (1 if token == "+" else -1)
            elif token == ",":
                self.pos += 1
                self.expect("{")
                vectors.append(self.vector())
                if len(vectors) > 2:
                    raise self.error("more than two vectors in an address")
            elif self.tokens[self.pos][0] == "int":  # "[r+-4]" and "[r -4]"
                offset += self.integer()
            else:
                raise self.error(f"cannot read address at {token!r}")
        self.pos += 1
        if isinstance(base, Imm):
            return Address(None, offset + base.bits, *vectors)
        return Address(base, offset, *vectors)

    def integer(self) -> int:
        kind, value = self.tokens[self.pos]
        if kind != "int":
            raise self.error(f"expected an integer, not {value!r}")
        self.pos += 1
        return parse_int(value)

    def atom(self) -> object:
        if self.pos >= len(self.tokens):
            raise self.error("operand missing")
        kind, value = self.tokens[self.pos]
        self.pos += 1
        if kind == "name":
            return self.name(value)
        if kind == "int":
            return Imm(parse_int(value))
        if kind == "float":
            return parse_float(value)
        if value == "{":
            return self.vector()
        if value == "[":
            return self.address()
        if value == "!":
            reg = self.atom()
            if not isinstance(reg, Reg):
                raise self.error("! needs a predicate register")
            return Not(reg)
        raise self.error(f"cannot read operand at {value!r}")

    def name(self, value: str) -> object:
        if value == "_":
            return Sink()
        reg = self.find_reg(value)
        if reg is not None:
            return reg
        if value.startswith("%"):
            return Special(value)
        if value == "WARP_SZ":
            return Imm(32)
        return Symbol(value)


def parse_int(value: str) -> int:
    body = value.lstrip("-")
    if body[:2] in ("0x", "0X"):
        out = int(body, 16)
    elif len(body) > 1 and body[0] == "0":
        out = int(body, 8)
    else:
        out = int(body)
    return -out if value[0] == "-" else out


def parse_float(value: str) -> Imm:
    if value[:2] in ("0f", "0F"):
        return Imm(int(value[2:], 16), 32)
    if value[:2] in ("0d", "0D"):
        return Imm(int(value[2:], 16), 64)
    return Imm(struct.unpack("<Q", struct.pack("<d", float(value)))[0], 64)


def parse(text: str) -> Module:
    """Parse PTX text. Raises SimError (Unsupported) with the line of what cannot be read."""
    return Parser(text).parse()
