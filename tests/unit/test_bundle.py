"""Bundles: what is written, that it reads back, and that everything damaged or unsafe is refused by name."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from fmha_gen.bundle import check_bundle
from fmha_gen.errors import BundleError
from fmha_gen.manifest import KernelEntry, Manifest, Serves
from fmha_gen.manifest_io import check_relative_path, manifest_text, read_manifest, read_record, read_verified_file
from tests.fake_bundle import GENERATOR, TOOLCHAIN, make_bundle, make_kernel, make_ptx


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "demo-1.0.0")
    return tmp_path / "demo-1.0.0"


def tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def rewrite(root: Path, change, ascii_only: bool = False) -> None:
    """Edit the manifest as somebody would who also puts the digest right."""
    data = json.loads((root / "manifest.json").read_text())
    change(data)
    data["sha256"] = "0" * 64
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=ascii_only) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    (root / "manifest.json").write_text(text.replace('\n "sha256": "' + "0" * 64, '\n "sha256": "' + digest))


def only(root: Path, folder: str, name: str = "d128") -> Path:
    (path,) = (p for p in (root / folder).iterdir() if name in p.name)
    return path


def test_reads_back_what_was_written(root: Path):
    checked = check_bundle(root)
    assert [k.id for k in checked.manifest.kernels] == sorted(r.id for r in checked.records)
    assert checked.unreferenced == ()
    want = {k.record.id: k for k in (make_kernel(), make_kernel("fmha_fwd-sm100a-bf16-d64-causal-q1-89abcdef"))}
    for record in checked.records:
        kernel = want[record.id]
        blank = {name: getattr(kernel.record, name) for name in ("cubin", "ptx", "plan", "line_map", "source")}
        assert dataclasses.replace(record, **blank) == kernel.record
        assert read_verified_file(root, record.cubin) == kernel.cubin
        assert read_verified_file(root, record.ptx) == kernel.ptx
        assert record.line_map is not None and read_verified_file(root, record.line_map) == kernel.line_map
        assert record.source is not None and read_verified_file(root, record.source) == kernel.source


def test_same_kernels_same_bytes_whatever_their_order(tmp_path: Path):
    """A16: no dates, no folder names, no order of arrival."""
    kernels = [make_kernel(), make_kernel("fmha_fwd-sm100a-bf16-d64-causal-q1-89abcdef")]
    make_bundle(tmp_path / "a", kernels)
    make_bundle(tmp_path / "some where (1)" / "b", kernels[::-1])
    assert tree(tmp_path / "a") == tree(tmp_path / "some where (1)" / "b")


def test_nothing_is_touched_when_nothing_changed(root: Path):
    times = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}
    written = make_bundle(root)
    assert (written.files_written, written.files_removed) == (0, 0)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()} == times


def test_a_rebuild_repairs_damage(root: Path):
    """A08: the generator rebuilds what the run time refuses."""
    before = tree(root)
    only(root, "cubin").write_bytes(b"")
    only(root, "ptx").unlink()
    (root / "manifest.json").write_text("{")
    written = make_bundle(root)
    assert written.files_written == 3
    assert tree(root) == before


def test_readers_of_the_index_before_keep_their_files(root: Path):
    """A11: somebody opened the bundle, and it is rebuilt before he reads a kernel."""
    old = read_manifest(root)
    kernels = [dataclasses.replace(make_kernel(), ptx=make_ptx(make_kernel().record.symbol, comment="other"))]
    make_bundle(root, kernels)
    for entry in old.kernels:
        record = read_record(root, entry)
        read_verified_file(root, record.cubin), read_verified_file(root, record.ptx)
    assert check_bundle(root).unreferenced
    assert make_bundle(root, kernels).files_removed > 0
    assert check_bundle(root).unreferenced == ()


@pytest.mark.parametrize("size", [0, 100])
@pytest.mark.parametrize("folder", ["cubin", "ptx", "records", "plans", "lines", "source"])
def test_truncated_file_is_named_with_both_sizes(root: Path, folder: str, size: int):
    """A08: truncation by power loss."""
    path = only(root, folder)
    whole = path.read_bytes()
    size = min(size, len(whole) - 1)
    path.write_bytes(whole[:size])
    with pytest.raises(BundleError, match=f"{path.name}: {size} bytes, expected {len(whole)}"):
        check_bundle(root)


@pytest.mark.parametrize("folder", ["cubin", "ptx", "records", "plans", "lines", "source"])
def test_one_flipped_byte_is_named_with_both_digests(root: Path, folder: str):
    """A08: a flipped byte in any file of the bundle."""
    path = only(root, folder)
    data = bytearray(path.read_bytes())
    expected = hashlib.sha256(data).hexdigest()
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    actual = hashlib.sha256(data).hexdigest()
    with pytest.raises(BundleError, match=f"{path.name}: sha256 is {actual}, expected {expected}"):
        check_bundle(root)


def test_swapped_and_missing_cubins_are_named(root: Path):
    """A08: two cubins swapped; then one deleted."""
    a, b = only(root, "cubin", "d128"), only(root, "cubin", "d64")
    bytes_a, bytes_b = a.read_bytes(), b.read_bytes()
    a.write_bytes(bytes_b)
    b.write_bytes(bytes_a)
    with pytest.raises(BundleError, match=f"{a.name}: .*expected"):
        check_bundle(root)
    a.write_bytes(bytes_a)
    b.unlink()
    with pytest.raises(BundleError, match=f"{b.name}: no such file; the bundle is incomplete"):
        check_bundle(root)


@pytest.mark.parametrize("name", ["manifest.json", "records", "plans", "cubin", "ptx"])
def test_a_folder_in_place_of_a_file_is_named(root: Path, name: str):
    path = root / name if name.endswith(".json") else only(root, name)
    path.unlink()
    path.mkdir()
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BundleError, match=f"{path.name}: not a regular file; rebuild the bundle"):
        check_bundle(root)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_disk_that_takes_no_more_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        BundleError, match=r"demo: cannot be written \(No space left on device: .*demo/cubin/.*\.cubin\)"
    ):
        make_bundle(tmp_path / "demo")
    assert not list((tmp_path / "demo").rglob("*.tmp")) and not (tmp_path / "demo" / "manifest.json").exists()


def rewrite_record(root: Path, change) -> None:
    """Edit the d128 kernel's record as somebody would who also puts every digest right. change: of the decoded JSON."""

    def put(folder: str, suffix: str, data: bytes, name: str = "edited") -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        path = f"{folder}/{name}.{digest[:16]}{suffix}"
        (root / path).write_bytes(data)
        return {"path": path, "sha256": digest, "size_bytes": len(data)}

    record = json.loads(only(root, "records").read_text())
    change(record, put)

    def index(data: dict) -> None:
        (entry,) = (k for k in data["kernels"] if "d128" in k["id"])
        entry["serves"] = record["serves"]
        file = put("records", ".json", json.dumps(record).encode(), entry["id"])
        entry["record_sha256"], entry["record_bytes"] = file["sha256"], file["size_bytes"]

    rewrite(root, index)


