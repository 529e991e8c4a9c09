"""Who waits where: the role programs of the forward kernel, as the templates write them and the check executes them.

A tile of `n` KV blocks (a K and a V tile each) runs them from the last to the first; the order does not matter here.
`n` is 0 where no row of the tile sees a key: nothing is loaded or multiplied then, and the output is zero.

Waits count completions: the first wait of a ``blocks`` barrier is for completion 0, of a ``passes`` barrier for -1.

q_stage 2: slot t of S and P, and O of t, belong to Q tile t and softmax group t. The ring holds K V K V ...
q_stage 1: S and P slots alternate by a block count that runs on across tiles; there is one O. S of a block is issued
before O of the block before, and the ring follows that order: K0 K1 V0 K2 V1 ... V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .petri import Access, Arrive, Commit, Load, Mma, Op, Span, Wait
from .types import WARP_THREADS, Barrier, KvRing, SmemBuffer, Tiles, TmemRegion

HALVES = 2  # a role of several warps runs as two actors, which may drift apart as its warps may
# The named barrier of one softmax warp and its correction warp: both arrive, correction waits.
NAMED_COUNTS = {"stats": 2 * WARP_THREADS}


@dataclass(frozen=True, slots=True)
class Map:
    """Where buffers are (bytes of shared memory, TMEM columns), and what one half of a role arrives with."""

    q_stage: int
    kv_stage: int
    q_spans: tuple[tuple[int, int], ...]
    o_spans: tuple[tuple[int, int], ...]
    k_spans: tuple[tuple[int, int], ...]
    v_spans: tuple[tuple[int, int], ...]
    k_waits: tuple[tuple[int, ...], ...]
    v_waits: tuple[tuple[int, ...], ...]
    s_cols: tuple[tuple[int, int], ...]
    p_first_cols: tuple[tuple[int, int], ...]
    p_last_cols: tuple[tuple[int, int], ...]
    o_cols: tuple[tuple[int, int], ...]
    o_aliases_q: bool
    half_counts: tuple[tuple[str, str, int], ...]  # (barrier, role, arrivals of half the role)


def map_of(
    tiles: Tiles,
    smem: tuple[SmemBuffer, ...],
    ring: KvRing,
    tmem: tuple[TmemRegion, ...],
    barriers: tuple[Barrier, ...],
) -> Map:
    """The map of a plan: the check executes the very offsets and columns that the kernel will use."""
    buffers, regions = {b.name: b for b in smem}, {r.name: r for r in tmem}
    q, kv, o = buffers["sQ"], buffers["sKV"].offset_bytes, buffers["sO"]
    stages = range(ring.stages)

    def tiles_of(b: SmemBuffer) -> tuple[tuple[int, int], ...]:
        one = b.size_bytes - (b.stages - 1) * b.stage_stride_bytes
        return tuple((b.stage_offset_bytes(i), b.stage_offset_bytes(i) + one) for i in range(b.stages))

    def cols(prefix: str) -> tuple[tuple[int, int], ...]:
        found = sorted((r for r in regions.values() if r.name[:-1] == prefix), key=lambda r: r.name)
        return tuple((r.col, r.col + r.num_cols) for r in found)

    p = cols("p")
    first = [(lo, lo + (hi - lo) * tiles.p_first_cols // tiles.tile_n) for lo, hi in p]
    halves = {"thread": HALVES, "warp": HALVES}
    return Map(
        q_stage=q.stages,
        kv_stage=ring.stages,
        q_spans=tiles_of(q),
        o_spans=tiles_of(o),
        k_spans=tuple((kv + ring.k_offset_bytes[s], kv + ring.k_offset_bytes[s] + ring.k_bytes) for s in stages),
        v_spans=tuple((kv + ring.v_offset_bytes[s], kv + ring.v_offset_bytes[s] + ring.v_bytes) for s in stages),
        k_waits=ring.k_waits,
        v_waits=ring.v_waits,
        s_cols=cols("s"),
        p_first_cols=tuple(first),
        p_last_cols=tuple((f[1], hi) for f, (_, hi) in zip(first, p, strict=True)),
        o_cols=cols("o"),
        o_aliases_q=o.alias_of is not None,
        half_counts=tuple(
            (b.name, a.role.rstrip("01"), a.count // halves.get(a.unit, 1)) for b in barriers for a in b.producers
        ),
    )


def cases(m: Map) -> Iterator[tuple[int, ...]]:
    """Blocks per tile of one CTA's walk: 0, 1, 2, 3 and enough to turn the ring twice; one and several tiles."""
    many = m.kv_stage + 2
    yield from ((0,), (1,), (2,), (3,), (many,))
    yield from ((0, 0, 0), (1, 1, 1, 1), (2, 1, 3, 1, 2), (3, many, 1, 2))
    yield from ((0, 0, 0, 2), (1, 0, 0, 0, 3), (0, 1, 0, 2, 0, many))


