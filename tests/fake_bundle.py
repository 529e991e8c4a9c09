"""Small bundles of synthetic kernels, for tests of everything that reads bundles."""

from __future__ import annotations

from pathlib import Path

from fmha_gen.bundle import KernelFiles, Written, write_bundle
from fmha_gen.manifest import (
    FileRecord,
    Generator,
    KernelRecord,
    LaunchRecord,
    Param,
    Resources,
    Rule,
    Serves,
    Toolchain,
)
from tests.fake_cubin import make_cubin

PARAMS = (("tma_q", "tensor_map", 0, 128), ("lse", "pointer", 128, 8), ("seqlen_q", "i32", 136, 4))
GENERATOR = Generator("0.1.0", "0" * 40, False)
TOOLCHAIN = Toolchain("4.8.1", "13.4", "13.4.59", "3.11.7")
_NO_FILE = FileRecord("", "", 0)


def make_kernel(kid: str = "fmha_fwd-sm100a-bf16-d128-full-q2-01234567", arch: str = "sm_100a", **cubin) -> KernelFiles:
    """One synthetic kernel; `cubin` overrides what its cubin says, so that it contradicts its record."""
    symbol = kid.replace("-", "_") + "_0"
    record = KernelRecord(
        id=kid,
        family="fmha_fwd",
        arch=arch,
        build_digest="b" * 64,
        symbol=symbol,
        spec={"head_dim_qk": 128, "rescale_threshold": 8.0},
        serves=Serves("bf16", 128, 128, ("full",), min_rows=129),
        rank=0,
        params=tuple(Param(*p) for p in PARAMS),
        launch=LaunchRecord(512, (1, 1, 1), 229376, Rule("persistent", {"rows": 256})),
        resources=Resources(128, 0, 0, 0, 512, 128),
        cubin=_NO_FILE,
        ptx=_NO_FILE,
        plan=_NO_FILE,
    )
    sm = int(arch.removeprefix("sm_").removesuffix("a"))
    data = make_cubin((symbol,), sm=cubin.pop("sm", sm), **cubin)
    roles = [{"name": "all", "warp_ids": list(range(16)), "num_regs": 128}]
    plan, lines = {"smem_bytes": 229376, "roles": roles, "spec": record.spec}, b'{"files": [], "spans": []}\n'
    return KernelFiles(record, data, make_ptx(symbol, arch), plan, lines, b"# source\n")


def make_ptx(symbol: str, arch: str = "sm_100a", comment: str = "") -> bytes:
    """The least that counts as the PTX of a kernel."""
    return f"//{comment}\n.version 9.4\n.target {arch}\n.visible .entry {symbol}()\n{{ ret; }}\n".encode()


def make_bundle(root: Path, kernels: list[KernelFiles] | None = None, version: str = "1.0.0") -> Written:
    """A bundle of two kernels (or `kernels`) in folder `root`."""
    if kernels is None:
        kernels = [make_kernel(), make_kernel("fmha_fwd-sm100a-bf16-d64-causal-q1-89abcdef")]
    return write_bundle(root, "demo", version, GENERATOR, TOOLCHAIN, 580, kernels)