def set_to(*path_and_value):
    """An edit of a record: the value at a path."""
    *path, key, value = path_and_value

    def change(record, put):
        for name in path:
            record = record[name]
        record[key] = value

    return change


def serving(key: str, value: object):
    return set_to("serves", key, value)


def both(*changes):
    def change(record, put):
        for one in changes:
            one(record, put)

    return change


def replace_ptx(text: str):
    def change(record, put):
        record["ptx"] = put("ptx", ".ptx", text.replace("SYMBOL", record["symbol"]).encode())

    return change


def replace_plan(plan: object):
    def change(record, put):
        record["plan"] = put("plans", ".json", json.dumps(plan).encode())

    return change


def planned(*path_and_value):
    """An edit of the kernel's plan: the value at a path, MISSING for no such key."""

    def change(record, put):
        plan = json.loads(json.dumps(make_kernel().plan))
        *path, key, value = path_and_value
        held = functools.reduce(operator.getitem, path, plan)
        held[key] = value
        if value is MISSING:
            del held[key]
        record["plan"] = put("plans", ".json", json.dumps(plan).encode())

    return change


def replace_line_map(data: bytes):
    def change(record, put):
        record["line_map"] = put("lines", ".json", data)

    return change


def spans(*spans: object):
    return replace_line_map(json.dumps({"files": ["kernel.py"], "spans": spans}).encode())


