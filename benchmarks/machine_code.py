"""Machine code of a bundle's forward kernels beside FlashAttention-4's recorded figures, and the targets.

    python benchmarks/machine_code.py BUNDLE [--json]

Prints figures and marks; it is no timed test, and the bound is a model figure. Exit code 0 whatever the marks say.
The peer's figures are data: `peer_fa4_4.0.0b36.json`, with their provenance. They were made by the same DSL and ptxas.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fmha_gen.analyze import Analysis, analyze
from fmha_gen.arch import ARCHS
from fmha_gen.plan import model

PEER_FILE = Path(__file__).with_name("peer_fa4_4.0.0b36.json")


@dataclass(frozen=True)
class Target:
    """What a shape's kernel with two Q tiles should reach; None where there is no target of that kind.

    softmax_slots: of the loop without masks. bound_clk: model clocks per pair of 128-row tiles and 128 keys.
    """

    softmax_slots: int | None
    bound_clk: int | None


# (head_dim_qk, head_dim_v, mask) -> target
TARGETS = {
    (64, 64, "full"): Target(None, 1500),
    (64, 64, "causal"): Target(None, 1500),
    (96, 96, "full"): Target(None, 1540),
    (96, 96, "causal"): Target(None, 1540),
    (128, 128, "full"): Target(520, 2048),
    (128, 128, "causal"): Target(500, 2048),
    (192, 128, "full"): Target(500, 2560),
    (192, 128, "causal"): Target(480, 2560),
    (256, 256, "full"): Target(560, None),
}


@dataclass(frozen=True)
class Figures:
    """Slots of the loops (None: no such loop), MUFU per row of the unmasked softmax loop, spills, the bound."""

    softmax: int | None
    softmax_masked: int | None
    correction: int | None
    mma: int | None
    mufu: int | None
    spills: int
    bound_clk: float | None
    limiter: str | None


@dataclass(frozen=True)
class Check:
    """One target: what was measured, its limit, and whether it is met."""

    what: str
    value: float | None
    limit: float
    met: bool


@dataclass(frozen=True)
class Row:
    """One kernel of ours beside the peer's of the same shape, if that is recorded."""

    kernel: str
    ours: Figures
    peer: Figures | None
    checks: tuple[Check, ...]


def ours(a: Analysis) -> Figures:
    """Figures of one of our kernels, from its machine code."""
    k = a.kernel
    plain = min((p.slots for p in k.innermost("softmax", False)), default=None)
    masked = min((p.slots for p in k.innermost("softmax", True)), default=None)
    terms = a.bound.terms if a.bound else None
    return Figures(
        softmax=plain,
        softmax_masked=masked,
        correction=max((p.slots for p in k.innermost("correction")), default=None),
        mma=max((p.slots for p in k.innermost("mma")), default=None),
        mufu=terms.mufu_per_row if terms else None,
        spills=k.spill_stores + k.spill_loads,
        bound_clk=terms.bound_clk if terms else None,
        limiter=terms.limiter if terms else None,
    )


def peer(record: dict[str, Any], arch: str) -> Figures:
    """Figures of a recorded peer kernel; its bound by the same model."""
    plain = [p for p in record["loops"] if p["role"] == "softmax" and not p["masked"]]
    masked = [p["slots"] for p in record["loops"] if p["role"] == "softmax" and p["masked"]]
    softmax = min(plain, key=lambda p: p["slots"])
    correction = next(p["slots"] for p in record["loops"] if p["role"] == "correction")
    mma = next(p["slots"] for p in record["loops"] if p["role"] == "mma")
    mufu = softmax["counts"]["MUFU"]
    d, dv = record["head_dim_qk"], record["head_dim_v"]
    b = model.bound(d, dv, 128, mufu, softmax["slots"], correction, mma, ARCHS[arch])
    return Figures(
        softmax["slots"], min(masked, default=None), correction, mma, mufu, record["spill_ops"], b.bound_clk, b.limiter
    )


def checks(shape: tuple[int, int, str], f: Figures, arch: str) -> Iterator[Check]:
    """The targets of a shape. A figure that could not be read misses its target."""
    target = TARGETS.get(shape)
    yield Check("spill instructions", f.spills, 0, f.spills == 0)
    if target is None:
        return
    if target.softmax_slots is not None:
        yield _at_most("softmax slots", f.softmax, target.softmax_slots)
    if target.bound_clk is not None:
        yield _at_most("bound clk", f.bound_clk, target.bound_clk)
    d, dv, mask = shape
    yield _at_most("MUFU per row", f.mufu, model.mufu_cap(d, dv, mask, 128, ARCHS[arch]))


def _at_most(what: str, value: float | None, limit: float) -> Check:
    return Check(what, value, limit, value is not None and value <= limit)


def compare(bundle: str) -> list[Row]:
    """Our sm_100a forward kernels with two Q tiles beside the peer's."""
    recorded = json.loads(PEER_FILE.read_text())["kernels"]
    rows = []
    for a in analyze(bundle).kernels:
        if a.bound is None or a.id is None or not a.id.startswith("fmha_fwd-sm100a-") or "-q2" not in a.id:
            continue
        mask = "causal" if "-causal-" in a.id else "full"
        d, dv = a.bound.head_dim_qk, a.bound.head_dim_v
        name = f"d{d}{'' if d == dv else f'_{dv}'}_{mask}"
        figures = ours(a)
        beside = peer(recorded[name], a.kernel.arch) if name in recorded else None
        rows.append(Row(a.id, figures, beside, tuple(checks((d, dv, mask), figures, a.kernel.arch))))
    return rows


def _cell(a: float | None, b: float | None) -> str:
    return f"{'-' if a is None else f'{a:.0f}'} / {'-' if b is None else f'{b:.0f}'}"


def show(rows: list[Row]) -> None:
    """Print one table: ours / peer's in each cell, then the targets."""
    names = ("softmax", "softmax_masked", "correction", "mma", "mufu", "spills", "bound_clk")
    header = ("kernel (ours / FlashAttention-4 4.0.0b36)", *names, "targets")
    lines = [header]
    for r in rows:
        cells = [_cell(getattr(r.ours, n), getattr(r.peer, n) if r.peer else None) for n in names]
        marks = ", ".join(
            f"{'pass' if c.met else 'MISS'} {c.what} {'-' if c.value is None else f'{c.value:.0f}'} <= {c.limit:.0f}"
            for c in r.checks
        )
        lines.append((r.kernel, *cells, marks))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    for line in lines:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)) + "  " + line[-1])
    missed = sum(not c.met for r in rows for c in r.checks)
    print(f"{len(rows)} kernels, {sum(len(r.checks) for r in rows)} targets, {missed} missed; bound: a model figure")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", help="folder of a built bundle")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    rows = compare(args.bundle)
    if args.json:
        print(json.dumps([asdict(r) for r in rows], indent=1))
    else:
        show(rows)


if __name__ == "__main__":
    main()
