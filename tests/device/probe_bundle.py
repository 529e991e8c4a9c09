"""A bundle around `probe_kernel.py`: ``python -m tests.device.probe_bundle OUT [ARCH]`` needs the compiler, no GPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from fmha_gen import manifest as m
from fmha_gen.arch import ARCHS
from fmha_gen.compiler import CompileJob, code_digest, compile_kernel
from fmha_gen.compiler.gates import Expected
from tests.launcher_fixtures import canonical_params, make_record, with_plan, write_bundle

SYMBOL = "launcher_probe_0"
SMEM_BYTES = 100 * 1024
THREADS = 32


def build(root: Path, arch: str) -> Path:
    """A bundle of one kernel, ``fmha_fwd-<arch>-bf16-d128-full-q1-...``, that copies instead of attending."""
    params = canonical_params(base=ARCHS[arch].param_base_bytes)
    table = tuple((p.name, p.offset, p.size) for p in params)
    source = (Path(__file__).parent / "probe_kernel.py").read_text()
    expected = Expected(arch, SYMBOL, table, THREADS, None)
    job = CompileJob("probe", source, expected, 0, str(root / "failed"), code_digest())
    compiled = compile_kernel(job)
    record, cubin, ptx = make_record(q_stage=1, arch=arch, smem=SMEM_BYTES, cubin=compiled.cubin, ptx=compiled.ptx)
    launch = m.LaunchRecord(THREADS, (1, 1, 1), SMEM_BYTES, m.Rule("persistent", {"rows": 128}))
    record = dataclasses.replace(record, symbol=SYMBOL, params=params, launch=launch, resources=compiled.resources)
    write_bundle(root, [(with_plan(record), cubin, ptx)])
    return root


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "sm_90a"))
