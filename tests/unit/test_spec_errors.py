"""Spec errors: all at once, file and line, nearest key, the fix. Case ids are those of public bug reports."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest

from fmha_gen.errors import SpecError
from fmha_gen.spec import read_specs, read_text
from fmha_gen.spec.built import BUILT

HEADER = "edition: 2026\nbundle: {name: t, version: 1.0.0}\nkernels:\n"
ENTRY = HEADER + "  - family: fmha_fwd\n    dtype: bf16\n    head_dim: 128\n    mask: full\n"


def problems(text: str) -> list[str]:
    with pytest.raises(SpecError) as e:
        read_text(text, "s.yaml")
    return list(e.value.problems)


def entry_problems(*lines: str) -> list[str]:
    """Problems of the valid entry plus `lines`, the first of which stands on line 8."""
    return problems(ENTRY + "".join(f"    {line}\n" for line in lines))


def test_the_base_of_these_tests_is_valid():
    assert len(read_text(ENTRY, "s.yaml").specs) == 1


def test_all_problems_at_once_in_file_order():
    text = textwrap.dedent("""\
        edition: 2026
        bundle: {name: T, version: 1.0}
        archs: [100a, 99z]
        kernels:
          - family: fmha_fwd
            dtypes: bf16
            head_dim: 72
            mask: causl
            q_stage: 3
          - family: fmha_fwd
            dtype: bf16
            head_dim: 128
            mask: full
            kv_stage: 2.5
        extra: 1
        """)
    found = problems(text)
    lines = [int(p.split(":")[1]) for p in found]
    assert lines == sorted(lines)
    assert set(lines) == {2, 3, 5, 6, 7, 8, 9, 14, 15}
    assert "s.yaml:6: kernels[0].dtypes: unknown key; write dtype" in found
    assert any(p.startswith("s.yaml:5: kernels[0].dtype: missing") for p in found)
    assert any(p.startswith("s.yaml:8: kernels[0].mask: 'causl'") and "did you mean 'causal'?" in p for p in found)
    assert any(p.startswith("s.yaml:9: kernels[0].q_stage: 3 is not allowed; values are 1, 2, auto") for p in found)


@pytest.mark.parametrize(
    "line, part",
    [
        ("kv_stagee: 3", "s.yaml:8: kernels[0].kv_stagee: unknown key; did you mean 'kv_stage'?"),
        ("kvstage: 3", "unknown key; did you mean 'kv_stage'?"),
        ("softmaxscale: 1", "kernels[0].softmaxscale: unknown key; softmax_scale is chosen at launch, never part of"),
        ("num_head_kv: 1", "unknown key; head counts and their ratio are chosen at launch"),
        ("head_dim_v: 128", "unknown key; write head_dim: {qk: ..., v: ...}"),
        ("tile_n: 64", "unknown key; write tile: {n: ...}"),
        ("causal: true", "unknown key; write mask: causal"),
        ("edition: 2026", "misplaced key; move it to the top of the file"),
        ("version: 1.0.0", "misplaced key; move it to bundle"),
        ("zzz: 1", "keys here are family, dtype"),
        ("mask: causal", "kernels[0].mask: given twice, first on line 7; keep one"),
        ("tile: {m: 128, m: 128}", "kernels[0].tile.m: given twice, first on line 8"),
        ("tile: {k: 128}", "kernels[0].tile.k: unknown key; keys are m, n"),
        ("tile: 128", "a mapping is needed"),
        ("registers: {softmax: 200, correction: 64}", "kernels[0].registers: other missing"),
        ("registers: [200, 64, 48]", "write {softmax: 200, correction: 64, other: 48}"),
        ("registers: {softmax: 201, correction: 64, other: 48}", "24 to 256 in steps of 8"),
        ("kv_stage: []", "an empty list makes no kernel"),
        ("kv_stage: [[2, 3]]", "a list inside a list"),
        ("kv_stage: [2, 2]", "kernels[0].kv_stage[1]: 2 is listed twice"),
        ("kv_stage:", "no value; stages of the shared K/V ring; write auto or remove the key"),
        ("kv_stage: true", "true is a truth value; a whole number is needed"),
        ("kv_stage: three", "'three' is text; a whole number is needed"),
        ("kv_stage: '3'", "remove the quotes"),
        ("kv_stage: 3.0", "3.0 is a number; a whole number is needed"),
        ("kv_stage: 0", "allowed is 2 to 32, or auto"),
        ("lse: 1", "1 is a whole number; true or false is needed"),
        ("lse: auto", "'auto' is text; true or false is needed"),
        ("softcap: 50.0", "the value is given at launch"),
        ("rescale_threshold: .inf", ".inf is not allowed; allowed is 0 to 8"),
        ("rescale_threshold: 16", "allowed is 0 to 8"),
        ("schedule: longest", "did you mean 'longest_first'?"),
    ],
)
def test_one_problem(line, part):
    found = entry_problems(line)
    assert len(found) == 1
    assert part in found[0]
    assert found[0].startswith("s.yaml:8: kernels[0].")


def test_an_abbreviated_key_is_recognised():
    found = entry_problems("registers: {corr: 64}")
    assert "s.yaml:8: kernels[0].registers.corr: unknown key; did you mean 'correction'?" in found


def test_c04_a_float_written_1e_3_is_a_number_and_its_quoted_form_a_type_error():
    """C04 (beetbox/confuse#91, Reed-CompBio/spras#484): 1e-3 is never text."""
    for text in ("1e-3", "1.0e-3", "0.001", "+1E-3", ".001"):
        assert read_text(ENTRY + f"    rescale_threshold: {text}\n", "s").specs[0].rescale_threshold == 0.001
    (found,) = entry_problems('rescale_threshold: "0.001"')
    assert "kernels[0].rescale_threshold: '0.001' is text; a number is needed" in found
    for text in ("1e-3", "1.0e-3", '"0.001"'):
        (found,) = entry_problems(f"softmax_scale: {text}")
        assert "kernels[0].softmax_scale: softmax_scale is chosen at launch, never part of a spec" in found


@pytest.mark.parametrize(
    "text, part",
    [
        ("010", "octal number in YAML 1.1"),
        ("08", "write it without leading zeros"),
        ("0o10", "octal number in YAML 1.2"),
        ("0b11", "binary number in YAML 1.1"),
        ("1:30", "base-60 number in YAML 1.1"),
        ("1_0", "write it without underscores"),
        ("no", "false in YAML 1.1"),
        ("On", "true in YAML 1.1"),
        ("2026-01-02", "a date in YAML 1.1"),
    ],
)
def test_values_on_which_yaml_editions_disagree_are_refused_once(text, part):
    (found,) = entry_problems(f"kv_stage: {text}")
    assert found.startswith(f"s.yaml:8: kernels[0].kv_stage: {text} is ") and part in found
    (found,) = problems(ENTRY.replace("name: t,", f"name: {text},"))
    assert found.startswith(f"s.yaml:2: bundle.name: {text} is ") and part in found


def test_n_is_a_plain_key_of_tile():
    assert read_text(ENTRY + "    tile: {m: 128, n: 64}\n", "s").specs[0].tile_n == 64


def test_a_version_that_yaml_reads_as_a_number_is_refused():
    (found,) = problems(ENTRY.replace("1.0.0", "1.10"))
    assert found.startswith("s.yaml:2: bundle.version: 1.10 is not text to YAML; numbers joined by dots")
    assert found.endswith('; write "1.10" in quotes')
    assert read_text(ENTRY.replace("1.0.0", '"1.10"'), "s").bundle.version == "1.10"


@pytest.mark.parametrize("name", ["../x", "a/b", "A", "a b", "", "a-", "1a"])
def test_bundle_names_are_safe_as_folder_and_distribution_names(name):
    (found,) = problems(ENTRY.replace("name: t,", f"name: {name!r},"))
    assert "bundle.name" in found and "is not allowed" in found


@pytest.mark.parametrize("edition", ["2025", "2027", "'2026'", "2026.0x", "[2026]", "latest"])
def test_an_unknown_edition_does_not_hide_the_other_problems(edition):
    found = problems(ENTRY.replace("edition: 2026", f"edition: {edition}") + "    qstage: 2\nwhatever: 1\n")
    assert [p.split(": ")[1] for p in found] == ["edition", "kernels[0].qstage", "whatever"]
    assert "this fmha-gen reads 2026" in found[0] and "install a newer fmha-gen" in found[0]


def test_a_yaml_1_1_word_does_not_hide_the_other_problems():
    text = ENTRY.replace("family: fmha_fwd", "family: no").replace("head_dim: 128", "head_dim: 80")
    found = problems(text + "    lse: yes\n    split_kv: true\n    exclude: [{q_stage: 3}]\n")
    assert [int(p.split(":")[1]) for p in found] == [4, 6, 8, 9, 10]
    assert "family: no is false in YAML 1.1" in found[0] and "head_dim: 80: not supported" in found[1]
    assert "lse: yes is true in YAML 1.1" in found[2] and "split_kv: true: not built yet" in found[3]


def test_an_unknown_family_does_not_hide_the_other_problems():
    found = problems(ENTRY.replace("family: fmha_fwd", "family: fmha_bwd").replace("head_dim: 128", "head_dim: 80"))
    assert len(found) == 2 and "'fmha_bwd' is no known family" in found[0] and "head_dim: 80" in found[1]


def test_a_word_that_cannot_be_read_makes_no_contradiction():
    """Whether it meant true is not known: no second problem blames another field for it."""
    (found,) = [p for p in entry_problems("paged_kv: yes", "page_size: 64") if "page_size" in p or "paged_kv" in p]
    assert "paged_kv: yes is true in YAML 1.1" in found


def test_a_missing_edition_is_reported_with_the_rest():
    found = problems(ENTRY.replace("edition: 2026\n", "") + "    zzz: 1\n")
    assert found[0].startswith("s.yaml:1: edition: missing") and len(found) == 2


@pytest.mark.parametrize("key", ["softmax_scale", "seqlen_q", "num_heads_kv", "ratio", "batch", "cu_seqlens_q"])
def test_launch_values_are_refused_by_name(key):
    (found,) = entry_problems(f"{key}: 1")
    assert f"kernels[0].{key}: " in found and "chosen at launch, never part of a spec" in found
    (found,) = problems(ENTRY + f"{key}: 1\n")
    assert f"s.yaml:8: {key}: " in found and "chosen at launch" in found


def test_launch_values_with_a_flag_name_it_only_where_it_is_built(monkeypatch):
    (found,) = entry_problems("window_left: 128")
    assert found.endswith("remove it; kernels that take it (mask: window) are not built yet")
    (found,) = entry_problems("num_splits: 0")
    assert found.endswith("remove it; kernels that take it (split_kv: true) are not built yet")
    key = ("fmha_fwd", "sm_100a")
    monkeypatch.setitem(BUILT, key, dataclasses.replace(BUILT[key], features=("split_kv",)))
    (found,) = entry_problems("num_splits: 0")
    assert found.endswith("remove it; 'split_kv: true' makes a kernel that takes it")


@pytest.mark.parametrize(
    "arch", ["103a", "sm_103a", "90", "99z", "100f", "sm_100", "100", "110a", "120a", "sm_120a", "SM_100A", "10.0"]
)
def test_a02_c01_archs_are_an_explicit_list(arch):
    """A02 (vllm-project/flash-attention#138, sglang#25564), C01 (huggingface/kernels#720): no silent no-op."""
    (found,) = problems(ENTRY.replace("kernels:", f"archs: [100a, {arch}]\nkernels:"))
    assert found.startswith("s.yaml:3: archs[1]: ")
    assert "accepted are sm_100a (also sm100a, 100a, 10.0a)" in found


@pytest.mark.parametrize("arch", ["sm_100a", "sm100a", "100a", "10.0a"])
def test_a02_spellings_of_a_built_arch(arch):
    file = read_text(ENTRY.replace("kernels:", f"archs: {arch}\nkernels:"), "s")
    assert [s.arch for s in file.specs] == ["sm_100a"] and file.archs == ("sm_100a",)


@pytest.mark.parametrize("dim", ["16", "40", "72", "80", "100", "120", "136", "192", "256", "{qk: 64, v: 128}"])
def test_h04_h05_head_dims_without_a_kernel_are_refused_with_the_list(dim):
    """H04 (turboderp-org/exllamav3#316), H05 (flash-attention#1963, #1959)."""
    (found,) = problems(ENTRY.replace("head_dim: 128", f"head_dim: {dim}"))
    assert found.startswith(f"s.yaml:6: kernels[0].head_dim: {dim}: not supported for fmha_fwd on sm_100a")
    assert "built are 64, 96, 128, {qk: 192, v: 128}" in found


def test_a_pair_written_as_a_list_is_explained():
    (found,) = problems(ENTRY.replace("head_dim: 128", "head_dim: [[192, 128]]"))
    assert "kernels[0].head_dim[0]: a list inside a list; write a pair as {qk: ..., v: ...}" in found
    (found,) = problems(ENTRY.replace("head_dim: 128", "head_dim: [192, 128]"))
    assert found.endswith("write the pair as {qk: 192, v: 128}")


@pytest.mark.parametrize("flag", ["varlen", "sink", "softcap", "pack_gqa", "split_kv"])
def test_flags_without_a_template_are_refused_by_name(flag):
    (found,) = entry_problems(f"{flag}: true")
    assert found == f"s.yaml:8: kernels[0].{flag}: true: not built yet for fmha_fwd on sm_100a; remove it"
    assert len(read_text(ENTRY + f"    {flag}: false\n", "s").specs) == 1


def test_other_values_without_a_template_are_refused_by_name():
    for line, name in (("num_ctas: 2", "2"), ("tile: {m: 64}", "64")):
        (found,) = entry_problems(line)
        assert f": {name}: not built yet for fmha_fwd on sm_100a" in found
    (found,) = problems(ENTRY.replace("mask: full", "mask: [full, window]"))
    assert "kernels[0].mask: window: not built yet" in found
    (found,) = problems(ENTRY.replace("family: fmha_fwd", "family: fmha_combine"))
    assert "kernels[0].family: fmha_combine: not built yet; built are fmha_fwd" in found


@pytest.mark.parametrize(
    "lines, fields",
    [
        (("paged_kv: true",), ("paged_kv=true", "page_size")),
        (("page_size: 64",), ("page_size=64", "paged_kv=false")),
        (("split_kv: true", "lse: false"), ("split_kv=true", "lse=false")),
        (("tile: {n: 64}", "exp2_emulation: 80"), ("exp2_emulation=80", "tile.n=64")),
    ],
)
def test_c10_a_clash_is_one_sentence_that_names_both_fields(lines, fields):
    """C10 (TensorRT-LLM#17911, vllm#42669)."""
    found = [p for p in entry_problems(*lines) if "not built yet" not in p]
    assert len(found) == 1
    assert all(field in found[0] for field in fields)
    assert found[0].startswith(f"s.yaml:{7 + len(lines)}: ")


def test_c10_flags_take_no_settings():
    """C10."""
    (found,) = entry_problems("sink: {dtype: bf16}")
    assert "kernels[0].sink: a mapping where true or false is needed" in found


def test_a_clash_is_not_invented_from_a_field_that_cannot_be_read():
    found = entry_problems("paged_kv: true", "page_size: sixteen")
    assert [p for p in found if "without a page_size" in p] == []
    assert len(found) == 2


def test_filters_that_match_nothing_or_everything():
    (found,) = entry_problems("exclude: [{mask: causal}]")
    assert "kernels[0].exclude[0]: matches no variant of this entry (mask=causal)" in found
    (found,) = entry_problems("exclude: [{mask: full}]")
    assert "include and exclude leave no variant" in found
    (found,) = entry_problems("exclude: [{maks: full}]")
    assert "kernels[0].exclude[0].maks: unknown key; did you mean 'mask'?" in found
    (found,) = entry_problems("exclude: [{archs: 100a}]")
    assert "kernels[0].exclude[0].archs: unknown key; write arch" in found
    (found,) = entry_problems("include: [{qwertz: 1}]")
    keys = found.split("keys here are ")[1].split(", ")
    assert "arch" in keys and "mask" in keys and not {"include", "exclude", "family"} & set(keys)
    (found,) = entry_problems("include: [{family: fmha_fwd}]")
    assert found.endswith("misplaced key; move it to an entry of kernels")
    (found,) = entry_problems("exclude: {mask: full}")
    assert "a list of mappings is needed" in found


def test_the_same_kernel_twice_is_refused():
    second = ENTRY.partition("kernels:\n")[2]
    (found,) = problems(ENTRY + second)
    assert found == (
        "s.yaml:8: kernels[1]: makes fmha_fwd-sm100a-bf16-d128-full-qauto again, first made by kernels[0] at s.yaml:4; "
        "exclude it from one of the two"
    )


def test_too_many_variants_say_the_product():
    numbers = ", ".join(str(n) for n in range(2, 33))
    found = entry_problems(
        f"kv_stage: [{numbers}]", f"exp2_emulation: [{', '.join(map(str, range(0, 258, 2)))}]", "lse: [true, false]"
    )
    assert len(found) == 1 and "31 x 129 x 2 x 1 archs = 7998 variants; an entry may make 4096" in found[0]


@pytest.mark.parametrize(
    "text, part",
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n", "the file is not a mapping"),
        ("edition: 2026\n\tbundle: 1\n", "not valid YAML"),
        ("edition: [2026\n", "not valid YAML"),
        ("edition: 2026\n---\nedition: 2026\n", "keep one document per file"),
        ("edition: 2026\nbundle: \x00\n", "not valid YAML"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", "nested deeper than 16 levels"),
    ],
)
def test_files_that_are_no_spec(text, part):
    found = problems(text)
    assert len(found) == 1 and part in found[0] and found[0].startswith("s.yaml:")


def test_anchors_aliases_tags_and_merge_keys_are_refused():
    found = entry_problems("kv_stage: &a 3", "num_ctas: *a", "q_stage: !!int 2", "<<: {lse: true}")
    assert [int(p.split(":")[1]) for p in found] == [8, 9, 10, 11]
    for word, problem in zip(("anchors", "aliases", "tags", "YAML 1.1"), found, strict=True):
        assert word in problem
    assert any("*x: aliases" in p for p in problems("edition: 2026\na: &x [*x]\n"))


def test_problems_of_several_files_come_together(tmp_path):
    a, b = tmp_path / "my a.yaml", tmp_path / "b.yaml"
    a.write_text(ENTRY + "    zzz: 1\n")
    b.write_text(ENTRY + "    yyy: 1\n")
    with pytest.raises(SpecError) as e:
        read_specs([a, b, tmp_path / "none.yaml"])
    assert [p.split(": ")[1] for p in e.value.problems[:2]] == ["kernels[0].zzz", "kernels[0].yyy"]
    assert "none.yaml: cannot be read: No such file or directory" in e.value.problems[2]


def test_two_files_must_name_one_bundle_and_different_kernels(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(ENTRY)
    b.write_text(ENTRY.replace("name: t", "name: u"))
    with pytest.raises(SpecError) as e:
        read_specs([a, b])
    assert "makes t 1.0.0, and one build makes one bundle" in e.value.problems[0]
    assert "first made at" in e.value.problems[1]


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_bytes(b"edition: 2026\n# \xff\n")
    with pytest.raises(SpecError, match="byte 16 is not UTF-8"):
        read_specs([path])


def test_h08_p06_unsupported_combinations_are_answered_when_the_spec_is_read():
    """H08 (pytorch#195603, vllm#42669), P06 (flash-attention#2615, sglang#35757): never found at run time."""
    text = ENTRY.replace("head_dim: 128", "head_dim: 256") + "    paged_kv: true\n    page_size: [1, 16, 528]\n"
    found = problems(text)
    assert [p.split(": ")[1:3] for p in found] == [
        ["kernels[0].head_dim", "256"],
        ["kernels[0].paged_kv", "true"],
    ]
    assert "not supported for fmha_fwd on sm_100a" in found[0] and "not built yet" in found[1]
