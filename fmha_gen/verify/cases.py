"""The problems that a kernel is verified on, and their inputs. Sizes are chosen for what they reach, not for load.

Every case is dense attention through the public launcher. `quick_cases` reaches every path of a kernel once: several
tiles per CTA, odd lengths, both ways of unequal lengths, rows and problems without keys, head ratios, huge, tiny and
uniformly negative logits, every kind of growth of the row maximum, null LSE, strided tensors amid poison.
`full_cases` adds the lengths, ratios, grids, poisons and seeds of the project's correctness list.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LENGTHS = (1, 2, 63, 127, 128, 129, 255, 257, 300, 511)
RATIOS = (1, 2, 3, 7, 8)
POISONS = ("nan", "zero", "inf", "huge")
TILE_N = 128


@dataclass(frozen=True)
class Case:
    """One problem.

    data: a key of `GENERATORS`. layout: how tensors lie in memory, see `buffers.LAYOUTS`. poison: what unused memory
    holds. sms: multiprocessors that the grid is laid out for, None for the device's own. all_seeds: run under every
    scheduler seed, and compare bits. same_bits_as: name of a case with the same inputs whose result must be the same
    bit for bit.
    """

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    data: str = "normal"
    scale: float | None = None
    layout: str = "dense"
    poison: str = "nan"
    sms: int | None = None
    lse: bool = True
    all_seeds: bool = False
    same_bits_as: str | None = None
    inputs_of: str | None = None

    @property
    def inputs_name(self) -> str:
        """The case whose inputs this one has: they depend on nothing else."""
        return self.inputs_of or self.same_bits_as or self.name


def quick_cases() -> list[Case]:
    """A dozen problems, about 200 KV blocks of 128 x 128 in all."""
    return [
        Case("many tiles per CTA, amid NaN", 1, 257, 300, 2, 1, layout="padded", sms=1, all_seeds=True),
        Case("whole blocks only, many tiles per CTA", 1, 260, 256, 2, 1, sms=1, all_seeds=True),
        Case("tiles longer than the ring, several per CTA", 1, 520, 790, 1, 1, sms=1),
        Case("few queries, many blocks", 1, 3, 2500, 1, 1),
        Case("one query, one key", 2, 1, 1, 6, 2),
        *(Case(f"{n} keys: all columns but the first of a mask word are masked", 1, 2, n, 1, 1) for n in (33, 65, 97)),
        Case("no keys", 2, 140, 0, 1, 1, layout="padded", sms=1),
        Case("more queries than keys, one value infinite", 1, 300, 72, 2, 1, data="inf_v", layout="padded", sms=1),
        Case("ratio 7, batch, heads before rows", 2, 63, 129, 7, 1, layout="bhsd", sms=3),
        Case("huge logits", 1, 127, 255, 1, 1, data="huge"),
        Case("huge logits, no LSE", 1, 127, 255, 1, 1, data="huge", lse=False, same_bits_as="huge logits"),
        Case("all logits strongly negative", 1, 128, 127, 1, 1, data="negative"),
        Case("row maximum grows, by less and by more than the rescale threshold", 1, 129, 511, 1, 1, data="growing"),
        Case("row maximum leaps, then hardly grows", 1, 129, 511, 1, 1, data="leap"),
        Case("row maximum falls", 1, 2, 385, 1, 1, data="falling"),
        Case("scale 0: all keys alike", 1, 65, 130, 1, 1, scale=0.0),
        Case("zero queries", 1, 5, 256, 2, 2, data="zero_q"),
        Case("logits of -inf: all of one head, every second of the other", 1, 65, 200, 2, 2, data="minus_inf"),
    ]


def full_cases() -> list[Case]:
    """`quick_cases` and: each length for queries and for keys, ratios, grids, poisons, batch invariance."""
    cases = [replace(c, all_seeds=c.all_seeds or c.seqlen_k > 300) for c in quick_cases()]
    for i, sq in enumerate(LENGTHS):
        for sk in {LENGTHS[-1 - i], LENGTHS[(3 * i + 4) % len(LENGTHS)]}:
            cases.append(Case(f"lengths {sq} x {sk}", 1, sq, sk, 1, 1, layout="padded"))
    for ratio in RATIOS:
        cases.append(Case(f"ratio {ratio}", 2, 70, 140, 2 * ratio, 2, layout="bhsd", sms=5, all_seeds=ratio == 3))
    grid = Case("grid of 148", 2, 300, 257, 3, 1, sms=148)
    cases.append(grid)
    cases.extend(replace(grid, name=f"grid of {n}", sms=n, same_bits_as=grid.name) for n in (1, 7, 1000))
    first = Case("poison nan", 2, 129, 200, 2, 1, layout="padded")
    cases.append(first)
    cases.extend(replace(first, name=f"poison {p}", poison=p, same_bits_as=first.name) for p in POISONS[1:])
    cases.append(replace(first, name="dense layout", layout="dense", same_bits_as=first.name))
    cases.append(Case("tiny logits", 1, 130, 257, 1, 1, data="tiny"))
    cases.append(Case("an outlier per row", 1, 130, 400, 1, 1, data="spikes", all_seeds=True))
    cases.append(Case("large scale", 1, 64, 129, 1, 1, scale=10.0))
    return cases


def inputs(case: Case, head_dim_qk: int, head_dim_v: int) -> tuple[Floats, Floats, Floats]:
    """float32 q, k, v (BSHD) of a case; the same for every kernel with these head dimensions."""
    rng = np.random.default_rng(zlib.crc32(case.inputs_name.encode()))
    q = rng.standard_normal((case.batch, case.seqlen_q, case.heads_q, head_dim_qk), np.float32)
    k = rng.standard_normal((case.batch, case.seqlen_k, case.heads_kv, head_dim_qk), np.float32)
    v = rng.standard_normal((case.batch, case.seqlen_k, case.heads_kv, head_dim_v), np.float32)
    if case.data in RAMPS:
        v *= _balance(case.seqlen_k, RAMPS[case.data])
    elif case.data == "inf_v":
        v[:, 0, :, 0] = np.inf
    return (*GENERATORS[case.data](q, k), v)


def _normal(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    return q, k


def _huge(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    """Logits of a standard deviation of about 100."""
    return q * 10, k * 10


def _tiny(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    return q * np.float32(1e-3), k


def _zero_q(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    """All keys weigh the same; LSE is the logarithm of their number."""
    return q * 0, k


def _negative(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    """All logits far below zero: a maximum that starts at 0 instead of -inf would lose them all."""
    return np.abs(q) * 4, -np.abs(k) * 4


def _minus_inf(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    """Keys of weight 0: all of head 0, whose rows are as rows without keys; every second one of the other heads."""
    k[:, :, 0, 0] = -np.inf
    k[:, 1::2, 1:, 0] = -np.inf
    return np.abs(q) + 1, k


def _ramp(q: Floats, k: Floats, block_logits: Floats) -> tuple[Floats, Floats]:
    """Logits that jump to block_logits[i] (natural units) at key block i, plus noise of about 1."""
    d = q.shape[3]
    direction = np.where(np.arange(d) % 2, -1, 1).astype(np.float32)
    steps = block_logits[np.minimum(np.arange(k.shape[1]) // TILE_N, block_logits.size - 1)]
    unit = np.float32(1 / math.sqrt(d))
    return q * np.float32(0.5) + direction, k * np.float32(0.5) + direction * unit * steps[None, :, None, None]


# Logits of key blocks. Kernels walk from the last block to the first: maxima grow by 3.5, 6 and 1.5 (5.0, 8.7 and 2.2
# in log2, the first not enough to rescale); or by 6.5 (9.4) at once and then hardly, so that what the first blocks got
# wrong still counts at the end.
RAMPS = {"growing": np.array([11, 9.5, 3.5, 0], np.float32), "leap": np.array([8, 7, 6.5, 0], np.float32)}


def _growing(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    return _ramp(q, k, RAMPS["growing"])


def _leap(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    return _ramp(q, k, RAMPS["leap"])


def _balance(seqlen_k: int, ramp: Floats) -> Floats:
    """Values so large where weights are small that every block matters: what an accumulator held before it was scaled
    by 2^-13 would otherwise lie below the tolerance, and any fault of the rescaling with it. 2^13 keeps fp16 finite."""
    blocks = np.minimum(np.arange(seqlen_k) // TILE_N, ramp.size - 1)
    return np.minimum(np.exp(ramp[0] - ramp[blocks]), np.float32(8192))[None, :, None, None]


def _falling(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    """The first block seen dominates; later ones underflow against it."""
    return _ramp(q, k, np.array([-40, -20, -6, 0], np.float32))


def _spikes(q: Floats, k: Floats) -> tuple[Floats, Floats]:
    """A few keys 30 times larger than the others, in every block."""
    scale = np.ones((1, k.shape[1], 1, 1), np.float32)
    scale[:, 17::61] = 30
    return q, k * scale


GENERATORS = {
    "normal": _normal, "huge": _huge, "tiny": _tiny, "zero_q": _zero_q, "negative": _negative, "growing": _growing,
    "leap": _leap, "inf_v": _normal, "falling": _falling, "spikes": _spikes, "minus_inf": _minus_inf,
}  # fmt: skip
