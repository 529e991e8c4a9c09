"""Problems and selection: pure functions, no driver. Case ids refer to public reports."""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from pathlib import Path

import pytest

from fmha_gen.arch import ARCHS
from fmha_gen.built import BUILT
from fmha_gen.errors import ProblemError, SelectionError, SpecError
from fmha_gen.runtime import Device, Problem, TensorArg, covers, explain, select
from fmha_gen.runtime.driver import ARCH_CAPABILITY
from fmha_gen.runtime.problem import describe_launch, resolve_mask
from fmha_gen.runtime.select import not_built, spec_lines
from fmha_gen.spec import read_specs, read_text
from tests.launcher_fixtures import B200, make_record, small_manifest

CORE = ("fmha_fwd", "sm_100a")
FULL_Q2 = make_record()[0]
FULL_Q1 = make_record(q_stage=1)[0]
CAUSAL_Q2 = make_record(mask="causal")[0]
FP16 = make_record(dtype="fp16")[0]
MLA = make_record(dims=(192, 128))[0]
MANIFEST = small_manifest(FULL_Q2, FULL_Q1, CAUSAL_Q2, FP16, MLA)


def problem(**changes: object) -> Problem:
    base: dict[str, object] = {
        "dtype": "bf16", "batch": 2, "seqlen_q": 300, "seqlen_k": 500, "num_heads_q": 8, "num_heads_kv": 2,
        "head_dim_qk": 128, "head_dim_v": 128,
    }  # fmt: skip
    return Problem(**(base | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, FULL_Q2),
        ({"seqlen_q": 129}, FULL_Q2),
        ({"seqlen_q": 128}, FULL_Q1),
        ({"seqlen_q": 1}, FULL_Q1),
        ({"mask": "causal"}, CAUSAL_Q2),
        ({"dtype": "fp16"}, FP16),
        ({"head_dim_qk": 192}, MLA),
    ],
)
def test_selects_by_dtype_dims_mask_and_rows(changes: dict[str, object], expected: object) -> None:
    assert select(MANIFEST, problem(**changes), B200).id == expected.id  # type: ignore[attr-defined]


def test_lowest_rank_wins_then_the_lowest_id() -> None:
    slow = dataclasses.replace(FULL_Q2, id="fmha_fwd-a-slow", rank=1)
    fast = dataclasses.replace(FULL_Q2, id="fmha_fwd-z-fast", rank=0)
    twin = dataclasses.replace(FULL_Q2, id="fmha_fwd-y-fast", rank=0)
    assert select(small_manifest(slow, fast), problem(), B200).id == fast.id
    assert select(small_manifest(slow, fast, twin), problem(), B200).id == twin.id


def test_c02_a21_a_miss_lists_every_kernel_with_its_reason_and_the_spec_line() -> None:
    """C02, A21: one head size absent; the error says what is there, what differs, and what to write."""
    with pytest.raises(SelectionError) as e:
        select(MANIFEST, problem(head_dim_qk=96, head_dim_v=96, mask="causal"), B200)
    text = str(e.value)
    for record in (FULL_Q2, FULL_Q1, CAUSAL_Q2, FP16, MLA):
        assert record.id in text
    assert f"{CAUSAL_Q2.id}: head_dim (128, 128), wanted (96, 96)\n" in text
    assert "mask full, wanted causal" in text and "dtype fp16, wanted bf16" in text
    assert "  - {family: fmha_fwd, dtype: bf16, head_dim: 96, mask: causal}" in text
    assert text.index(CAUSAL_Q2.id) < text.index(FULL_Q2.id), "the nearest kernel comes first"


