"""Machine-code analysis on small listings whose loops, paths and counts were worked out by hand."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from fmha_gen.errors import ToolchainError
from fmha_gen.sass import disasm, parse
from fmha_gen.sass.cfg import Graph
from fmha_gen.sass.loops import Loop, find_loops
from fmha_gen.sass.mix import count, is_move, role, unit
from fmha_gen.sass.report import LoopReport, loop_reports, register_changes, tmem_cols

DATA = Path(__file__).parent / "data"


def section(body: str) -> disasm.Section:
    """A section from instructions and labels, one a line; addresses are added."""
    lines, address = ['\t.section\t.text.k,"ax",@progbits', ".text.k:"], 0
    for line in textwrap.dedent(body).strip().splitlines():
        if line.endswith(":"):
            lines.append(line)
        else:
            lines.append(f"        /*{address:04x}*/                   {line.strip()} ;")
            address += 16
    (only,) = parse("\n".join(lines), "test")
    return only


def analysed(body: str | disasm.Section) -> tuple[Graph, list[Loop], tuple[LoopReport, ...]]:
    graph = Graph(section(body) if isinstance(body, str) else body)
    loops, spins, _ = find_loops(graph)
    return graph, loops, loop_reports(graph, loops, spins)


def repeat(line: str, times: int) -> str:
    return "\n".join([line] * times)


def test_a_real_listing_is_read_whole() -> None:
    (code,) = parse((DATA / "spin_wait.sass").read_text(), "spin_wait.sass")
    assert code.name == "softmax_0"
    assert len(code.instructions) == 29
    assert code.instructions[8].opcode == "BRA.U" and code.instructions[8].targets == (".L_x_2",)
    assert code.instructions[12].predicate == "!P0" and code.instructions[12].base == "NANOSLEEP"
    assert code.instructions[20].operands == "tmem[UR7+0x70], R4"
    assert [(c.kind, c.registers) for c in register_changes(code.instructions)] == [("inc", 192), ("dec", 48)]
    assert tmem_cols(code.instructions) == 512


def test_a_retry_of_the_header_is_a_spin_and_its_first_try_counts_once() -> None:
    """The wait at .L_x_4 loops to the header that the real loop has too: one loop of 14 slots, two spins."""
    (code,) = parse((DATA / "spin_wait.sass").read_text(), "spin_wait.sass")
    graph, loops, (loop,) = analysed(code)
    assert loop.address == 0xA0 and loop.innermost and loop.depth == 0
    assert loop.slots == loop.path_min_slots == loop.path_max_slots == 14
    assert loop.counts["SYNCS"] == 3 and loop.counts["LDTM"] == 1 and loop.moves == 1
    (spin,) = loop.spins
    assert spin.question == "SYNCS.PHASECHK.TRANS64.TRYWAIT" and not spin.cold and spin.slots == 5
    _, spins, irreducible = find_loops(graph)
    assert [s.question.opcode for s in spins] == ["USETMAXREG.TRY_ALLOC.CTAPOOL", "SYNCS.PHASECHK.TRANS64.TRYWAIT"]
    assert irreducible == []


COLD_RETRY = """
    MOV R1, R2
    .L_top:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ], R5
    @!P0 BRA `(.L_cold)
    .L_back:
    UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR12], tmem[UR14], idesc[UR15], UP1
    BRA.U UP0, `(.L_top)
    EXIT
    .L_cold:
    MOV R6, UR4
    .L_retry:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R6+URZ], R5
    @!P0 NANOSLEEP.SYNCS 0x989680
    @!P0 BRA `(.L_retry)
    BRA `(.L_back)
