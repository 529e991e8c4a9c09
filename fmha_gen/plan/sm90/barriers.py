"""The sm_90a kernel's mbarriers, and the proof that its load and consumer warps agree on them.

Every consumer warp arrives for itself (one lane) at an empty barrier when its reads are complete: warps of a warpgroup
wait for a product one by one, so that one warp's word would not hold for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...errors import PlanError
from ...spec import KernelSpec
from .. import petri
from ..petri import Access, Arrive, Load, Op, Span, Wait
from ..types import Arrival, Barrier, Operand, Role, SmemBuffer
from . import choices

MBARRIER_BYTES = 8


def num_mbarriers(spec: KernelSpec) -> int:
    """full and empty for the stages of Q, K and V."""
    assert spec.q_stage and spec.kv_stage
    return 2 * (spec.q_stage + 2 * spec.kv_stage)


def make_barriers(spec: KernelSpec, roles: tuple[Role, ...], operands: tuple[Operand, ...]) -> tuple[Barrier, ...]:
    """The table, in the order of the mbarriers in shared memory, with offsets from the first of them."""
    consumers = tuple(r for r in roles if r.name.startswith("consumer"))
    names = tuple(r.name for r in consumers)
    assert spec.q_stage and spec.kv_stage
    q, k, v, _ = operands
    load = (Arrival("load", "tma", 1),)
    warps = tuple(Arrival(r.name, "warp", len(r.warp_ids)) for r in consumers)
    rows = (
        ("q_full", spec.q_stage, load, names, "blocks", q.tile_bytes, "a Q tile has landed"),
        ("q_empty", spec.q_stage, warps, ("load",), "passes", None, "every warp is done with Q"),
        ("k_full", spec.kv_stage, load, names, "blocks", k.tile_bytes, "a K block has landed"),
        ("k_empty", spec.kv_stage, warps, ("load",), "passes", None, "no warp needs the stage for S = Q K any more"),
        ("v_full", spec.kv_stage, load, names, "blocks", v.tile_bytes, "a V block has landed"),
        ("v_empty", spec.kv_stage, warps, ("load",), "passes", None, "every warp's O += P V has read the stage"),
    )
    out, offset = [], 0
    for name, stages, producers, readers, first, tx, note in rows:
        count = sum(a.count for a in producers)
        out.append(Barrier(name, stages, offset, count, producers, readers, first, tx, note))
        offset += stages * MBARRIER_BYTES
    return tuple(out)


def check(
    table: tuple[Barrier, ...], spec: KernelSpec, consumers: int, buffers: tuple[SmemBuffer, ...], where: str
) -> None:
    """Prove counts, phases and buffers consistent. Raises PlanError that says ``deadlock`` or ``race``."""
    for problem in findings(table, spec, consumers, buffers):
        raise PlanError(f"{where}: pipelines: {problem}")


def findings(
    table: tuple[Barrier, ...], spec: KernelSpec, consumers: int, buffers: tuple[SmemBuffer, ...]
) -> tuple[str, ...]:
    """Everything wrong with the pipelines, for tiles of 0, 1, 2, 3 and many blocks, alone and after each other.

    Each warpgroup runs as two actors, which may drift apart as its warps may. Where warpgroups pass blocks that they do
    not see, they do so in all tiles and in every other one: how many those are depends on where the diagonal falls.
    """
    assert spec.kv_stage
    counts = {b.name: b.arrive_count for b in table}
    unseen = choices.unseen_blocks(spec, consumers)
    for blocks in cases(spec.kv_stage):
        for every in (1, 2) if any(unseen) else (1,):
            found = petri.run(_actors(spec, buffers, blocks, unseen, every), counts)
            if found:
                return tuple(f"{text} [blocks per tile {list(blocks)}]" for text in found)
    return ()


def _actors(
    spec: KernelSpec, buffers: tuple[SmemBuffer, ...], blocks: Sequence[int], unseen: Sequence[int], every: int
) -> dict[str, Sequence[Op]]:
    """The programs; warpgroup g passes up to unseen[g] blocks of every tile whose number `every` divides."""
    actors: dict[str, Sequence[Op]] = {"load": _load(spec, buffers, blocks)}
    for part in range(2 * len(unseen)):
        skips = [min(unseen[part // 2], max(n - 1, 0)) if i % every == 0 else 0 for i, n in enumerate(blocks)]
        actors[f"consumer{part // 2}.{part % 2}"] = _consumer(spec, buffers, blocks, skips, part, 2 * len(unseen))
    return actors


def cases(kv_stage: int) -> Iterator[tuple[int, ...]]:
    """Blocks per tile of one CTA's walk."""
    many = 2 * kv_stage + 1
    yield from ((0,), (1,), (2,), (3,), (many,))
    yield from ((0, 0, 0), (1, 1, 1, 1), (2, 1, 3, 1, 2), (3, many, 1, 2))
    yield from ((0, 0, 0, 2), (1, 0, 0, 0, 3), (0, 1, 0, 2, 0, many))