@pytest.mark.parametrize("capability", [(10, 3), (12, 0), (9, 0), (8, 0), (10, 1)])
def test_a01_another_compute_capability_is_a_miss(capability: tuple[int, int]) -> None:
    """A01: a bundle of sm_100a only; the device's capability and the bundle's archs are named."""
    device = dataclasses.replace(B200, compute_capability=capability)
    with pytest.raises(SelectionError) as e:
        select(MANIFEST, problem(), device)
    assert f"compute capability {capability[0]}.{capability[1]}" in str(e.value)
    assert "the bundle holds archs sm_100a" in str(e.value)
    if capability == (9, 0):
        assert "archs: [sm_90a]" in str(e.value)
    else:
        known = f"builds for sm_100a (10.0), sm_90a (9.0), not for compute capability {capability[0]}.{capability[1]}"
        assert known in str(e.value) and "archs: [" not in str(e.value)
    assert "arch sm_100a runs on compute capability 10.0 only" in str(e.value)


def test_a02_the_arch_table_is_explicit_and_is_that_of_the_generator() -> None:
    assert {name: arch.compute_capability for name, arch in ARCHS.items()} == ARCH_CAPABILITY


def test_two_archs_in_one_bundle_each_serve_their_device() -> None:
    hopper = make_record(arch="sm_90a")[0]
    manifest = small_manifest(hopper, FULL_Q2)
    h200 = Device(1, "NVIDIA H200", (9, 0), 132, 232448)
    assert select(manifest, problem(), h200).id == hopper.id
    assert select(manifest, problem(), B200).id == FULL_Q2.id


def test_explain_gives_empty_reasons_exactly_for_what_serves() -> None:
    trace = {entry.id: why for entry, why in explain(MANIFEST, problem(seqlen_q=7, head_dim_qk=192), B200)}
    assert [kernel for kernel, why in trace.items() if not why] == [MLA.id]
    assert trace[FULL_Q2.id] == ("head_dim (128, 128), wanted (192, 128)",)
    assert len(trace[FP16.id]) == len(trace[CAUSAL_Q2.id]) == 2


def test_row_bounds_prefer_and_do_not_exclude() -> None:
    """A bundle of one q_stage serves every number of rows."""
    for only in (FULL_Q1, FULL_Q2):
        for rows in (0, 1, 128, 129, 4096):
            assert select(small_manifest(only), problem(seqlen_q=rows), B200).id == only.id
    better = dataclasses.replace(FULL_Q2, rank=9)
    assert select(small_manifest(FULL_Q1, better), problem(seqlen_q=129), B200).id == better.id


@pytest.mark.parametrize(
    ("mask", "window"),
    [("full", (1, 1)), ("causal", (3, 0)), ("window", None), ("window", "abc"), ("window", 3), ("window", (-5, None)),
     ("window", (None, 0)), ("window", (None, None)), ("full", "abc")],
)  # fmt: skip
def test_a_window_belongs_to_its_mask(mask: str, window: object) -> None:
    with pytest.raises(ProblemError, match=r"^window"):
        problem(mask=mask, window=window)
    assert problem(mask="window", window=(4, None)).window == (4, None)


def test_a_pinned_variant_serves_whatever_the_rows() -> None:
    assert select(MANIFEST, problem(seqlen_q=7), B200, "*full-q2*").id == FULL_Q2.id
    readable = FULL_Q2.id.rpartition("-")[0]
    assert select(MANIFEST, problem(seqlen_q=7), B200, readable).id == FULL_Q2.id
    with pytest.raises(SelectionError, match="mask causal, wanted full"):
        select(MANIFEST, problem(), B200, "*causal*")
    with pytest.raises(SelectionError, match="'nope': matches no kernel") as e:
        select(MANIFEST, problem(), B200, "nope")
    assert FULL_Q2.id in str(e.value)


def test_m11_s03_features_that_no_kernel_has_are_misses_that_name_the_spec_field(monkeypatch) -> None:
    """M11, S03: a window or softcap that the kernels were built without is refused, never ignored."""
    with pytest.raises(SelectionError, match=r"mask full, wanted window[\s\S]*no spec adds one:\n  mask window is not"):
        select(MANIFEST, problem(mask="window", window=(128, 0)), B200)
    with pytest.raises(SelectionError, match=r"built without softcap[\s\S]*no spec adds one:\n  softcap is not built"):
        select(MANIFEST, problem(features=("softcap",)), B200)
    monkeypatch.setitem(BUILT, CORE, dataclasses.replace(BUILT[CORE], features=("softcap",)))
    with pytest.raises(SelectionError, match=r"built without softcap[\s\S]*mask: full, softcap: true}"):
        select(MANIFEST, problem(features=("softcap",)), B200)
    capped = small_manifest(make_record(features=("softcap",))[0])
    with pytest.raises(SelectionError, match="built for softcap"):
        select(capped, problem(), B200)
    assert select(capped, problem(features=("softcap",)), B200)