def programs(m: Map, blocks: Sequence[int], rescale: bool = True) -> dict[str, Sequence[Op]]:
    """Actor -> operations for a CTA that walks tiles of `blocks` KV blocks.

    rescale: whether every row maximum grows enough that O is rescaled; with q_stage 1 the wait for O depends on it.
    """
    out: dict[str, Sequence[Op]] = {"load": _load(m, blocks), "mma": _mma(m, blocks)}
    for half in range(HALVES):
        for group in range(m.q_stage):
            out[f"softmax{group}.{half}"] = _softmax(m, blocks, group, half)
        out[f"correction.{half}"] = _correction(m, blocks, half, rescale)
    out["epilogue"] = _epilogue(m, blocks)
    return out


class _Program:
    """Builds one actor's operations and counts its waits."""

    def __init__(self, m: Map, role: str) -> None:
        self.m = m
        self.ops: list[Op] = []
        self.waited: dict[tuple[str, int], int] = {}
        self.counts = {barrier: count for barrier, who, count in m.half_counts if who == role}

    def wait(self, barrier: str, stage: int, passes: bool = False) -> None:
        key = (barrier, stage)
        self.waited[key] = self.waited.get(key, -1 if passes else 0) + 1
        self.ops.append(Wait(barrier, stage, self.waited[key] - 1))

    def wait_for(self, barrier: str, stage: int, k: int) -> None:
        self.ops.append(Wait(barrier, stage, k))

    def arrive(self, barrier: str, stage: int) -> None:
        self.ops.append(Arrive(barrier, stage, self.counts[barrier]))


def _smem(span: tuple[int, int], half: int | None = None) -> tuple[Span, ...]:
    """Rows of a tile split by half: each half of a role touches its own rows, TMA and MMA touch both."""
    return _halves("smem", span, half)


def _tmem(span: tuple[int, int], half: int | None = None) -> tuple[Span, ...]:
    return _halves("tmem", span, half)


def _halves(space: str, span: tuple[int, int], half: int | None) -> tuple[Span, ...]:
    which = range(HALVES) if half is None else (half,)
    return tuple((f"{space} rows {h}", *span) for h in which)


def _load(m: Map, blocks: Sequence[int]) -> list[Op]:
    """K of the first block, Q, then the rest in the order of the MMA warp."""
    p = _Program(m, "load")
    ring = 0

    def kv(operand: str) -> None:
        nonlocal ring
        stage = ring % m.kv_stage
        spans, waits = (m.k_spans, m.k_waits) if operand == "K" else (m.v_spans, m.v_waits)
        for s in waits[
            stage
        ]:  # the latest use of s by this load's time: this round's if s < stage, else the one before
            uses = ring // m.kv_stage + (1 if s < stage else 0)
            p.wait_for("kv_empty", s, uses - 1)
        p.ops.append(Load(f"load {operand} into stage {stage}", "kv_full", stage, _smem(spans[stage])))
        ring += 1

    for n in blocks:
        if n:
            kv("K")
        if m.o_aliases_q:  # O leaves through the bytes of Q, so this is no business of tiles with keys alone
            for t in range(m.q_stage):
                p.wait("epi_empty", t, passes=True)
                p.arrive("epi_empty", t)
        if not n:
            continue
        for t in range(m.q_stage):
            p.wait("q_empty", t, passes=True)
            p.ops.append(Load(f"load Q{t}", "q_full", t, _smem(m.q_spans[t])))
        for operand in "VK" * (n - 1) + "V" if m.q_stage == 2 else "KV" * (n - 1) + "V":
            kv(operand)
    return p.ops