"""


def test_an_out_of_line_retry_is_no_part_of_the_hot_path() -> None:
    """The loop spans the EXIT: four slots when the first try succeeds, the five cold ones never counted."""
    _, loops, (loop,) = analysed(COLD_RETRY)
    assert loop.role == "mma" and loop.innermost
    assert loop.slots == loop.path_min_slots == loop.path_max_slots == 4
    assert [s.cold for s in loop.spins] == [True]
    assert len(loops[0].blocks) > len(loops[0].hot)


def test_pieces_of_one_loop_are_merged_and_branches_give_two_paths() -> None:
    """Two back edges to one header make one loop; the then-branch of 3 slots makes the longer way of 3 + 3 + 2."""
    _, _, (loop,) = analysed("""
        .L_top:
        LDS R1, [R2]
        ISETP.NE.AND P0, PT, R1, RZ, PT
        @!P0 BRA `(.L_join)
        FMUL2 R2, R2.F32x2.HI_LO, R4.F32x2.HI_LO
        FMUL2 R6, R6.F32x2.HI_LO, R4.F32x2.HI_LO
        @P1 BRA `(.L_top)
        .L_join:
        VIADD R3, R3, 0x1
        @P2 BRA `(.L_top)
        EXIT
    """)
    assert loop.slots == 8
    assert (loop.path_min_slots, loop.path_max_slots) == (5, 8)


def test_nested_loops_and_their_own_slots() -> None:
    _, _, (outer, inner) = analysed("""
        .L_outer:
        LDS R1, [R2]
        .L_inner:
        VIADD R3, R3, 0x1
        @P0 BRA `(.L_inner)
        STS [R2], R3
        @P1 BRA `(.L_outer)
        EXIT
    """)
    assert (outer.innermost, outer.depth, outer.slots, outer.path_max_slots) == (False, 0, 3, None)
    assert (inner.innermost, inner.depth, inner.slots, inner.parent) == (True, 1, 2, outer.address)


def test_bsync_leads_to_where_its_bssy_says() -> None:
    """The BSYNC of the out-of-line arm releases its warp at .L_join, inside the loop: the arm belongs to the loop."""
    graph, _, (loop,) = analysed("""
        .L_top:
        BSSY.RECONVERGENT B0, `(.L_join)
        @P0 BRA `(.L_arm)
        LDS R1, [R2]
        BSYNC.RECONVERGENT B0
        .L_join:
        VIADD R3, R3, 0x1
        @P1 BRA `(.L_top)
        EXIT
        .L_arm:
        LDS R1, [R4]
        BSYNC.RECONVERGENT B0
        EXIT
    """)
    assert loop.slots == 8
    assert (loop.path_min_slots, loop.path_max_slots) == (6, 6)
    arm = graph.block_of(".L_arm")
    assert arm is not None and graph.blocks[arm].succ == [graph.block_of(".L_join")]


def test_branch_tables_calls_and_divergent_branches() -> None:
    graph, _, (loop,) = analysed("""
        .L_top:
        BRX R2 -0x10 (*"BRANCH_TARGETS .L_a,.L_b"*)
        .L_a:
        CALL.REL.NOINC `($k$helper)
        BRA `(.L_end)
        .L_b:
        BRA.DIV UR4, `(.L_a)
        .L_end:
        @P0 BRA `(.L_top)
        @P1 EXIT
        WARPSYNC.COLLECTIVE R4, `(.L_out)
        .L_out:
        EXIT
        $k$helper:
        MUFU.RCP R2, R2
        FMUL R2, R2, R3
        RET.REL.NODEC R4 `(k)
    """)
    assert loop.slots == 5 and loop.calls == ("$k$helper",) and loop.call_slots == 3
    assert (loop.path_min_slots, loop.path_max_slots) == (3, 5)
    table, b, end = (graph.block_of(x) for x in (".L_top", ".L_b", ".L_end"))
    assert table is not None and b is not None
    assert graph.blocks[table].succ == [graph.block_of(".L_a"), b]
    assert graph.blocks[b].succ == [graph.block_of(".L_a"), end]
    assert graph.block_of("$k$helper") in graph.entries


def test_an_irreducible_cycle_is_said_not_guessed() -> None:
    graph = Graph(
        section("""
        @P0 BRA `(.L_b)
        .L_a:
        VIADD R3, R3, 0x1
        .L_b:
        VIADD R4, R4, 0x1
        @P1 BRA `(.L_a)
        EXIT
    """)
    )
    loops, spins, irreducible = find_loops(graph)
    assert loops == [] and spins == [] and len(irreducible) == 1


def loop_of(body: str) -> LoopReport:
    (loop,) = analysed(f".L_top:\n{textwrap.dedent(body).strip()}\n@P0 BRA `(.L_top)\nEXIT")[2]
    return loop


UNMASKED = "\n".join(
    [
        repeat("LDTM.x32 R4, tmem[UR4]", 4),
        repeat("FMNMX3 R2, R2, R4, R5, !PT", 62),
        repeat("FFMA2 R4, R4.F32x2.HI_LO, UR8.F32, R2.F32", 64),
        repeat("MUFU.EX2 R4, R4", 112),
        repeat("F2FP.BF16.F32.PACK_AB R4, R5, R4", 64),
        repeat("FSEL R2, R3, R4, P0", 4),
        repeat("IMAD.MOV.U32 R2, RZ, RZ, R3", 2),
        repeat("IMAD R9, R9, 0x800000, R5", 8),
        repeat("STTM.x16 tmem[UR4+0x40], R4", 4),
    ]
)


def test_roles_come_from_the_mix() -> None:
    plain = loop_of(UNMASKED)
    assert (plain.role, plain.masked, plain.slots) == ("softmax", False, 325)
    assert plain.mufu == {"EX2": 112} and plain.moves == 2
    assert plain.units["xu"] == 112 and plain.units["alu"] == 66 and plain.units["convert"] == 64
    assert plain.units["fma"] == 64 + 10 and plain.units["tmem"] == 8 and plain.units["control"] == 1
    masked = loop_of("\n".join([UNMASKED, repeat("R2P PR, R4, 0x7e", 16), repeat("FSEL R2, R3, -INF , P0", 128)]))
    assert (masked.role, masked.masked, masked.slots) == ("softmax", True, 325 + 144)
    assert "132 selects" in masked.evidence
    rescale = loop_of(
        "\n".join(
            [repeat("LDTM.x16 R4, tmem[UR4]", 8), repeat("FMUL2 R4, R4, R2", 64), repeat("STTM.x16 tmem[UR4], R4", 8)]
        )
    )
    assert (rescale.role, rescale.slots) == ("correction", 81)
    assert loop_of("LDTM.x16 R4, tmem[UR4]\nF2FP.BF16.F32.PACK_AB R4, R5, R4\nSTS.128 [R2], R4").role == "epilogue"
    assert loop_of("UTMALDG.4D [UR4], [UR6], desc[UR8]").role == "load"
    assert loop_of("UTMASTG.4D [UR4], [UR6]").role == "store"
    assert loop_of("VIADD R2, R2, 0x1").role == "other"


def test_hopper_roles() -> None:
    both = loop_of(
        "\n".join([repeat("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, !UPT", 8), repeat("MUFU.EX2 R4, R4", 64)])
    )
    assert (both.role, both.masked) == ("mma_softmax", False)
    assert both.evidence.startswith("64 MUFU.EX2, 8 HGMMA")
    assert loop_of("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, !UPT").role == "mma"


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("MOV R2, R3", True),
        ("IMAD.MOV.U32 R2, RZ, RZ, R3", True),
        ("IMAD.U32 R2, RZ, RZ, UR4", True),
        ("HFMA2 R2, -RZ, RZ, 1.875, 0", True),
        ("IMAD R2, R3, 0x800000, R4", False),
        ("HFMA2 R2, R3, R4, R5", False),
        ("FADD R2, -RZ, R3", True),
        ("FADD R2, R4, R3", False),
    ],
)
def test_moves(text: str, move: bool) -> None:
    (ins,) = section(text).instructions
    assert is_move(ins) is move


def test_units_name_unknown_opcodes_other() -> None:
    code = section("UIADD3 UR4, UPT, UPT, UR4, 0x1, URZ\nWOBBLE R1\nR2UR UR4, R2\nUTCBAR [UR4], URZ").instructions
    assert [unit(i) for i in code] == ["uniform", "other", "uniform", "sync"]
    assert role(count(code)).name == "other"


def test_what_does_not_parse_is_refused_by_line() -> None:
    text = '\t.section\t.text.k,"ax",@progbits\n        /*0000*/                   ?? R1 ;\n'
    with pytest.raises(ToolchainError, match=r"k\.cubin: line 2 of the listing: '\?\? R1 ;'"):
        parse(text, "k.cubin")


def test_a_missing_nvdisasm_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disasm.shutil, "which", lambda _: None)
    monkeypatch.setattr(disasm.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
        disasm.find_nvdisasm()


def fake_nvdisasm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A program of that name on PATH, and a cubin for it."""
    tool = folder / "nvdisasm"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    (folder / "k.cubin").write_bytes(b"x")
    return folder / "k.cubin"