def test_the_suggested_spec_lines_are_a_spec(tmp_path: Path) -> None:
    """What a miss tells the user to write is read by our own reader, and gives the kernel that was missing."""
    wanted = problem(head_dim_qk=192, mask="causal", dtype="fp16")
    with pytest.raises(SelectionError) as e:
        select(MANIFEST, wanted, B200)
    lines = str(e.value).partition("build again:\n")[2]
    path = tmp_path / "more.yaml"
    path.write_text("edition: 2026\nbundle: {name: more, version: 0.1.0}\n" + textwrap.dedent(lines))
    specs = read_specs([path]).specs
    assert [(s.dtype, s.head_dim_qk, s.head_dim_v, s.mask, s.arch) for s in specs] == [
        ("fp16", 192, 128, "causal", "sm_100a")
    ]


def test_a_line_is_suggested_if_and_only_if_the_spec_takes_it() -> None:
    """Every dtype, head size, mask and feature that a launch can ask for, built or not, on every architecture."""
    devices = [dataclasses.replace(B200, compute_capability=cc) for cc in (*ARCH_CAPABILITY.values(), (12, 0))]
    dims = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
    features = [(), ("softcap",), ("sink",)]
    taken = refused = 0
    for device, (d, dv), dtype, mask, more in itertools.product(
        devices, dims, ("bf16", "fp16"), ("full", "causal", "window"), features
    ):
        bounds = (5, 0) if mask == "window" else None
        wanted = problem(dtype=dtype, head_dim_qk=d, head_dim_v=dv, mask=mask, window=bounds, features=more)
        lines, why = spec_lines(wanted, device), not_built(wanted, device)
        assert bool(lines) != bool(why)
        if lines:
            (spec,) = read_text("edition: 2026\nbundle: {name: m, version: '1'}\n" + "\n".join(lines), "s").specs
            assert (spec.head_dim_qk, spec.head_dim_v, spec.dtype, spec.mask) == (d, dv, dtype, mask)
            taken += 1
        elif device.compute_capability in ((9, 0), (10, 0)):
            arch = "sm_90a" if device.compute_capability == (9, 0) else "sm_100a"
            flags = "".join(f", {f}: true" for f in more)
            entry = f"{{family: fmha_fwd, dtype: {dtype}, head_dim: {{qk: {d}, v: {dv}}}, mask: {mask}{flags}}}"
            with pytest.raises(SpecError):
                read_text(f"edition: 2026\nbundle: {{name: m, version: '1'}}\narchs: {arch}\nkernels: [{entry}]\n", "s")
            refused += 1
    assert taken == 2 * 2 * 4 + 2 * 2 * 5 and refused > 100


def test_a_variant_that_leaves_the_kernel_out_is_the_cause_and_no_line_is_suggested() -> None:
    with pytest.raises(SelectionError) as e:
        select(MANIFEST, problem(), B200, "*causal*")
    served = [
        r.id for r in (FULL_Q1, FULL_Q2) if str(e.value).endswith(f"without variant '*causal*', {r.id} serves it")
    ]
    assert len(served) == 1
    assert "kernels:" not in str(e.value)


def test_lse_from_a_kernel_without_it_is_a_miss() -> None:
    without = dataclasses.replace(FULL_Q2, serves=dataclasses.replace(FULL_Q2.serves, lse=False))
    assert select(small_manifest(without), problem(), B200)
    with pytest.raises(SelectionError, match="built without lse"):
        select(small_manifest(without), problem(lse=True), B200)


# ---- masks and windows


