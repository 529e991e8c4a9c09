"""Each kernel of a bundle on small problems, on the GPU, for a checking tool to watch: ``sanitize.py BUNDLE [GLOB]``.

Numbers, canaries and poison are checked as `fmha-gen verify` does. Needs numpy and cuda-bindings, no torch. Exit code 1
if a result is wrong. `benchmarks/sanitize.sh` runs it under compute-sanitizer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fmha_gen.runtime.select import matching, runs_on
from fmha_gen.verify.bench import CudaBench
from fmha_gen.verify.cases import Case
from fmha_gen.verify.kernel import KernelCheck

CASES = [
    Case("several tiles per CTA", 1, 260, 300, 2, 1, layout="padded", sms=1),
    Case("rows without keys", 2, 200, 72, 2, 2, layout="bhsd"),
    Case("one query, one key", 1, 1, 1, 1, 1),
    Case("no keys", 1, 130, 0, 1, 1),
]


def main(path: str, pattern: str | None = None) -> int:
    bench = CudaBench(path)
    entries = [e for e in matching(bench.bundle.kernels, pattern) if runs_on(e, bench.device)]
    if not entries:
        print(f"{path}: no kernel matches {pattern or '*'} on {bench.device.describe()}")
        return 1
    wrong = 0
    for entry in entries:
        start = time.perf_counter()
        verdict = KernelCheck(bench, entry, range(1)).run(CASES, "", "")
        print(f"{'ok   ' if verdict.passed else 'WRONG'} {time.perf_counter() - start:6.1f} s  {entry.id}", flush=True)
        for problem in verdict.problems:
            print(f"      {problem}")
        wrong += not verdict.passed
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