class _Program:
    """One actor's operations. Waits are counted by completions: ``passes`` barriers from -1."""

    def __init__(self, spec: KernelSpec, buffers: tuple[SmemBuffer, ...]) -> None:
        assert spec.q_stage and spec.kv_stage
        self.stages = {"q": spec.q_stage, "k": spec.kv_stage, "v": spec.kv_stage}
        self.buffers = {b.name: b for b in buffers}
        self.ops: list[Op] = []
        self.used = {"q": 0, "k": 0, "v": 0}

    def stage(self, operand: str, index: int) -> int:
        return index % self.stages[operand]

    def span(self, operand: str, index: int, part: int | None, parts: int) -> tuple[Span, ...]:
        """Bytes of a stage: the rows of one actor, or of all. K and V are read whole by everyone."""
        b = self.buffers["sQ" if operand == "q" else f"s{operand.upper()}"]
        start = b.stage_offset_bytes(self.stage(operand, index))
        return self.rows((start, start + b.stage_stride_bytes), part, parts)

    def rows(self, span: tuple[int, int], part: int | None, parts: int) -> tuple[Span, ...]:
        which = range(parts) if part is None else (part,)
        return tuple((f"rows {p}", *span) for p in which)

    def wait(self, operand: str, way: str, index: int, first: int) -> None:
        self.ops.append(Wait(f"{operand}_{way}", self.stage(operand, index), index // self.stages[operand] + first))


def _load(spec: KernelSpec, buffers: tuple[SmemBuffer, ...], blocks: Sequence[int]) -> list[Op]:
    p = _Program(spec, buffers)
    parts = 2 * (spec.tile_m or 0) // 64

    def load(operand: str) -> None:
        index = p.used[operand]
        p.used[operand] += 1
        p.wait(operand, "empty", index, -1)
        p.ops.append(
            Load(f"load {operand}", f"{operand}_full", p.stage(operand, index), p.span(operand, index, None, parts))
        )

    for n in blocks:
        if n == 0:
            continue
        load("k")
        load("q")
        for _ in range(n - 1):
            load("k")
            load("v")
        load("v")
    return p.ops


class _Consumer(_Program):
    """Half a consumer warpgroup: two of its warps, number `part` of `parts`."""

    def __init__(self, spec: KernelSpec, buffers: tuple[SmemBuffer, ...], part: int, parts: int) -> None:
        super().__init__(spec, buffers)
        self.part, self.parts = part, parts
        self.q_in_registers = bool(spec.q_in_registers)
        o = self.buffers["sO"]
        self.o_rows = self.rows((o.offset_bytes, o.offset_bytes + o.size_bytes), part, parts)

    def wait_full(self, operand: str, ahead: int = 0) -> None:
        self.wait(operand, "full", self.used[operand] + ahead, 0)

    def read_q(self) -> None:
        self.ops.append(Access("read q", reads=self.span("q", self.used["q"], self.part, self.parts)))

    def product(self, operand: str) -> None:
        """One product up to its wait, and the release of its stage."""
        index = self.used[operand]
        reads = self.span(operand, index, None, self.parts)
        if operand == "k" and not self.q_in_registers:
            reads += self.span("q", self.used["q"], self.part, self.parts)
        self.ops.append(Access(f"product {operand}", reads=reads))
        self.release(operand)

    def release(self, operand: str) -> None:
        self.ops.append(Arrive(f"{operand}_empty", self.stage(operand, self.used[operand]), 2))
        self.used[operand] += 1

    def write_o(self) -> None:
        """The warps' rows of O, in pieces of which each waits for the store of the one before: no one else's bytes."""
        self.ops.append(Access("write and store o", writes=self.o_rows))


def _consumer(
    spec: KernelSpec,
    buffers: tuple[SmemBuffer, ...],
    blocks: Sequence[int],
    skips: Sequence[int],
    part: int,
    parts: int,
) -> list[Op]:
    """`skips`: leading blocks of each tile, fewer than it has, that are passed without a product."""
    p = _Consumer(spec, buffers, part, parts)
    if spec.across_tiles:
        _across_tiles(p, blocks, skips)
        return p.ops
    for n in blocks:
        if n > 0:
            p.wait_full("q")
            if p.q_in_registers:
                p.read_q()
            if spec.overlap:
                _overlapped(p, n)
            else:
                _serial(p, n)
        p.write_o()
    return p.ops


def _serial(p: _Consumer, n: int) -> None:
    """A tile of n > 0 blocks: S, softmax, O of one block after the other."""
    for _ in range(n):
        p.wait_full("k")
        p.product("k")
        p.wait_full("v")
        p.product("v")
    p.release("q")


def _overlapped(p: _Consumer, n: int) -> None:
    """A tile of n > 0 blocks: S of a block is issued before O of the block before."""
    p.wait_full("k")
    p.product("k")
    if p.q_in_registers:
        p.release("q")
    p.wait_full("v")
    for _ in range(n - 1):
        p.wait_full("k")
        p.product("k")
        p.wait_full("v", ahead=1)
        p.product("v")
    if not p.q_in_registers:
        p.release("q")
    p.product("v")


def _across_tiles(p: _Consumer, blocks: Sequence[int], skips: Sequence[int]) -> None:
    """All tiles: as `_overlapped`, and the first S of a tile is issued with the last O of the tile before.

    Not so beside a tile without keys. Q is released with the last S of its tile. Blocks that are skipped are released
    as they land: of K before the first S, of V before the first O.
    """

    def skip(operand: str, times: int) -> None:
        for _ in range(times):
            p.wait_full(operand)
            p.release(operand)

    def product_k(left: int) -> None:
        p.product("k")
        if left == 0:
            p.release("q")

    started = False  # whether the first S of the tile is
    for i, (n, following) in enumerate(zip(blocks, [*blocks[1:], 0], strict=True)):
        if n == 0:
            p.write_o()
            continue
        seen = n - skips[i]
        if not started:
            skip("k", skips[i])
            p.wait_full("q")
            p.wait_full("k")
            product_k(seen - 1)
        skip("v", skips[i])
        p.wait_full("v")
        for left in reversed(range(seen - 1)):
            p.wait_full("k")
            product_k(left)
            p.wait_full("v", ahead=1)
            p.product("v")
        started = following > 0
        if started:
            p.wait_full("q")
            skip("k", skips[i + 1])
            p.wait_full("k")
        p.product("v")
        p.write_o()
        if started:
            product_k(following - skips[i + 1] - 1)
