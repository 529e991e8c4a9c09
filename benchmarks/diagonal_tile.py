"""Instructions that the softmax warps execute for one diagonal tile, beside FlashAttention-4's recorded figures.

    python benchmarks/diagonal_tile.py BUNDLE [--json]

What is written in a masked loop is not what runs: ours skips chunks that a warp cannot see. So this counts executed
warp instructions of PTX in the simulator, for one causal tile of 256 rows against 256 keys (two masked blocks for each
of both Q tiles), summed over the eight softmax warps. The target is 0.85 of the peer's count.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fmha_gen.manifest_io import read_manifest
from fmha_gen.run import RunOptions, run_arrays

PEER_FILE = Path(__file__).with_name("peer_fa4_4.0.0b36.json")
ROWS = 256
TARGET = 0.85


@dataclass(frozen=True)
class Tile:
    """Executed PTX warp instructions of the softmax warps; peer is None where no figure is recorded."""

    kernel: str
    ours: int
    peer: int | None

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.ours / self.peer


def executed(bundle: str, kernel: str, dtype: str, head_dim_qk: int, head_dim_v: int) -> int:
    """Run one causal tile of one head in the simulator and count."""
    rng = np.random.default_rng(0)
    shapes = {"q": head_dim_qk, "k": head_dim_qk, "v": head_dim_v}
    arrays = {name: rng.standard_normal((1, ROWS, 1, dim), dtype=np.float32) for name, dim in shapes.items()}
    options = RunOptions(driver="sim", dtype=dtype, causal=True, variant=kernel, sms=1)
    counters = run_arrays(bundle, arrays, options).counters
    if counters is None:
        raise SystemExit(f"{kernel}: the simulator gave no counters")
    return sum(n for role, n in counters["roles"].items() if role.startswith("softmax"))


def compare(bundle: str) -> list[Tile]:
    """Our causal kernels with two Q tiles, beside the peer's of the same shape."""
    recorded = json.loads(PEER_FILE.read_text())["diagonal_tile"]["softmax_instructions"]
    tiles = []
    for entry in read_manifest(bundle).kernels:
        if "causal" not in entry.serves.masks or "-q2" not in entry.id or entry.arch != "sm_100a":
            continue
        d, dv = entry.serves.head_dim_qk, entry.serves.head_dim_v
        count = executed(bundle, entry.id, entry.serves.dtype, d, dv)
        tiles.append(Tile(entry.id, count, recorded.get(f"d{d}{'' if d == dv else f'_{dv}'}_causal")))
    return tiles


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", help="folder of a built bundle")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    tiles = compare(args.bundle)
    if args.json:
        print(json.dumps([asdict(t) | {"ratio": t.ratio} for t in tiles], indent=1))
        return
    for t in tiles:
        if t.ratio is None:
            print(f"{t.kernel}: {t.ours} executed, no peer figure")
        else:
            mark = "pass" if t.ratio <= TARGET else "MISS"
            print(f"{t.kernel}: {t.ours} executed, peer {t.peer}: {mark} {t.ratio:.2f} <= {TARGET}")


if __name__ == "__main__":
    main()