class _MmaProgram(_Program):
    ring = 0  # next tile of the ring

    def take(self) -> int:
        """Wait for the next K or V tile; returns its stage."""
        stage = self.ring % self.m.kv_stage
        self.ring += 1
        self.wait("kv_full", stage)
        return stage

    def qk(self, t: int, slot: int, stage: int) -> None:
        reads = (*_smem(self.m.q_spans[t]), *_smem(self.m.k_spans[stage]))
        self.ops.append(Mma(f"S{slot} = Q{t} K", reads, _tmem(self.m.s_cols[slot])))
        self.ops.append(Commit("s_full", slot))

    def pv(self, slot: int, o: int, stage: int) -> None:
        self.wait("p_full", slot)
        for part, cols in (("first", self.m.p_first_cols[slot]), ("last", self.m.p_last_cols[slot])):
            if part == "last":
                self.wait("p_last_full", slot)
            reads = (*_tmem(cols), *_smem(self.m.v_spans[stage]))
            self.ops.append(Mma(f"O{o} += P{slot} V, {part} part", reads, _tmem(self.m.o_cols[o])))

    def commit(self, barrier: str, stage: int) -> None:
        self.ops.append(Commit(barrier, stage))


def _mma(m: Map, blocks: Sequence[int]) -> list[Op]:
    p = _MmaProgram(m, "mma")
    slot = 0
    for n in blocks:
        if n == 0:
            continue
        if m.q_stage == 2:
            _mma_tile_two_q(p, n)
        else:
            slot = _mma_tile_one_q(p, n, slot)
    return p.ops


def _mma_tile_two_q(p: _MmaProgram, n: int) -> None:
    """S of both tiles, then per block: O0, next S0, O1, next S1. In-order execution frees S and P without a barrier."""
    k = p.take()
    for t in (0, 1):
        p.wait("q_full", t)
        p.qk(t, t, k)
    p.commit("kv_empty", k)
    for _ in range(n - 1):
        v = p.take()
        k = -1
        for t in (0, 1):
            p.pv(t, t, v)
            if t == 1:
                p.commit("kv_empty", v)
            else:
                k = p.take()
            p.qk(t, t, k)
        p.commit("kv_empty", k)
    for t in (0, 1):
        p.commit("q_empty", t)
    v = p.take()
    for t in (0, 1):
        p.pv(t, t, v)
        p.commit("o_full", t)
    p.commit("kv_empty", v)


def _mma_tile_one_q(p: _MmaProgram, n: int, slot: int) -> int:
    """S of block i+1 goes ahead of O of block i; o_full after every PV. Returns the next tile's first slot."""

    def next_s(i: int) -> None:
        k = p.take()
        p.qk(0, (slot + i) % 2, k)
        p.commit("kv_empty", k)

    def next_o(i: int) -> None:
        v = p.take()
        p.pv((slot + i) % 2, 0, v)
        p.commit("o_full", (slot + i) % 2)
        p.commit("kv_empty", v)

    p.wait("q_full", 0)
    next_s(0)
    for i in range(n - 1):
        next_s(i + 1)
        next_o(i)
    p.commit("q_empty", 0)
    next_o(n - 1)
    return (slot + n) % 2