WARNING, FATAL = "nvdisasm warning : sm_90 is deprecated", "nvdisasm fatal   : k.cubin is an invalid ELF file"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"echo '{FATAL}' >&2; echo '{WARNING}' >&2; exit 1", f"exit code 1: {FATAL}; is it a cubin"),
        (f"echo '{WARNING}' >&2; echo '{FATAL}' >&2; exit 255", f"exit code 255: {FATAL}; is it a cubin"),
        (f"echo '{WARNING}' >&2; echo '{FATAL}'; echo '{WARNING}'; exit 1", f"exit code 1: {FATAL}; is it a cubin"),
        ("echo 'Error: no such option'; exit 2", "exit code 2: Error: no such option; is it a cubin"),
        (f"echo 'cannot go on' >&2; echo '{WARNING}' >&2; exit 1", "exit code 1: cannot go on; is it a cubin"),
        (f"echo '{WARNING}' >&2; exit 1", f"exit code 1: {WARNING}; is it a cubin"),
        ("printf '\\377 error: bytes' >&2; exit 1", "exit code 1: . error: bytes; is it a cubin"),
        ("exit 1", "exit code 1: no message; is it a cubin"),
        ("kill -9 $$", "failed with signal 9: no message"),
    ],
)
def test_what_nvdisasm_fails_of_is_quoted_not_its_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    cubin = fake_nvdisasm(tmp_path, monkeypatch, script)
    with pytest.raises(ToolchainError, match=f"k.cubin: nvdisasm .*{words}"):
        disasm.disassemble(cubin)


def test_an_nvdisasm_that_cannot_be_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = fake_nvdisasm(tmp_path, monkeypatch, "exit 0")
    (tmp_path / "nvdisasm").write_text("#!/nowhere/sh\n")
    with pytest.raises(ToolchainError, match=r"nvdisasm: /.*/nvdisasm cannot be run \(No such file or directory\)"):
        disasm.disassemble(cubin)