@pytest.mark.parametrize(
    ("causal", "window", "mask", "bounds"),
    [
        (False, None, "full", None),
        (True, None, "causal", None),
        (False, (None, None), "full", None),
        (False, (None, 0), "causal", None),
        (True, (None, None), "causal", None),
        (True, (None, 0), "causal", None),
        (True, (128, None), "window", (128, 0)),
        (False, (128, 0), "window", (128, 0)),
        (False, [None, 5], "window", (None, 5)),
    ],
)
def test_m01_one_spelling_of_unbounded(causal: bool, window: object, mask: str, bounds: object) -> None:
    """M01: the causal flag and (None, 0) are the same kernel."""
    assert resolve_mask(causal, window) == (mask, bounds)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("window", "name"), [((-1, 0), "window_left: -1"), ((-1, -1), "window_left: -1"), ((None, -1), "window_right: -1")]
)
def test_m01_negative_bounds_are_refused_by_name(causal: bool, window: tuple[object, object], name: str) -> None:
    """M01: -1 is neither a literal bound (an empty band) nor a sentinel."""
    with pytest.raises(ProblemError, match=f"{name} is negative.*None, not -1"):
        resolve_mask(causal, window)


def test_causal_with_a_right_bound_clashes() -> None:
    with pytest.raises(ProblemError, match="window_right: 5 with causal=True"):
        resolve_mask(True, (None, 5))
    for bad in (7, (1, 2, 3), ("1", 0), (1.5, 0), (True, 0)):
        with pytest.raises(ProblemError, match="window"):
            resolve_mask(False, bad)
    with pytest.raises(ProblemError, match="causal"):
        resolve_mask(1, None)  # type: ignore[arg-type]


# ---- scale


def test_s04_none_zero_and_explicit_scales_are_three_things() -> None:
    """S04: 0 is a scale, not the default; (192, 128) divides by sqrt(192)."""
    assert problem().softmax_scale == 1 / math.sqrt(128)
    assert problem(head_dim_qk=192).softmax_scale == 1 / math.sqrt(192)
    assert problem(softmax_scale=0.0).softmax_scale == 0.0
    # what reaches the kernel is never 0 and never subnormal: masked scores are -inf, and 0 x -inf is NaN
    assert problem(softmax_scale=0.0).softmax_scale_log2 == problem(softmax_scale=1e-42).softmax_scale_log2 == 2.0**-126
    assert problem(softmax_scale=1e-3).softmax_scale_log2 == pytest.approx(1e-3 * 1.4426950408889634)


@pytest.mark.parametrize(
    ("value", "words"),
    [(-0.125, "is negative"), (math.nan, "nan is not finite"), (math.inf, "inf is not finite"),
     (-math.inf, "-inf is not finite"), ("0.001", "is no number"), (True, "is no number"), (3e38, "float32 range")],
)  # fmt: skip
def test_s04_c04_bad_scales_are_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(ProblemError, match=f"softmax_scale: .*{words}"):
        problem(softmax_scale=value)


# ---- head counts and sizes


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "words"),
    [(33, 2, "33 / 2 is no whole number"), (3, 2, "no whole number"), (8, 0, "num_heads_kv: 0"),
     (2, 8, "no whole number"), (0, 2, "num_heads_q: 0"), (-4, 2, "num_heads_q: -4")],
)  # fmt: skip
def test_h02_z05_head_counts_are_refused_before_launch(heads_q: int, heads_kv: int, words: str) -> None:
    """H02, Z05: 33 heads over 2, more KV heads than q heads, none at all."""
    with pytest.raises(ProblemError, match=words):
        problem(num_heads_q=heads_q, num_heads_kv=heads_kv)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 28, 64])
def test_h01_every_whole_ratio_is_served(ratio: int) -> None:
    p = problem(num_heads_q=2 * ratio)
    assert p.ratio == ratio and select(MANIFEST, p, B200).id == FULL_Q2.id


