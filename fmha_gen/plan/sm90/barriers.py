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

MBARRIER_BYTES = 8


def num_mbarriers(spec: KernelSpec) -> int:
    """full and empty for the stages of Q, K and V."""
    assert spec.q_stage and spec.kv_stage
    return 2 * (spec.q_stage + 2 * spec.kv_stage)


def make_barriers(
    spec: KernelSpec, roles: tuple[Role, ...], operands: tuple[Operand, ...], o_aliases_q: bool
) -> tuple[Barrier, ...]:
    """The table, in the order of the mbarriers in shared memory, with offsets from the first of them."""
    consumers = tuple(r for r in roles if r.name.startswith("consumer"))
    names = tuple(r.name for r in consumers)
    assert spec.q_stage and spec.kv_stage
    q, k, v, _ = operands
    load = (Arrival("load", "tma", 1),)
    warps = tuple(Arrival(r.name, "warp", len(r.warp_ids)) for r in consumers)
    q_note, q_free = "every warp is done with Q", warps
    if o_aliases_q:
        q_note = "the store of O has read the bytes that Q shares, and the load warp has seen the phase before"
        q_free = (*warps, Arrival("load", "one", 1))
    rows = (
        ("q_full", spec.q_stage, load, names, "blocks", q.tile_bytes, "a Q tile has landed"),
        ("q_empty", spec.q_stage, q_free, ("load",), "passes", None, q_note),
        ("k_full", spec.kv_stage, load, names, "blocks", k.tile_bytes, "a K block has landed"),
        ("k_empty", spec.kv_stage, warps, ("load",), "passes", None, "every warp's S = Q K has read the stage"),
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
    table: tuple[Barrier, ...],
    spec: KernelSpec,
    consumers: int,
    buffers: tuple[SmemBuffer, ...],
    o_aliases_q: bool,
    where: str,
) -> None:
    """Prove counts, phases and buffers consistent. Raises PlanError that says ``deadlock`` or ``race``."""
    for problem in findings(table, spec, consumers, buffers, o_aliases_q):
        raise PlanError(f"{where}: pipelines: {problem}")


def findings(
    table: tuple[Barrier, ...],
    spec: KernelSpec,
    consumers: int,
    buffers: tuple[SmemBuffer, ...],
    o_aliases_q: bool,
) -> tuple[str, ...]:
    """Everything wrong with the pipelines, for tiles of 0, 1, 2, 3 and many blocks, alone and after each other.

    Each warpgroup runs as two actors, which may drift apart as its warps may.
    """
    assert spec.kv_stage
    counts = {b.name: b.arrive_count for b in table}
    for blocks in cases(spec.kv_stage):
        actors: dict[str, Sequence[Op]] = {"load": _load(spec, buffers, blocks, o_aliases_q)}
        for group in range(consumers):
            for half in range(2):
                actors[f"consumer{group}.{half}"] = _consumer(
                    spec, buffers, blocks, o_aliases_q, 2 * group + half, consumers
                )
        found = petri.run(actors, counts)
        if found:
            return tuple(f"{text} [blocks per tile {list(blocks)}]" for text in found)
    return ()


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


def _load(spec: KernelSpec, buffers: tuple[SmemBuffer, ...], blocks: Sequence[int], o_aliases_q: bool) -> list[Op]:
    p = _Program(spec, buffers)
    parts = 2 * (spec.tile_m or 0) // 64
    tile_q = 0  # completions of q_empty waited for, which every tile adds to where O lies over Q

    def load(operand: str) -> None:
        index = p.used[operand]
        p.used[operand] += 1
        if operand != "q":
            p.wait(operand, "empty", index, -1)
        p.ops.append(
            Load(f"load {operand}", f"{operand}_full", p.stage(operand, index), p.span(operand, index, None, parts))
        )

    for n in blocks:
        if n > 0:
            load("k")
        if o_aliases_q:
            p.ops += [Wait("q_empty", 0, tile_q - 1), Arrive("q_empty", 0, 1)]
            tile_q += 1
        elif n > 0:
            p.wait("q", "empty", p.used["q"], -1)
        if n > 0:
            load("q")
            for _ in range(n - 1):
                load("k")
                load("v")
            load("v")
    return p.ops


def _consumer(
    spec: KernelSpec,
    buffers: tuple[SmemBuffer, ...],
    blocks: Sequence[int],
    o_aliases_q: bool,
    part: int,
    consumers: int,
) -> list[Op]:
    """Half a consumer warpgroup: two of its warps."""
    p = _Program(spec, buffers)
    parts = 2 * consumers
    o = p.buffers["sO"]
    o_rows = p.rows((o.offset_bytes, o.offset_bytes + o.size_bytes), part, parts)
    early_q = bool(spec.q_in_registers)

    def product(operand: str) -> None:
        index = p.used[operand]
        reads = p.span(operand, index, None, parts)
        if operand == "k" and not early_q:
            reads += p.span("q", p.used["q"], part, parts)
        p.ops.append(Access(f"product {operand}", reads=reads))
        p.ops.append(Arrive(f"{operand}_empty", p.stage(operand, index), 2))
        p.used[operand] += 1

    for tile, n in enumerate(blocks):
        if n == 0 and o_aliases_q:
            p.ops.append(Wait("q_empty", 0, tile - 1))
        if n > 0:
            q = p.used["q"]
            p.wait("q", "full", q, 0)
            if early_q:
                p.ops.append(Access("read q", reads=p.span("q", q, part, parts)))
            _blocks(p, n, bool(spec.overlap), product)
            if not o_aliases_q:
                p.ops.append(Arrive("q_empty", p.stage("q", q), 2))
            p.used["q"] += 1
        p.ops.append(Access("write and store o", writes=o_rows))
        if o_aliases_q:
            p.ops.append(Arrive("q_empty", 0, 2))
    return p.ops


def _blocks(p: _Program, n: int, overlap: bool, product) -> None:  # type: ignore[no-untyped-def]
    """The order of waits and products of one tile."""
    if not overlap:
        for _ in range(n):
            p.wait("k", "full", p.used["k"], 0)
            product("k")
            p.wait("v", "full", p.used["v"], 0)
            product("v")
        return
    p.wait("k", "full", p.used["k"], 0)
    product("k")
    p.wait("v", "full", p.used["v"], 0)
    for _ in range(n - 1):
        p.wait("k", "full", p.used["k"], 0)
        product("k")
        p.wait("v", "full", p.used["v"] + 1, 0)
        product("v")
    product("v")