MISSING = object()
RULE = {"name": "persistent", "constants": {"rows": 256}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_to("launch", "grid", {"name": "evil", "constants": {}}), "launch rule 'evil': not a grid rule"),
        (set_to("launch", "grid", {**RULE, "constants": {"rows": 0}}), "constant rows is 0; it must be >= 1"),
        (set_to("launch", "scalars", {"x": RULE}), "launch rule 'persistent': not a scalar rule"),
        (
            set_to("launch", "dynamic_smem_bytes", 1 << 30),
            "dynamic_smem_bytes is 1073741824; sm_100a allows 0 to 232448",
        ),
        (set_to("launch", "dynamic_smem_bytes", -1), "dynamic_smem_bytes is -1"),
        (planned("smem_bytes", 10), "launch.dynamic_smem_bytes is 229376, plan.smem_bytes says 10"),
        (set_to("launch", "threads", 100), "launch.threads is 100; a block has whole warps"),
        (set_to("launch", "cluster", [0, 1, 1]), "a cluster has 1 to 16 CTAs"),
        (set_to("launch", "cluster", [32, 1, 1]), "a cluster has 1 to 16 CTAs"),
        (set_to("params", 2, "kind", "i16"), "parameter seqlen_q is of kind 'i16'; known are"),
        (set_to("params", 2, "kind", "i64"), "parameter seqlen_q of kind i64 has 4 bytes; it takes 8"),
        (set_to("resources", "registers", 64), "registers is 128, the record says 64"),
        (set_to("resources", "stack_bytes", 8), "stack_bytes is 0, the record says 8"),
        (set_to("resources", "code_bytes", 1), "code_bytes is 128, the record says 1"),
        (set_to("spec", "mask", "causal"), r"serves.masks is \('full',\), spec.mask says 'causal'"),
        (
            both(set_to("spec", "mask", "full"), serving("masks", ["full", "causal"])),
            r"serves.masks is \('full', 'causal'\), spec.mask says 'full'",
        ),
        (both(set_to("spec", "mask", "full"), serving("features", ["softcap"])), "the spec has no softcap"),
        (
            planned("serves", {"masks": ["full"], "min_rows": 0}),
            "serves.min_rows of the record is 129, plan.serves says 0",
        ),
        (planned("serves", None), "tiles is {} and serves None; both are mappings"),
        (planned("rank", 1), "rank is 0, plan.rank says 1"),
        (planned("tiles", {"rows_per_tile": 128}), "rows is 256, plan.tiles.rows_per_tile says 128"),
        (set_to("spec", "rescale_threshold", 8.5), "rescale_threshold is 8.5; a spec allows 0 to 8"),
        (set_to("spec", "rescale_threshold", float("nan")), r"bytes that are not JSON \(NaN is no finite number\)"),
        (set_to("spec", "rescale_threshold", "8"), "rescale_threshold is '8'; a spec allows 0 to 8"),
        (set_to("spec", "head_dim_qk", 64), "serves.head_dim_qk is 128, spec.head_dim_qk says 64"),
        (set_to("spec", "num_ctas", 2), "launch.cluster is 1, spec.num_ctas says 2"),
        (planned("tmem_alloc_cols", 256), "resources.tmem_cols is 512, plan.tmem_alloc_cols says 256"),
        (planned("params", []), "params of the record are not those of plan.params"),
        (replace_plan([]), r"is \[\]; a plan is a mapping"),
        (replace_ptx(""), "is PTX with no target, the record says sm_100a"),
        (replace_ptx(".target sm_90a\n.entry SYMBOL()\n"), "is PTX with target sm_90a"),
        (
            replace_ptx(".target sm_100a\n.entry SYMBOLx()\n"),
            "has no entry fmha_fwd_sm100a_bf16_d128_full_q2_01234567_0",
        ),
    ],
)
def test_edits_that_can_be_known_wrong_are_refused_with_every_digest_right(root: Path, change, says: str):
    rewrite_record(root, change)
    with pytest.raises(BundleError, match=says):
        check_bundle(root)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replace_plan({}), "spec is missing; a plan has the spec of its record"),
        (planned("spec", None), "spec is None; a plan has the spec"),
        (planned("spec", "head_dim_qk", 64), "spec.head_dim_qk of the record is 128, plan.spec says 64"),
        (planned("spec", "head_dim_qk", MISSING), "spec.head_dim_qk of the record is 128, plan.spec says missing"),
        (planned("spec", "mask", "causal"), "spec.mask of the record is missing, plan.spec says 'causal'"),
        (planned("roles", MISSING), "roles is missing; a plan has a list of them"),
        (planned("roles", {}), "roles is {}; a plan has a list of them"),
        (planned("roles", None), "roles is None; a plan has"),
        (planned("roles", 7), "roles is 7; a plan has"),
        (planned("roles", "all"), "roles is 'all'; a plan has"),
        (planned("roles", [7]), r"roles\[0\] is 7; a role is an object"),
        (planned("roles", 0, "name", 7), r"roles\[0\].name is 7; a role has a text"),
        (
            planned("roles", 0, "warp_ids", MISSING),
            r"roles\[0\].warp_ids is missing; a role has a list of whole numbers",
        ),
        (planned("roles", 0, "warp_ids", 3), r"roles\[0\].warp_ids is 3; a role has a list"),
        (planned("roles", 0, "warp_ids", 0, True), r"roles\[0\].warp_ids is \[True, 1, .*; a role has a list"),
        (planned("roles", 0, "num_regs", MISSING), r"roles\[0\].num_regs is missing; a role has a whole number"),
        (planned("roles", 0, "num_regs", "128"), r"roles\[0\].num_regs is '128'; a role has"),
        (
            planned("roles", []),
            r"roles: their warp_ids lack \[0, 1, 2, .*, 15\] and have \[\] too many; launch.threads is 512, so",
        ),
        (
            planned("roles", 0, "warp_ids", 5, 99),
            r"roles: their warp_ids lack \[5\] and have \[99\] too many; .* warps 0 to 15 is in one",
        ),
        (planned("roles", 0, "warp_ids", [*range(16), 3]), r"roles: their warp_ids lack \[\] and have \[3\] too many"),
    ],
)
def test_a_plan_without_what_the_simulator_needs_is_refused_by_every_reader(root: Path, change, says: str):
    rewrite_record(root, change)
    refused_by_every_reader(root, rf"/plans/edited\.\w+\.json: {says}")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replace_line_map(b"not JSON"), "8 bytes that are not JSON"),
        (replace_line_map(b"[]"), r"is \[\]; a line map is an object"),
        (replace_line_map(b"{}"), "files is missing; a line map has a list of names"),
        (replace_line_map(b'{"files": [7], "spans": []}'), r"files is \[7\]; a line map has a list of names"),
        (replace_line_map(b'{"files": []}'), "spans is missing; a line map has a list of them"),
        (spans(7), r"spans\[0\] is 7; it holds a PTX line, the index of a file and a source line"),
        (spans([1, 0]), r"spans\[0\] is \[1, 0\]; it holds"),
        (spans([1, 0, "2"]), r"spans\[0\] is \[1, 0, '2'\]; it holds"),
        (spans([1, -1, 2]), r"spans\[0\] is \[1, -1, 2\]; it holds"),
        (spans([1, 0, 2], [1, 0, 3]), r"spans\[1\] starts at PTX line 1; it must come after line 1"),
        (spans([1, 0, 2], [2, 1, 3]), r"spans\[1\] is of file 1; files has 1, counted from 0"),
    ],
)
def test_a_line_map_in_which_nothing_can_be_looked_up_is_refused_by_every_reader(root: Path, change, says: str):
    rewrite_record(root, change)
    refused_by_every_reader(root, rf"/lines/edited\.\w+\.json: {says}")