@pytest.mark.parametrize("empty", [{"batch": 0}, {"seqlen_q": 0}])
def test_z05_no_queries_is_a_legal_problem(empty: dict[str, object]) -> None:
    """Z05: batch 0 is no error."""
    assert problem(**empty).empty
    assert not problem(seqlen_k=0).empty


def test_sizes_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ProblemError, match="seqlen_k: 2147483648; it must be in 0..2147483647"):
        problem(seqlen_k=2**31)
    with pytest.raises(ProblemError, match="batch: -1"):
        problem(batch=-1)


# ---- tensors of a launch


def tensors(dtype: str = "bf16", **changes: TensorArg) -> dict[str, TensorArg]:
    shapes = {"q": (2, 300, 8, 128), "k": (2, 500, 2, 128), "v": (2, 500, 2, 128), "out": (2, 300, 8, 128)}
    return {
        n: TensorArg.contiguous(0x1000000 * (i + 1), s, dtype, 0) for i, (n, s) in enumerate(shapes.items())
    } | changes


def replaced(name: str, **changes: object) -> dict[str, TensorArg]:
    base = tensors()
    return base | {name: dataclasses.replace(base[name], **changes)}  # type: ignore[arg-type]


def test_z10_dtypes_are_listed_per_tensor_with_what_the_bundle_holds() -> None:
    """Z10: mixed, all float32, and an output of another 16-bit type."""
    with pytest.raises(ProblemError, match="q bf16, k fp16, v bf16, out bf16; .* bf16, fp16, which is what the bundle"):
        describe_launch(**replaced("k", dtype="fp16"))
    with pytest.raises(ProblemError, match="q float32, k float32, v float32, out float32; .* one of fp16, which"):
        describe_launch(**tensors("float32"), served=("fp16",))
    with pytest.raises(ProblemError, match="out fp16"):
        describe_launch(**replaced("out", dtype="fp16"))
    with pytest.raises(ProblemError, match="uint16.*dtype="):
        describe_launch(**tensors("uint16"))
    assert describe_launch(**tensors("uint16"), dtype="fp16").problem.dtype == "fp16"


@pytest.mark.parametrize(("offset", "says"), [(2, "offset 2"), (8, "offset 8")])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_t05_misaligned_pointers_are_refused_in_words(name: str, offset: int, says: str) -> None:
    """T05: 2 and 8 bytes off, in words, not as a fault of the kernel."""
    with pytest.raises(ProblemError, match=f"{name}: pointer must be 16-byte aligned, is at {says}"):
        describe_launch(**replaced(name, address=0x10000 + offset))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_t05_strides_that_tma_cannot_walk_are_refused_in_words(name: str) -> None:
    """T05: odd row strides, and a last axis that is not contiguous."""
    heads = 8 if name in ("q", "out") else 2
    rows = 300 if name in ("q", "out") else 500
    with pytest.raises(ProblemError, match=rf"{name}: stride of axis 1 .* 1025 elements = 2050 bytes; .* 16 bytes"):
        describe_launch(**replaced(name, strides=(rows * 1040, 1025, 128, 1)))
    with pytest.raises(ProblemError, match=rf"{name}: stride of axis 3 .* is 2 elements; the last axis"):
        describe_launch(**replaced(name, strides=(rows * heads * 256, heads * 256, 256, 2)))
    with pytest.raises(ProblemError, match="negative strides"):
        describe_launch(**replaced(name, strides=(rows * heads * 128, -heads * 128, 128, 1)))


def test_t10_batch_strides_up_to_the_limit_of_tma() -> None:
    """T10: 2^31 + 64 elements work; 2^40 bytes are refused before the driver sees them."""
    big = 2**31 + 64
    launch = describe_launch(**replaced("k", strides=(big, 256, 128, 1)))
    assert launch.tensors["k"].strides[0] == big
    with pytest.raises(ProblemError, match=r"k: stride of axis 0 \(batch\) .* below 2\^40"):
        describe_launch(**replaced("k", strides=(2**39, 256, 128, 1)))


def test_stride_zero_is_an_input_only() -> None:
    assert describe_launch(**replaced("v", strides=(128000, 256, 0, 1)))
    with pytest.raises(ProblemError, match="out: stride of axis 2 .* must not write one element twice"):
        describe_launch(**replaced("out", strides=(307200, 1024, 0, 1)))


