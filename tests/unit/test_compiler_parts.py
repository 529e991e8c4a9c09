"""The parts of the compiler that need no DSL: error summaries, line maps, gates."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fmha_gen import elf
from fmha_gen.compiler import LineMap, gates, linemap
from fmha_gen.compiler.child import summarize
from fmha_gen.sass.disasm import Instruction, Section
from tests.fake_cubin import make_cubin

PLAIN = """.version 9.4
.target sm_100a

.visible .entry k(
)
{
	mov.b32 	%r1, 1;
	add.s32 	%r2, %r1, 2;
$L__BB0_1:
	ret;

}
"""
LINES = """.version 9.4
.target sm_100a

.visible .entry k(
)
{
	.loc	1 10 0
	.loc	1 12 8
	mov.b32 	%r1, 1;
	.loc	2 6 4
	add.s32 	%r2, %r1, 2;
$L__BB0_1:
	.loc	1 20 0
	ret;


}
	.file	1 "/home/somebody/build/kernel.py"
	.file	2 "/home/somebody/src/fmha_gen/fmha_gen/device/tmem.py"
"""


def test_line_map_by_hand():
    m = linemap.build(PLAIN, LINES, "/home/somebody/build/kernel.py")
    assert m.files == ("kernel.py", "fmha_gen/device/tmem.py")
    assert [m.lookup(n) for n in (1, 6)] == [None, None]
    assert m.lookup(7) == ("kernel.py", 12)
    assert m.lookup(8) == m.lookup(9) == m.lookup(10) == ("fmha_gen/device/tmem.py", 6)  # column 0 moves nothing
    assert LineMap.from_json(m.to_json()) == m
    assert "somebody" not in m.to_json()


def test_inline_assembly_belongs_to_the_line_that_wrote_it():
    """The compiler counts on through the lines of an assembly text: positions inside one are not real."""
    plain = "// begin inline asm\nRETRY:\nwait;\n// end inline asm\nret;\n"
    lines = (
        '.file 1 "/b/kernel.py"\n.loc 1 20 4\n// begin inline asm\n.loc 1 21 4\nRETRY:\n.loc 1 22 4\nwait;\n'
        "// end inline asm\n.loc 1 30 4\nret;\n"
    )
    m = linemap.build(plain, lines, "/b/kernel.py")
    assert [m.lookup(n) for n in (2, 3, 5)] == [("kernel.py", 20), ("kernel.py", 20), ("kernel.py", 30)]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (LINES.replace("%r1, 2", "%r1, 3"), r"line 11 .*'add.s32 .*%r1, 3;', without it is line 8: .*%r1, 2"),
        (LINES.replace("\tret;\n", ""), "without it is line 10: 'ret;'"),
        (LINES + "\tret;\n", "without it is its end"),
        (LINES[: LINES.index("\tret;")], "ends before line 10"),
    ],
)
def test_texts_that_differ_have_no_line_map(lines: str, says: str):
    with pytest.raises(ValueError, match=says):
        linemap.build(PLAIN, lines, "/home/somebody/build/kernel.py")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/b/kernel.py", "kernel.py"),
        ("/x/fmha_gen/fmha_gen/device/a.py", "fmha_gen/device/a.py"),
        ("/v/site-packages/nvidia_cutlass_dsl/dsl_packages/cutlass/cute/core.py", "cutlass/cute/core.py"),
        ("/somewhere/else.py", "else.py"),
    ],
)
def test_file_names_lose_the_machine(path: str, name: str):
    """A17: no build folders in a line map."""
    text = f'.loc 1 1 1\nret;\n.file 1 "{path}"\n'
    assert linemap.build("ret;\n", text, "/b/kernel.py").files == (name,)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "ValueError"),
        ("no such thing\nmore", "ValueError: no such thing"),
        (
            "\x1b[91merror:\x1b[0m backend failed\n  error: libNVVM failed.\n  note: target: sm_100a\n"
            "    extra log: error: invalid operand\n     in inline asm: 'x'\n  suggestion: check\n",
            "ValueError: extra log: error: invalid operand in inline asm: 'x'",
        ),
    ],
)
def test_summaries_name_the_innermost_error(text: str, line: str):
    """C08: one line that helps, without colours."""
    assert summarize(ValueError(text)) == line
    assert len(summarize(ValueError("x" * 10000))) <= 400


EXPECTED = gates.Expected("sm_100a", "k_0", (("q", 0, 128), ("lse", 128, 8), ("n", 136, 4)), 512, 128)


def problems(cubin: bytes, expected: gates.Expected = EXPECTED) -> list[str]:
    return gates.check_elf(elf.read_cubin(cubin, "k"), expected)[1]


def test_a_right_cubin_passes():
    assert problems(make_cubin()) == []
    assert problems(make_cubin(registers=96), dataclasses.replace(EXPECTED, registers=None)) == []


@pytest.mark.parametrize(
    ("cubin", "says"),
    [
        ({"sm": 103}, "the cubin is for sm_103a, expected sm_100a"),
        ({"specific": False}, "the cubin is for sm_100, expected sm_100a"),
        ({"stack_bytes": 8}, "8 bytes of stack per thread"),
        ({"block": None}, r"required block is None"),
        ({"registers": 120}, "120 registers per thread at launch"),
        ({"params": ((0, 128), (128, 8))}, "2 parameters, the plan's ABI has 3"),
        ({"params": ((48, 128), (176, 8), (184, 4))}, r"parameter 0 \(q\) is 128 bytes at offset 48"),
        ({"symbols": ("k_0", "k_1")}, "kernels in the cubin: k_0, k_1; expected exactly one, k_0"),
        ({"symbols": ()}, "kernels in the cubin: none"),
    ],
)
def test_each_contradiction_with_the_plan_is_named(cubin, says: str):
    found = problems(make_cubin(**cubin))
    assert any(re.search(says, p) for p in found), found


PTX = """
setmaxnreg.inc.sync.aligned.u32 200;
setmaxnreg.dec.sync.aligned.u32 48;
tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;
cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes [a], [b, {c}], [d];
cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [b, {c}], [a];
"""
SASS = ["USETMAXREG.TRY_ALLOC.CTAPOOL", "USETMAXREG.DEALLOC.CTAPOOL", "UTCHMMA", "UTMALDG.4D", "UTMASTG.4D", "EXIT"]


@pytest.mark.parametrize(
    ("opcodes", "says"),
    [
        (SASS, None),
        (SASS[2:], "2 setmaxnreg in the PTX, 0 in the machine code"),
        ([*SASS, "UTCHMMA"], "1 tcgen05.mma in the PTX, 2 in the machine code"),
        ([o for o in SASS if not o.startswith("UTMALDG")], "1 TMA load in the PTX, 0 in"),
        ([o for o in SASS if not o.startswith("UTMASTG")], "1 TMA store in the PTX, 0 in"),
        ([*SASS, "STL.64", "LDL"], "2 STL/LDL instructions; the limit is 0"),
    ],
)
def test_machine_code_must_hold_what_the_ptx_asked_for(monkeypatch: pytest.MonkeyPatch, opcodes, says, tmp_path):
    section = Section("k_0", [Instruction(16 * n, None, op, "") for n, op in enumerate(opcodes)])
    monkeypatch.setattr(gates, "disassemble", lambda path: [section])
    _, found = gates.check_machine_code(tmp_path / "k.cubin", PTX)
    assert found == [] if says is None else any(says in p for p in found)