def refused_by_every_reader(root: Path, says: str) -> None:
    """By `inspect`, `verify`, and the launcher on the simulator, which `run` goes through."""
    with pytest.raises(BundleError, match=says):
        check_bundle(root)
    pytest.importorskip("numba", reason="the simulator needs numba")
    from fmha_gen.runtime import Bundle
    from fmha_gen.sim.driver import SimDriver
    from fmha_gen.verify import VerifyOptions, verify_bundle

    with pytest.raises(BundleError, match=says):
        verify_bundle(root, VerifyOptions(only="*d128*"))
    with pytest.raises(BundleError, match=says):
        Bundle.open(root, SimDriver()).preload("*d128*")


def test_a_kernel_without_a_line_map_is_whole(tmp_path: Path):
    make_bundle(tmp_path / "b", [dataclasses.replace(make_kernel(), line_map=None)])
    assert check_bundle(tmp_path / "b").records[0].line_map is None


def test_an_edit_with_every_digest_right_that_contradicts_nothing_is_not_found(root: Path):
    """What docs/bundle.md says of a bundle without a signature."""
    rewrite_record(root, set_to("build_digest", "0" * 64))
    check_bundle(root)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [("lse_base", "2", "lse_base is '2', this fmha-gen knows e"), ("name", "../x", "name is '../x'; letters, digits")],
)
def test_manifest_values_that_nothing_can_use_are_refused(root: Path, key: str, value: str, says: str):
    rewrite(root, lambda data: data.update({key: value}))
    with pytest.raises(BundleError, match=says):
        read_manifest(root)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda k: k[0].update(id="../x"), r"kernel id is '\.\./x'; words of letters"),
        (lambda k: k[0].update(id="a b"), "kernel id is 'a b'; words of letters"),
        (lambda k: k[0].update(id=""), "kernel id is ''; words of letters"),
        (lambda k: k[0].update(id="a--b"), "kernel id is 'a--b'; words of letters"),
        (lambda k: k[0].update(id="-a"), "kernel id is '-a'; words of letters"),
        (lambda k: k[1].update(id="a-"), "kernel id is 'a-'; words of letters"),
        (lambda k: k[0].update(id="é"), "kernel id is 'é'; words of letters"),
        (lambda k: k[0].update(id="a²"), "kernel id is 'a²'; words of letters"),
        (lambda k: k[0].update(rank=-1), "full-q2-01234567: rank is -1; the lowest is 0"),
        (lambda k: k[0]["serves"].update(max_rows=128), "serves.min_rows is 129 and max_rows 128; no problem lies"),
        (lambda k: k[0]["serves"].update(min_rows=-1), "serves.min_rows is -1 and max_rows None"),
        (lambda k: k.append(k[0]), "kernel fmha_fwd-sm100a-bf16-d128-full-q2-01234567 is listed twice"),
    ],
)
def test_entries_that_no_build_writes_are_refused_when_the_bundle_is_opened(root: Path, change, says: str):
    rewrite(root, lambda data: change(data["kernels"]))
    with pytest.raises(BundleError, match=says):
        read_manifest(root)