def test_z06_a_tensor_without_elements_may_have_a_null_pointer() -> None:
    none = TensorArg.contiguous(0, (2, 0, 2, 128), "bf16", 0)
    assert describe_launch(**tensors(k=none, v=none)).problem.seqlen_k == 0
    with pytest.raises(ProblemError, match="q: null pointer"):
        describe_launch(**replaced("q", address=0))


def test_shapes_that_disagree_are_refused_by_name() -> None:
    wrong = TensorArg.contiguous(0x50000, (2, 499, 2, 128), "bf16", 0)
    with pytest.raises(ProblemError, match=r"v: shape \(2, 499, 2, 128\); wanted \(2, 500, 2, 128\)"):
        describe_launch(**tensors(v=wrong))
    with pytest.raises(ProblemError, match="q: shape .* has 3 axes; wanted 4"):
        describe_launch(**tensors(q=TensorArg.contiguous(16, (300, 8, 128), "bf16", 0)))
    with pytest.raises(ProblemError, match=r"out: shape"):
        describe_launch(**tensors(out=TensorArg.contiguous(16, (2, 8, 300, 128), "bf16", 0)))
    with pytest.raises(ProblemError, match="q on cuda:0, k on cuda:1"):
        describe_launch(**replaced("k", device=1))


def test_lse_is_float32_of_batch_heads_rows() -> None:
    lse = TensorArg.contiguous(0x9000004, (2, 8, 300), "float32", 0)
    assert describe_launch(**tensors(), lse=lse).problem.lse
    with pytest.raises(ProblemError, match="lse: dtype bf16; wanted float32"):
        describe_launch(**tensors(), lse=dataclasses.replace(lse, dtype="bf16"))
    with pytest.raises(ProblemError, match=r"lse: shape \(2, 300, 8\)"):
        describe_launch(**tensors(), lse=TensorArg.contiguous(0x9000000, (2, 300, 8), "float32", 0))
    with pytest.raises(
        ProblemError, match="lse: pointer must be 4-byte aligned, is at offset 2.*at a multiple of 4 bytes"
    ):
        describe_launch(**tensors(), lse=dataclasses.replace(lse, address=0x9000002))


def test_t04_axes_of_extent_1_take_any_stride() -> None:
    """T04: alone and all at once; frameworks put 0, 1, 7 or 2^40 there."""
    for odd in (0, 1, 7, 2**40, -5):
        one = {n: TensorArg(0x1000 * (i + 1), (1, 1, 1, 128), (odd, odd, odd, 1), "bf16", 0)
               for i, n in enumerate(("q", "k", "v", "out"))}  # fmt: skip
        assert describe_launch(**one).problem.num_heads_q == 1


@pytest.mark.parametrize("device", [B200, dataclasses.replace(B200, compute_capability=(9, 0))])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mask": "causal"}, {"mask": "causal", "dtype": "fp16"}, {"head_dim_qk": 96}, {"features": ("sink",)},
     {"head_dim_qk": 192, "lse": True}],
)  # fmt: skip
def test_covers_says_what_select_decides(device: Device, changes: dict[str, object]) -> None:
    found = covers(MANIFEST, problem(**changes), device)
    try:
        select(MANIFEST, problem(**changes), device)
    except SelectionError:
        assert found
    else:
        assert found == ()


def test_covers_names_what_the_closest_kernels_lack_once() -> None:
    assert covers(MANIFEST, problem(mask="causal", dtype="fp16"), B200) == (
        "dtype bf16, wanted fp16", "mask full, wanted causal"
    )  # fmt: skip
    assert covers(MANIFEST, problem(head_dim_qk=96), B200) == (
        "head_dim (128, 128), wanted (96, 128)", "head_dim (192, 128), wanted (96, 128)"
    )  # fmt: skip
    assert covers(small_manifest(), problem(), B200) == ("bundle core 0.1.0 holds no kernel",)
