"""R12: no bundle counts as good before each of its kernels has come to an end, under a limit.

The report (flash-attention#2797): one source hung when compiled by one version of the DSL, but not by its neighbours,
so that neither sources nor other builds prove anything. Here every kernel of the default bundle runs before it ships,
a hang is a verdict within a limit, and the manifest says which compiler made the kernels.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fmha_gen.cli import cli
from fmha_gen.manifest_io import read_manifest, read_record, read_verified_file
from fmha_gen.verify.bench import SimBench
from fmha_gen.verify.cases import Case
from fmha_gen.verify.kernel import KernelCheck
from tests.edited_bundle import one_kernel

pytestmark = [pytest.mark.sim, pytest.mark.compile]
KERNEL = "fmha_fwd-sm100a-bf16-d64-causal-q2"
CASES = [Case("two tiles by one CTA", 1, 257, 129, 1, 1, layout="padded", sms=1), Case("no keys", 1, 1, 0, 1, 1)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", ["d64", "d96", "d128", "d192x128"])
def test_r12_every_kernel_comes_to_an_end_with_right_numbers(core_bundle: Path, dims: str, dtype: str) -> None:
    entries = [e for e in read_manifest(core_bundle).kernels if f"-{dtype}-{dims}-" in e.id]
    assert len(entries) == 4
    bench = SimBench(core_bundle)
    for entry in entries:
        verdict = KernelCheck(bench, entry, range(1)).run(CASES, "", "")
        assert verdict.problems == () and verdict.num_problems == len(CASES), entry.id


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ((r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), 256;", r"\1, 257;"), "deadlock"),
        ((r"\n\tmov\.u32 \t(%r\d+), %tid\.x;", r"\g<0>\n$forever:\n\tbra.uni $forever;"), "livelock"),
    ],
    ids=["a barrier that waits for one arrival too many", "warps that never leave"],
)
def test_r12_a_kernel_that_hangs_is_never_marked_good(
    core_bundle: Path, tmp_path: Path, edit: tuple[str, str], words: str
) -> None:
    """`verify` comes back, says what hangs, and fails; the proof does not vouch for the kernel."""
    root = one_kernel(core_bundle, tmp_path / "bundle", KERNEL, edit)
    done = CliRunner().invoke(cli, ["verify", str(root), "--quick", "--seeds", "1", "--json"])
    assert done.exit_code == 1
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert not kernel["passed"] and words in kernel["problems"][0]
    assert json.loads((root / "proof.json").read_text())["kernels"][kernel["id"]]["passed"] is False


def test_r12_the_manifest_names_the_exact_compiler(core_bundle: Path) -> None:
    """The installed DSL, and the ptxas whose name each PTX and cubin carries."""
    manifest = read_manifest(core_bundle)
    assert manifest.toolchain.dsl == importlib.metadata.version("nvidia-cutlass-dsl")
    assert re.fullmatch(r"\d+\.\d+\.\d+", manifest.toolchain.ptxas)
    for entry in manifest.kernels:
        record = read_record(core_bundle, entry)
        assert f", V{manifest.toolchain.ptxas}\n".encode() in read_verified_file(core_bundle, record.ptx)
        cubin = read_verified_file(core_bundle, record.cubin)
        assert f"V{manifest.toolchain.ptxas}".encode() in cubin, entry.id