def test_a_folder_of_the_bundle_that_everybody_may_write_is_refused(root: Path):
    (root / "cubin").chmod(0o777)
    with pytest.raises(BundleError, match=r"cubin: mode 0777 lets everybody write"):
        check_bundle(root)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_truncated_manifest_is_refused(root: Path, part: float):
    """A08: the manifest cut to nothing, to half, and just before its end."""
    path = root / "manifest.json"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(BundleError, match=r"manifest\.json: \d+ bytes that are not JSON"):
        read_manifest(root)


def test_every_edit_of_the_manifest_is_noticed(root: Path):
    path = root / "manifest.json"
    text = path.read_text()
    for old, new in ((' "rank": 0', ' "rank": 1'), ('"full"', '"none"'), (": 580", ": 500"), ("\n}\n", "\n}\n\n")):
        old, new = old.strip(" ") if old not in text else old, new
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(BundleError, match=r"manifest\.json: sha256 of its text is .* the manifest was edited"):
            read_manifest(root)
    path.write_text(text)
    read_manifest(root)


def test_manifest_and_record_that_disagree_are_refused(root: Path):
    rewrite(root, lambda m: m["kernels"][0].update(rank=7))
    with pytest.raises(BundleError, match="rank is 0, the manifest says 7"):
        check_bundle(root)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ([3, 0], r"format_version 3\.0, this fmha_gen reads 2\.\d+: the major must be the same; install a newer"),
        ([1, 0], r"format_version 1\.0, this fmha_gen reads 2\.\d+: the major must be the same; rebuild"),
        ("0.0.0+unknown", r"format_version is '0\.0\.0\+unknown', this fmha_gen reads 2\."),
        (None, "format_version is None"),
        ([True, 0], "format_version is"),
    ],
)
def test_other_format_majors_are_refused_with_both_versions(root: Path, version, says: str):
    """A13: same major or nothing, and the message has both versions and the fix."""
    rewrite(root, lambda m: m.update(format_version=version))
    with pytest.raises(BundleError, match=says):
        read_manifest(root)


