"""Speed of the simulator: KV blocks a second on one core, all checks on.

    python benchmarks/sim_speed.py BUNDLE [--variant GLOB] [--blocks N] [--json]

A KV block is 128 keys for one tile of both Q tiles (256 rows). One CTA runs one tile twice in one process, over few
blocks and over many: the first run includes what is translated once per kernel; the difference of two warm runs is the
steady rate. Prints figures; it is no timed test. The process is pinned to one core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fmha_gen.manifest_io import read_manifest
from fmha_gen.run import RunOptions, run_arrays
from fmha_gen.runtime.select import matching

TILE_N = 128
ROWS = 256  # two Q tiles of 128
FEW = 4


@dataclass(frozen=True)
class Speed:
    """What was timed, in seconds of one core. first: a process's first run (with translation), over FEW blocks.

    few, many: warm runs over FEW and FEW + blocks blocks. blocks_per_s: blocks / (many - few).
    """

    kernel: str
    blocks: int
    first_s: float
    few_s: float
    many_s: float
    blocks_per_s: float


def problem(num_blocks: int, head_dim_qk: int, head_dim_v: int, seed: int = 0) -> dict[str, np.ndarray]:
    """q, k, v of one head: 256 rows against num_blocks * 128 keys, float32 (batch, seqlen, heads, head_dim)."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, dim: int) -> np.ndarray:
        return rng.standard_normal((1, rows, 1, dim), dtype=np.float32)

    keys = num_blocks * TILE_N
    return {"q": normal(ROWS, head_dim_qk), "k": normal(keys, head_dim_qk), "v": normal(keys, head_dim_v)}


def measure(bundle: str, variant: str, blocks: int) -> Speed:
    """Time one kernel of the bundle: the first that `variant` matches and that has two Q tiles and no mask."""
    manifest = read_manifest(bundle)
    entries = [e for e in matching(manifest.kernels, variant) if "full" in e.serves.masks and "-q2" in e.id]
    if not entries:
        raise SystemExit(f"{bundle}: no full-mask kernel with two Q tiles matches {variant!r}")
    serves = entries[0].serves
    options = RunOptions(driver="sim", dtype=serves.dtype, variant=entries[0].id, sms=1)

    def run(num_blocks: int) -> float:
        arrays = problem(num_blocks, serves.head_dim_qk, serves.head_dim_v)
        start = time.perf_counter()
        run_arrays(bundle, arrays, options)
        return time.perf_counter() - start

    first, few, many = run(FEW), run(FEW), run(FEW + blocks)
    return Speed(entries[0].id, blocks, first, few, many, blocks / max(many - few, 1e-9))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", help="folder of a built bundle")
    parser.add_argument("--variant", default="*-bf16-d128-full-q2*", help="glob on kernel ids")
    parser.add_argument("--blocks", type=int, default=16, help="KV blocks that the rate is taken over")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    speed = measure(args.bundle, args.variant, args.blocks)
    if args.json:
        print(json.dumps(asdict(speed), indent=1))
        return
    print(f"{speed.kernel}: {speed.blocks_per_s:.1f} KV blocks/s on one core ({speed.blocks} blocks)")
    many = FEW + speed.blocks
    print(
        f"first run {speed.first_s:.2f} s; warm {speed.few_s:.2f} s over {FEW} blocks, {speed.many_s:.2f} s over {many}"
    )


if __name__ == "__main__":
    main()
