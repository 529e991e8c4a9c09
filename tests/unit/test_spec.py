"""Matrix expansion, filters, identity and the JSON schema."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jsonschema
import pytest
import yaml

from fmha_gen.errors import SpecError
from fmha_gen.resources import data_dir
from fmha_gen.spec import KernelSpec, Registers, check_identities, only_arch, read_specs, read_text, schema
from fmha_gen.spec.built import BUILT
from fmha_gen.spec.fields import FIELDS
from fmha_gen.spec.model import AUTO_FIELDS

HEADER = "edition: 2026\nbundle: {name: t, version: 1.0.0}\nkernels:\n"

RESOLVED = KernelSpec(
    family="fmha_fwd",
    arch="sm_100a",
    dtype="bf16",
    head_dim_qk=128,
    head_dim_v=128,
    mask="full",
    q_stage=2,
    tile_m=128,
    tile_n=128,
    kv_stage=3,
    registers=Registers(192, 80, 48),
    num_ctas=1,
    schedule="static_persistent",
    exp2_emulation=12,
)


def expand(entry: str) -> list[KernelSpec]:
    return list(read_text(HEADER + "  - {family: fmha_fwd, " + entry + "}\n", "s.yaml").specs)


def test_core_is_the_full_product():
    file = read_specs([data_dir("specs") / "core.yaml"])
    assert (file.bundle.name, file.archs) == ("core", ("sm_100a", "sm_90a"))
    dims = [(64, 64), (96, 96), (128, 128), (192, 128)]
    wanted = [
        (dtype, dim, mask, q_stage)
        for dtype in ("bf16", "fp16")
        for dim in dims
        for mask in ("full", "causal")
        for q_stage in (2, 1)
    ]
    blackwell = [s for s in file.specs if s.arch == "sm_100a"]
    assert [(s.dtype, (s.head_dim_qk, s.head_dim_v), s.mask, s.q_stage) for s in blackwell] == wanted
    hopper = [(s.tile_m, s.dtype, (s.head_dim_qk, s.head_dim_v), s.mask) for s in file.specs if s.arch == "sm_90a"]
    assert hopper == [
        (tile_m, dtype, dim, mask)
        for tile_m, of_tile in ((None, (*dims, (256, 256))), (192, dims[:1]))
        for dtype in ("bf16", "fp16")
        for dim in of_tile
        for mask in ("full", "causal")
    ]
    assert all(s.lse and s.features == () for s in file.specs) and len(blackwell) + len(hopper) == len(file.specs)


def test_the_worked_example_overrides_stages_and_registers():
    (spec,) = read_specs([data_dir("specs") / "mla_192x128.yaml"]).specs
    assert (spec.head_dim_qk, spec.head_dim_v, spec.q_stage, spec.kv_stage) == (192, 128, 2, 3)
    assert spec.registers == Registers(softmax=200, correction=64, other=48)
    assert spec.auto_fields == ("tile_m", "tile_n", "num_ctas", "schedule", "exp2_emulation")


def test_lists_multiply_in_table_order_whatever_the_order_of_keys():
    a = expand("dtype: [bf16, fp16], head_dim: 64, mask: [causal, full]")
    b = expand("mask: [causal, full], head_dim: 64, dtype: [bf16, fp16]")
    assert [(s.dtype, s.mask) for s in a] == [
        ("bf16", "causal"),
        ("bf16", "full"),
        ("fp16", "causal"),
        ("fp16", "full"),
    ]
    assert a == b


def test_lists_multiply_inside_mappings_too():
    specs = expand(
        "dtype: bf16, head_dim: 64, mask: full, tile: {m: 128, n: [64, 128]}, "
        "registers: [auto, {softmax: [192, 200], correction: 64, other: 48}]"
    )
    assert [(s.tile_n, s.registers and s.registers.softmax) for s in specs] == [
        (64, None),
        (64, 192),
        (64, 200),
        (128, None),
        (128, 192),
        (128, 200),
    ]


def test_head_dim_forms():
    specs = expand("dtype: bf16, head_dim: [64, {qk: 192, v: 128}, {qk: 96, v: 96}], mask: full")
    assert [(s.head_dim_qk, s.head_dim_v) for s in specs] == [(64, 64), (192, 128), (96, 96)]


def test_auto_is_the_same_as_leaving_the_key_out():
    a = expand("dtype: bf16, head_dim: 64, mask: full")
    b = expand("dtype: bf16, head_dim: 64, mask: full, q_stage: auto, tile: {m: auto, n: auto}, registers: auto")
    assert a == b and a[0].auto_fields == AUTO_FIELDS


def test_include_keeps_and_exclude_drops():
    entry = "dtype: [bf16, fp16], head_dim: [64, 128], mask: [full, causal], q_stage: [2, 1]"
    assert len(expand(entry)) == 16
    kept = expand(entry + ", include: [{head_dim: 64}, {mask: causal, q_stage: 2}]")
    assert len(kept) == 8 + 2
    assert all(s.head_dim_v == 64 or (s.mask, s.q_stage) == ("causal", 2) for s in kept)
    dropped = expand(entry + ", exclude: [{dtype: fp16, head_dim: [64, 128], q_stage: 1}, {arch: 100a, mask: full}]")
    assert len(dropped) == 16 - 4 - 8 + 2
    assert not any(s.mask == "full" or (s.dtype, s.q_stage) == ("fp16", 1) for s in dropped)


def test_arch_option_takes_any_spelling_and_refuses_others():
    path = data_dir("specs") / "core.yaml"
    assert len(read_specs([path], arch="10.0a").specs) == 32
    with pytest.raises(SpecError, match="--arch 99z: no known architecture; accepted are sm_100a"):
        read_specs([path], arch="99z")
    with pytest.raises(SpecError, match="--arch sm_103a: not built yet; accepted are sm_100a .*; leave --arch out"):
        read_specs([path], arch="103a")
    with pytest.raises(SpecError, match="--arch sm_90a: the spec lists sm_100a; add it to archs"):
        only_arch(only_arch(read_specs([path]), "sm_100a"), "90a")


def test_id_is_readable_part_and_digest():
    assert RESOLVED.id == f"fmha_fwd-sm100a-bf16-d128-full-q2-{RESOLVED.digest[:8]}"
    mla = RESOLVED.replace(head_dim_qk=192, mask="causal", q_stage=1)
    assert mla.name == "fmha_fwd-sm100a-bf16-d192x128-causal-q1"
    assert RESOLVED.replace(paged_kv=True, page_size=64, sink=True).name.endswith("-q2-paged64-sink")
    assert RESOLVED.replace(lse=False).name.endswith("-q2-nolse")


CHANGES = {
    "family": "fmha_combine",
    "arch": "sm_103a",
    "dtype": "fp16",
    "head_dim_qk": 192,
    "head_dim_v": 64,
    "mask": "causal",
    "q_stage": 1,
    "tile_m": 64,
    "tile_n": 64,
    "kv_stage": 4,
    "registers": Registers(200, 64, 48),
    "num_ctas": 2,
    "schedule": "longest_first",
    "exp2_emulation": 14,
    "warpgroup_order": "gemm",
    "overlap": True,
    "q_in_registers": True,
    "across_tiles": True,
    "recompute_s": True,
    "rescale_threshold": 0.0,
    "lse": False,
    "varlen": True,
    "paged_kv": True,
    "page_size": 16,
    "sink": True,
    "softcap": True,
    "pack_gqa": True,
    "split_kv": True,
}


def test_a04_every_field_changes_the_key():
    """A04 (flash-attention#2566): two specs that differ in one field are two kernels."""
    assert set(CHANGES) == {f.name for f in dataclasses.fields(KernelSpec)} - {"source"}
    digests = {RESOLVED.digest}
    for name, value in CHANGES.items():
        changed = RESOLVED.replace(**{name: value})
        digests.add(changed.digest)
        assert KernelSpec.from_canonical(json.loads(json.dumps(changed.canonical()))) == changed
    assert len(digests) == 1 + len(CHANGES)


def test_a06_the_key_encoding_is_injective():
    """A06 (triton-lang/triton#1592, tinygrad#15811)."""
    specs = [
        RESOLVED.replace(dtype=dtype, mask=mask)
        for dtype, mask in (('a","mask":"b', "c"), ("a", 'b","x":"c'), ("a|b", "c"), ("a", "b|c"), ("a,b", "c"))
    ]
    assert len({s.digest for s in specs}) == len(specs)


def test_the_digest_is_the_same_in_another_process_and_apart_from_the_source():
    code = (
        "from fmha_gen.spec import KernelSpec, Registers; import json, sys; "
        "print(KernelSpec.from_canonical(json.loads(sys.argv[1])).digest)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, json.dumps(RESOLVED.canonical())],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert out.stdout.strip() == RESOLVED.digest == RESOLVED.replace(source="elsewhere:3").digest


def test_features_at_their_default_are_no_part_of_the_identity():
    assert set(RESOLVED.canonical()).isdisjoint({"varlen", "sink", "page_size", "lse", "source"})


def test_auto_has_no_identity():
    with pytest.raises(SpecError, match="s.yaml:4: kv_stage: still auto; plan the kernel"):
        _ = RESOLVED.replace(kv_stage=None, source="s.yaml:4").id


def test_a_record_of_a_newer_release_is_refused_by_name():
    with pytest.raises(SpecError, match="rec.json: alibi: not a field of a spec"):
        KernelSpec.from_canonical({**RESOLVED.canonical(), "alibi": True}, "rec.json")
    with pytest.raises(SpecError, match="damaged"):
        KernelSpec.from_canonical({"family": "fmha_fwd"}, "rec.json")


def test_two_spellings_of_one_kernel_are_found_after_planning():
    check_identities([RESOLVED, RESOLVED.replace(kv_stage=4)])
    with pytest.raises(SpecError, match="b.yaml:9: plans to .* as a.yaml:4 does"):
        check_identities([RESOLVED.replace(source="a.yaml:4"), RESOLVED.replace(source="b.yaml:9")])


def test_choices_marked_later_are_those_that_nothing_builds():
    attrs = {"dtype": "dtypes", "mask": "masks", "q_stage": "q_stages", "num_ctas": "num_ctas", "schedule": "schedules"}
    for name, attr in attrs.items():
        leaf = FIELDS[name].leaf
        built = {value for b in BUILT.values() for value in getattr(b, attr)}
        assert set(leaf.choices) - set(leaf.later) == built, name
    leaf = FIELDS["tile"].members["m"]
    assert set(leaf.choices) - set(leaf.later) == {m for b in BUILT.values() for m in b.tile_ms}


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema())))