def test_newer_and_older_minors_are_read(root: Path):
    """A13: a newer minor only adds keys, an older one lacks some that have defaults."""

    def newer(m):
        m["format_version"] = [2, 99]
        m["something_new"] = {"a": 1}
        m["kernels"][0]["also_new"] = []

    rewrite(root, newer)
    assert read_manifest(root).format_version == (2, 99)
    rewrite(root, lambda m: m.pop("lse_base"))
    assert read_manifest(root).lse_base == "e"


def test_bundles_of_every_published_minor_still_open(tmp_path: Path):
    """A13: a bundle of each format that was ever published is kept, and must keep opening."""
    kept = sorted(Path(__file__).parents[1].joinpath("data").glob("bundle-format-*"))
    assert [p.name for p in kept] == ["bundle-format-2.0"]
    for folder in kept:
        copy = shutil.copytree(folder, tmp_path / folder.name)  # a checkout's modes depend on the umask
        for p in [copy, *copy.rglob("*")]:
            os.chmod(p, p.stat().st_mode & ~0o022)
        checked = check_bundle(copy)
        assert len(checked.records) == 2 and checked.unreferenced == ()


def test_missing_and_mistyped_fields_are_named(root: Path):
    rewrite(root, lambda m: m["kernels"][1].pop("arch"))
    with pytest.raises(BundleError, match=r"kernels\[1\]: key 'arch' is missing"):
        read_manifest(root)
    rewrite(root, lambda m: m["kernels"][1].update(arch=100))
    with pytest.raises(BundleError, match=r"kernels\[1\]\.arch: 100 is not of type str"):
        read_manifest(root)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [(text, True) for text in ("\x1b[31mfull", "full\0", "full\n", "\x7f", "\x9b31m", "\ud800", "\u202efull")]
    + [(text, False) for text in ("\x7f", "\x9b31m", "\u202efull")],  # the others raw are no JSON
)
def test_text_that_cannot_be_shown_is_refused_by_field(root: Path, text: str, escaped: bool):
    """Escape sequences would steer the terminal, lone surrogates fail on their way to it."""
    rewrite(root, lambda data: data["kernels"][0]["serves"].update(masks=["full", text]), escaped)
    says = re.escape(f"manifest.json.kernels[0].serves.masks[1]: {text!r} is not printable text; the bundle was edited")
    with pytest.raises(BundleError, match=says):
        read_manifest(root)


def test_a_key_that_cannot_be_shown_is_refused(root: Path):
    rewrite(root, lambda data: data["kernels"][0].update({"\ud800": ["\0"]}), True)
    with pytest.raises(BundleError, match=r"json\.kernels\[0\]: key: '\\ud800' is not printable text"):
        read_manifest(root)


def test_printable_text_of_any_script_is_taken(root: Path):
    rewrite(root, lambda data: data["generator"].update(version='1.0 "é" \\ 語'))
    assert read_manifest(root).generator.version == '1.0 "é" \\ 語'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_to("params", 2, "name", "\x1b[2J"), r"\.params\[2\]\.name: '\\x1b\[2J' is not printable text"),
        (planned("schedule", {"name": "\ud800"}), r"\.schedule\.name: '\\ud800' is not printable text"),
        (set_to("spec", "x", float("inf")), r"records/.* that are not JSON \(Infinity is no finite number\)"),
        (set_to("spec", "x", float("-inf")), r"that are not JSON \(-Infinity is no finite number\)"),
        (planned("x", [float("nan")]), r"plans/.* that are not JSON \(NaN is no finite number\)"),
    ],
)
def test_text_and_numbers_of_records_and_plans_can_be_shown(root: Path, change, says: str):
    rewrite_record(root, change)
    with pytest.raises(BundleError, match=says):
        check_bundle(root)


def test_a_number_beyond_floats_is_refused(root: Path):
    (root / "manifest.json").write_text('{"rank": 1e999}')
    with pytest.raises(BundleError, match="1e999 is no finite number"):
        read_manifest(root)


@pytest.mark.parametrize(
    "path", ["../../x.cubin", "/etc/passwd", "cubin/../../x", "", ".", "cubin//x", "a\\b", "c:/x", "cubin/"]
)
def test_paths_that_leave_the_bundle_are_refused(root: Path, path: str):
    """A23: whatever a manifest says, nothing outside its folder is read."""
    rewrite_record(root, lambda record, put: record["cubin"].update(path=path))
    with pytest.raises(BundleError, match="leaves the bundle or is not a plain relative path"):
        check_bundle(root)
    with pytest.raises(BundleError):
        check_relative_path(path, "x")