def _softmax(m: Map, blocks: Sequence[int], group: int, half: int) -> list[Op]:
    """Per block: S -> row maximum -> factor to correction -> P in two parts. At the end: row sum and maximum."""
    p = _Program(m, "softmax")
    block = 0  # with q_stage 1 its parity picks the slot

    def publish(what: str) -> None:
        p.wait("stats_empty", group, passes=True)
        p.ops.append(Access(f"write {what}", writes=_halves("sScale", (group, group + 1), half)))
        p.ops.append(Arrive("stats", group * HALVES + half, WARP_THREADS))

    for n in blocks:
        for _ in range(n):
            slot = group if m.q_stage == 2 else block % 2
            block += 1
            p.wait("s_full", slot)
            p.ops.append(Access(f"read S{slot}", reads=_tmem(m.s_cols[slot], half)))
            publish("factor")
            p.ops.append(Access(f"write P{slot}, first part", writes=_tmem(m.p_first_cols[slot], half)))
            p.arrive("p_full", slot)
            p.ops.append(Access(f"write P{slot}, last part", writes=_tmem(m.p_last_cols[slot], half)))
            p.arrive("p_last_full", slot)
        if n:
            publish("row sum and maximum")
    return p.ops


class _CorrectionProgram(_Program):
    def __init__(self, m: Map, half: int, rescale: bool) -> None:
        super().__init__(m, "correction")
        self.half, self.rescale = half, rescale
        self.block = 0  # of all tiles

    def take(self, group: int) -> None:
        """Read what softmax published."""
        index = group * HALVES + self.half
        self.ops.append(Arrive("stats", index, WARP_THREADS))
        self.wait("stats", index)
        self.ops.append(Access("read sScale", reads=_halves("sScale", (group, group + 1), self.half)))
        self.arrive("stats_empty", group)

    def o_cols(self, group: int) -> tuple[Span, ...]:
        return _tmem(self.m.o_cols[group], self.half)

    def wait_o_of(self, block: int) -> None:
        """q_stage 1: until the PV of that block is done; slots alternate."""
        self.wait_for("o_full", block % 2, block // 2)

    def next_block(self, first: bool) -> None:
        """The first block of a tile replaces O, so its arrival says only that O has been read out."""
        for t in range(self.m.q_stage):
            self.take(t)
            if not first and self.rescale:
                if self.m.q_stage == 1:  # S of this block does not imply O of the one before
                    self.wait_o_of(self.block - 1)
                self.ops.append(Access(f"rescale O{t}", self.o_cols(t), self.o_cols(t)))
            self.arrive("p_full", t if self.m.q_stage == 2 else self.block % 2)
        self.block += 1

    def finish(self, t: int, keys: bool) -> None:
        """O to sO; without keys zeros, and neither S, P nor O is touched."""
        if keys:
            if self.m.q_stage == 2:
                self.wait("o_full", t)
            else:
                self.wait_o_of(self.block - 1)
            self.take(t)
        self.wait("epi_empty", t, passes=True)
        writes = _smem(self.m.o_spans[t], self.half)
        self.ops.append(Access(f"O{t} to sO", self.o_cols(t) if keys else (), writes))
        self.arrive("epi_full", t)


def _correction(m: Map, blocks: Sequence[int], half: int, rescale: bool) -> list[Op]:
    """Rescales O between blocks, and writes the finished tile to sO."""
    p = _CorrectionProgram(m, half, rescale)
    for n in blocks:
        for i in range(n):
            p.next_block(first=i == 0)
        for t in range(m.q_stage):
            p.finish(t, keys=n > 0)
    return p.ops


def _epilogue(m: Map, blocks: Sequence[int]) -> list[Op]:
    """Stores sO by TMA, and waits until it has been read before it gives the buffer back."""
    p = _Program(m, "epilogue")
    for _ in blocks:
        for t in range(m.q_stage):
            p.wait("epi_full", t)
            p.ops.append(Access(f"store O{t}", reads=_smem(m.o_spans[t])))
            p.arrive("epi_empty", t)
    return p.ops