@pytest.mark.parametrize("name", ["core.yaml", "mla_192x128.yaml"])
def test_the_schema_accepts_the_shipped_specs(validator, name):
    validator.validate(yaml.safe_load((data_dir("specs") / name).read_text()))


@pytest.mark.parametrize(
    "line",
    [
        "kv_stagee: 3",
        "softmax_scale: 1.0",
        "kv_stage: 1",
        "kv_stage: []",
        "varlen: true",
        "split_kv: [false, true]",
        "mask: window",
        "q_stage: 3",
        "registers: {softmax: 201, correction: 64, other: 48}",
        "registers: {softmax: 200}",
        "tile: {}",
        "lse: auto",
        "exclude: [{}]",
        "exp2_emulation: 13",
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(validator, line):
    text = HEADER + f"  - family: fmha_fwd\n    dtype: bf16\n    head_dim: 128\n    {line}\n"
    text += "" if "mask" in line else "    mask: full\n"
    assert not validator.is_valid(yaml.safe_load(text))
    with pytest.raises(SpecError):
        read_text(text, "s.yaml")


@pytest.mark.parametrize(
    "line", ["tile: {n: 64}", "tile: auto", "registers: [auto, {softmax: 200, correction: 64, other: [48, 56]}]",
             "kv_stage: [2, auto]", "exclude: [{dtype: bf16, q_stage: auto}]", "rescale_threshold: 0", "varlen: false",
             "lse: [true, false]"]
)  # fmt: skip
def test_the_schema_accepts_what_the_reader_accepts(validator, line):
    text = HEADER + "  - family: fmha_fwd\n    dtype: [bf16, fp16]\n    head_dim: [64, {qk: 192, v: 128}]\n"
    text += f"    mask: full\n    {line}\n"
    validator.validate(yaml.safe_load(text))
    assert read_text(text, "s.yaml").specs


def test_minus_zero_is_zero():
    entry = "  - {family: fmha_fwd, dtype: bf16, head_dim: 128, mask: full, rescale_threshold: %s}\n"
    (minus,), (plus,) = (read_text(HEADER + entry % x, "s").specs for x in ("-0.0", "0"))
    assert minus == plus and str(minus.rescale_threshold) == str(plus.rescale_threshold) == "0.0"