def test_a_null_character_is_in_no_path():
    with pytest.raises(BundleError, match="is not a plain relative path"):
        check_relative_path("x\0y", "x")


def test_a_record_outside_the_bundle_is_refused(root: Path):
    """A23: its path is made of id and digest; neither leads out."""
    rewrite(root, lambda m: m["kernels"][0].update(record_sha256="/../../x"))
    with pytest.raises(BundleError, match="leaves the bundle or is not a plain relative path"):
        check_bundle(root)


def test_links_out_of_the_bundle_are_refused(root: Path, tmp_path: Path):
    """A23: a link, even to the right bytes. A link that stays inside is no escape."""
    cubin = only(root, "cubin")
    outside = tmp_path / "outside.cubin"
    shutil.move(cubin, outside)
    cubin.symlink_to(outside)
    with pytest.raises(BundleError, match=f"{cubin.name}: links to .*outside.cubin, outside the bundle"):
        check_bundle(root)
    cubin.unlink()
    shutil.move(outside, root / "cubin" / "moved")
    cubin.symlink_to("moved")
    check_bundle(root)


def test_a_folder_linked_out_of_the_bundle_is_refused(root: Path, tmp_path: Path):
    """A23: the folder is the link."""
    shutil.move(root / "cubin", tmp_path / "cubin")
    (root / "cubin").symlink_to(tmp_path / "cubin")
    with pytest.raises(BundleError, match="outside the bundle"):
        check_bundle(root)


@pytest.mark.parametrize("what", ["manifest.json", "cubin", "."])
def test_what_anybody_can_write_is_refused(root: Path, what: str):
    """A23: world-writable files, or a world-writable bundle folder."""
    path = only(root, "cubin") if what == "cubin" else root / what
    os.chmod(path, path.stat().st_mode | 0o002)
    with pytest.raises(BundleError, match="lets everybody write; `chmod o-w "):
        check_bundle(root)


def test_written_modes_do_not_depend_on_an_open_umask(tmp_path: Path):
    """A23: a build under umask 0 still makes a bundle that its own reader accepts."""
    old = os.umask(0)
    try:
        make_bundle(tmp_path / "b")
    finally:
        os.umask(old)
    check_bundle(tmp_path / "b")


def test_a_pipe_in_place_of_a_file_is_refused_at_once(root: Path):
    path = only(root, "cubin")
    path.unlink()
    os.mkfifo(path, 0o644)
    with pytest.raises(BundleError, match="not a regular file"):
        check_bundle(root)


def test_moved_renamed_linked_and_read_only_bundles_open(root: Path, tmp_path: Path, monkeypatch):
    """A20: neither place nor name of the folder matters, nor that it is reached through a link; no HOME needed."""
    monkeypatch.delenv("HOME", raising=False)
    moved = tmp_path / "out dir (1)" / "renamed"
    moved.parent.mkdir()
    shutil.move(root, moved)
    link = tmp_path / "link"
    link.symlink_to(moved)
    for p in moved.rglob("*"):
        os.chmod(p, 0o555 if p.is_dir() else 0o444)
    assert check_bundle(link).manifest == check_bundle(moved).manifest
    for p in moved.rglob("*"):
        os.chmod(p, 0o755 if p.is_dir() else 0o644)


def test_same_base_names_in_two_folders_are_told_apart(root: Path):
    """A10: digests belong to relative paths, not to base names."""
    entries = read_manifest(root).kernels
    records = [read_record(root, e) for e in entries]
    files = []
    for arch, record in zip(("sm_90a", "sm_100a"), records, strict=True):
        (root / "cubin" / arch).mkdir()
        shutil.copy(root / record.cubin.path, root / "cubin" / arch / "k.cubin")
        files.append(dataclasses.replace(record.cubin, path=f"cubin/{arch}/k.cubin"))
    assert read_verified_file(root, files[0]) != read_verified_file(root, files[1])
    crossed = dataclasses.replace(files[0], path=files[1].path)
    with pytest.raises(BundleError, match=r"cubin/sm_100a/k\.cubin: .*expected"):
        read_verified_file(root, crossed)


@pytest.mark.parametrize(
    ("cubin", "says"),
    [
        ({"sm": 90}, "is a cubin for sm_90a, the record says sm_100a"),
        ({"specific": False}, "is a cubin for sm_100, the record says sm_100a"),
        ({"block": (384, 1, 1)}, r"requires blocks of \(384, 1, 1\), the record launches \(512, 1, 1\)"),
        ({"params": ((0, 128), (128, 8))}, r"parameter 2 \(seqlen_q\) has \(offset, size\) \(\)"),
        ({"params": ((0, 128), (136, 8), (144, 4))}, r"parameter 1 \(lse\) .*\(\(136, 8\),\).*\(\(128, 8\),\)"),
    ],
)
def test_a_cubin_that_contradicts_its_record_is_not_written(tmp_path: Path, cubin, says: str):
    """A01, A08: architecture and parameter table come from the ELF, not from a name."""
    with pytest.raises(BundleError, match=says):
        make_bundle(tmp_path / "b", [make_kernel(**cubin)])
    assert not (tmp_path / "b" / "manifest.json").exists()


def test_two_kernels_with_one_id_are_refused(tmp_path: Path):
    with pytest.raises(BundleError, match="two kernels with this id"):
        make_bundle(tmp_path / "b", [make_kernel(), make_kernel()])


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("x")
    with pytest.raises(BundleError, match=r"holds .thesis\.tex., which is no part of a bundle"):
        make_bundle(tmp_path / "b")
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["plans", "source", "cubin"])
def test_a_build_through_a_linked_folder_is_refused(tmp_path: Path, name: str):
    """What lies behind the link is no part of the bundle: it stays, and nothing is put beside it."""
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "precious.txt").write_text("data")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / name).symlink_to("../else")
    with pytest.raises(BundleError, match=f"b/{name}: is a link; .*: remove it, or choose another output folder"):
        make_bundle(tmp_path / "b")
    assert tree(tmp_path / "else") == {"precious.txt": b"data"}
    assert [p.name for p in (tmp_path / "b").iterdir()] == [name]


def test_a_build_onto_a_file_or_a_dangling_link_in_place_of_a_folder_is_refused(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "ptx").write_text("")
    with pytest.raises(BundleError, match="b/ptx: is no folder; "):
        make_bundle(tmp_path / "b")
    (tmp_path / "b" / "ptx").unlink()
    (tmp_path / "b" / "ptx").symlink_to("nowhere")
    with pytest.raises(BundleError, match="b/ptx: is a link; "):
        make_bundle(tmp_path / "b")


def test_files_behind_a_linked_folder_are_none_of_the_bundle(tmp_path: Path):
    make_bundle(tmp_path / "b", [dataclasses.replace(make_kernel(), source=None)])
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "precious.txt").write_text("data")
    (tmp_path / "b" / "source").symlink_to("../else")
    assert check_bundle(tmp_path / "b").unreferenced == ()


@pytest.mark.parametrize("name", [".", "plans"])
def test_a_build_onto_a_mode_that_readers_refuse_is_refused(root: Path, name: str):
    before = tree(root)
    (root / name).chmod(0o777)
    with pytest.raises(BundleError, match=r"mode 0777 lets everybody write; `chmod o-w "):
        make_bundle(root, [make_kernel()])
    assert tree(root) == before
    (root / name).chmod(0o775)
    make_bundle(root, [make_kernel()])
    check_bundle(root)


def test_a_build_through_a_link_to_the_whole_bundle_is_one(root: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(root)
    make_bundle(tmp_path / "link")
    check_bundle(root)


def test_opening_a_bundle_of_100_kernels_is_cheap(tmp_path: Path):
    """The index has 2 ms; the limit here is loose, for loaded machines."""
    serves = Serves("bf16", 128, 128, ("full", "causal"), ("varlen",), 0, 128)
    entries = tuple(KernelEntry(f"fmha_fwd-{i}", "fmha_fwd", "sm_100a", serves, i, "a" * 64, 12345) for i in range(100))
    manifest = Manifest("demo", "1.0.0", GENERATOR, TOOLCHAIN, 580, entries)
    (tmp_path / "manifest.json").write_text(manifest_text(manifest))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        assert len(read_manifest(tmp_path).kernels) == 100
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01
    assert read_manifest(tmp_path) == manifest


def test_no_bundle_there(tmp_path: Path):
    with pytest.raises(BundleError, match="not a folder; a bundle is the folder"):
        read_manifest(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"manifest\.json: no such file"):
        read_manifest(tmp_path)
