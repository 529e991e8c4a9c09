"""What a plan is made of: frozen, printable records that templates, compiler, bundle and launcher read.

Everything a kernel needs to know about its budgets is a field here; nothing downstream repeats the arithmetic.
Units are in the names: ``_bytes``, ``_cols`` (TMEM columns of 32 bits), ``_elems``; offsets are from the 1024-byte
aligned base of dynamic shared memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..manifest import Param, Rule, Serves, TensorMapRecord

if TYPE_CHECKING:
    from ..spec import KernelSpec

WARP_THREADS = 32


@dataclass(frozen=True, slots=True)
class SmemBuffer:
    """A buffer in dynamic shared memory.

    size_bytes covers all stages; stage i starts at ``offset_bytes + i * stage_stride_bytes`` (the K/V ring has its own
    table, `KvRing`). alias_of names the buffer whose bytes this one reuses; it then takes no room of its own.
    """

    name: str
    offset_bytes: int
    size_bytes: int
    stages: int = 1
    stage_stride_bytes: int = 0
    align_bytes: int = 1024
    alias_of: str | None = None
    note: str = ""

    def stage_offset_bytes(self, stage: int) -> int:
        """Offset of one stage from the base."""
        return self.offset_bytes + stage * self.stage_stride_bytes


@dataclass(frozen=True, slots=True)
class TmemRegion:
    """Columns of tensor memory, 128 lanes each. `inside` names the region whose columns it reuses."""

    name: str
    col: int
    num_cols: int
    inside: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Role:
    """Warps that run one program, and the registers per thread that they hold after setmaxnreg.

    setmaxnreg: ``inc``, ``dec`` or ``keep``, by comparison with the registers at launch.
    """

    name: str
    warp_ids: tuple[int, ...]
    num_regs: int
    setmaxnreg: str

    @property
    def num_threads(self) -> int:
        return len(self.warp_ids) * WARP_THREADS


@dataclass(frozen=True, slots=True)
class Arrival:
    """One party that arrives on a barrier.

    unit: ``thread`` (every thread of the role), ``warp`` (one elected lane of each warp, after a warp sync),
    ``one`` (one elected lane of the role), ``tma`` (one arrive.expect_tx; the copies complete the bytes) or ``commit``
    (one tcgen05.commit by the MMA warp's elected lane).
    """

    role: str
    unit: str
    count: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """An array of mbarriers in shared memory, 8 bytes each, called ``<name>_mbar`` in the kernel.

    arrive_count is the sum of the arrivals' counts, times the CTAs of the group where peers arrive too.
    tx_bytes: bytes that one phase of one stage expects; None where no TMA copy completes it. kv_full alternates between
    K and V, whose sizes are in `KvRing`: its tx_bytes is K's.
    first_wait: ``passes`` where the waiter starts at parity 1 (a free slot), ``blocks`` where it starts at 0.
    """

    name: str
    stages: int
    offset_bytes: int
    arrive_count: int
    producers: tuple[Arrival, ...]
    consumers: tuple[str, ...]
    first_wait: str
    tx_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class NamedBarrier:
    """`count` hardware barriers with ids from `id` on (``bar.sync id, num_threads``); id 0 is the whole CTA's."""

    name: str
    id: int
    count: int
    num_threads: int
    roles: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class KvRing:
    """The one ring that K and V share, in the order of the MMA warp.

    With two Q tiles they alternate, K V K V ..., across tiles; with one, a tile's next K goes ahead of its V.

    kind: ``even`` (all stages alike), ``uneven`` (large, small, large; the middle slot holds K and V at different
    offsets as the ring turns), ``paired`` (an even number of stages: K always in large ones, V in small ones) or
    ``separate`` (sm_90a: `stages` of K, then as many of V, each with barriers of its own).
    k_offset_bytes[s], v_offset_bytes[s]: where stage s starts for that operand, from the ring's own start.
    The same as a formula: ``s * stage_stride_bytes``, and for odd s minus (K) or plus (V) `odd_shift_bytes`.
    k_waits[s], v_waits[s]: the stages whose kv_empty a load of that operand into stage s must wait for, s itself last.
    """

    kind: str
    stages: int
    size_bytes: int
    k_bytes: int
    v_bytes: int
    stage_stride_bytes: int
    odd_shift_bytes: int
    k_offset_bytes: tuple[int, ...]
    v_offset_bytes: tuple[int, ...]
    k_waits: tuple[tuple[int, ...], ...]
    v_waits: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes and the steps in which roles walk them.

    rows_per_tile: query rows of one CTA's tile (q_stage * tile_m). chunk_cols: keys per TMEM load or store of softmax.
    p_first_cols, p_first_chunks: keys of P (and chunks of them) that p_full covers; p_last_full covers the rest.
    p_step_cols: TMEM columns of P that one MMA reads. qk_k_steps, pv_k_steps: MMA instructions of
    depth mma_k per tile; the first pv_k_steps_first of a PV need p_full only.
    """

    tile_m: int
    tile_n: int
    rows_per_tile: int
    s_slots: int
    chunk_cols: int
    num_chunks: int
    p_first_cols: int
    p_first_chunks: int
    p_step_cols: int
    mma_k: int
    qk_k_steps: int
    pv_k_steps: int
    pv_k_steps_first: int
    correction_chunk_cols: int
    epilogue_chunk_cols: int


@dataclass(frozen=True, slots=True)
class Operand:
    """One of q, k, v, o as TMA sees it: a tile is num_boxes copies side by side along the head dimension.

    Box b starts at coordinate ``b * box_elems`` and lands at ``b * box_bytes`` in the tile.
    """

    name: str
    head_dim: int
    rows: int
    element_bytes: int
    swizzle: str
    swizzle_bytes: int
    box_elems: int
    num_boxes: int
    box_bytes: int
    tile_bytes: int
    tensor_map: TensorMapRecord


@dataclass(frozen=True, slots=True)
class SmemDescriptor:
    """A tcgen05 shared-memory matrix descriptor without its start address.

    The 64-bit value is ``base | (start_address >> 4)``; K step i adds ``k_step_bytes[i] >> 4`` to the low word.
    """

    operand: str
    major: str  # "K" or "MN"
    swizzle: str
    lbo_bytes: int
    sbo_bytes: int
    base: int
    k_step_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Umma:
    """One kind of tcgen05.mma: shape, instruction descriptor, operand descriptors (a is None when A is in TMEM)."""

    name: str
    m: int
    n: int
    k: int
    k_steps: int
    idesc: int
    a: SmemDescriptor | None
    b: SmemDescriptor


@dataclass(frozen=True, slots=True)
class Wgmma:
    """How the consumer warpgroups of an sm_90a kernel work.

    consumers: warpgroups, 64 query rows each. overlap: softmax of a block runs under the PV product of the one before,
    else after its own QK and before its own PV. order: whose turn it is to issue products (``gemm``), to compute
    exponentials (``exp``), or nobody's (``none``). q_in_registers: Q is read from shared memory once a tile.
    across_tiles: the first S of a tile is computed beside the last O of the tile before, and while that O leaves.
    recompute_s: S is not kept beside its exponentials, but computed again where they overflow; K and Q are released
    later for that.
    unseen_blocks: per warpgroup, the most key blocks of a tile that it passes by because the mask hides them from all
    of its rows; all 0 where it multiplies and masks them.
    o_piece_boxes: boxes of O that its buffer holds at a time.
    """

    consumers: int
    overlap: bool
    order: str
    q_in_registers: bool
    across_tiles: bool
    recompute_s: bool
    unseen_blocks: tuple[int, ...]
    o_piece_boxes: int

    @property
    def skips_unseen(self) -> bool:
        return any(self.unseen_blocks)


@dataclass(frozen=True, slots=True)
class Exp2:
    """Which exponentials of a row's tile_n per block run on the FMA pipe.

    emulated_elems is even; emulated_pairs[c] lists, for chunk c, the indices p of pairs (2p, 2p+1) within the chunk.
    coefficients: the cubic for 2^f on [0, 1), lowest power first.
    """

    emulated_elems: int
    emulated_pairs: tuple[tuple[int, ...], ...]
    coefficients: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How CTAs walk tiles: every schedule strides by the grid's size, so any grid gives the same result."""

    name: str
    order: str
    l2_budget_bytes: int | None


@dataclass(frozen=True, slots=True)
class ModelBound:
    """Model figures (never measured ones): clocks per pair of 128-row tiles and tile_n keys on one SM."""

    mma_clk: float
    mufu_clk: float
    issue_clk: float
    mufu_per_row: int
    softmax_slots: float
    correction_slots: int
    mma_slots: int

    @property
    def bound_clk(self) -> float:
        return max(self.mma_clk, self.mufu_clk, self.issue_clk)

    @property
    def limiter(self) -> str:
        pairs = (("MMA", self.mma_clk), ("MUFU", self.mufu_clk), ("issue", self.issue_clk))
        return max(pairs, key=lambda p: p[1])[0]


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Everything decided about one variant before any source exists. `spec` has no autos left."""

    spec: KernelSpec
    reasons: tuple[tuple[str, str], ...]  # (field, why), for every field that was auto
    tiles: Tiles
    operands: tuple[Operand, ...]  # q, k, v, o
    smem: tuple[SmemBuffer, ...]
    smem_bytes: int
    smem_limit_bytes: int
    kv_ring: KvRing
    tmem: tuple[TmemRegion, ...]
    tmem_alloc_cols: int
    roles: tuple[Role, ...]
    num_threads: int
    launch_regs: int
    barriers: tuple[Barrier, ...]
    named_barriers: tuple[NamedBarrier, ...]
    umma_qk: Umma
    umma_pv: Umma
    exp2: Exp2
    schedule: Schedule
    params: tuple[Param, ...]
    grid: Rule
    serves: Serves
    rank: int
    model: ModelBound
    wgmma: Wgmma | None = None  # sm_90a only

    def role(self, name: str) -> Role:
        return _by_name(self.roles, name)

    def barrier(self, name: str) -> Barrier:
        return _by_name(self.barriers, name)

    def buffer(self, name: str) -> SmemBuffer:
        return _by_name(self.smem, name)

    def region(self, name: str) -> TmemRegion:
        return _by_name(self.tmem, name)

    def operand(self, name: str) -> Operand:
        return _by_name(self.operands, name)

    def named_barrier(self, name: str) -> NamedBarrier:
        return _by_name(self.named_barriers, name)

    @property
    def readable_id(self) -> str:
        """The id without its digest."""
        return self.spec.name

    @property
    def longest_first(self) -> bool:
        return self.schedule.name == "longest_first"

    @property
    def paired(self) -> bool:
        """Whether CTAs take pairs of tiles, in all rounds or all but the last."""
        return self.schedule.name in ("paired", "balanced")

    @property
    def balanced(self) -> bool:
        return self.schedule.name == "balanced"

    @property
    def o_aliases_q(self) -> bool:
        return self.buffer("sO").alias_of == "sQ"

    @property
    def id(self) -> str:
        """The kernel's id: readable part and eight hex digits of the spec's digest."""
        return self.spec.id

    @property
    def symbol_prefix(self) -> str:
        """What the kernel's symbol starts with; the compiler appends ``_0``."""
        return self.id.replace("-", "_")

    @property
    def tensor_maps(self) -> tuple[TensorMapRecord, ...]:
        return tuple(op.tensor_map for op in self.operands)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, for JSON and the manifest; spec is given by its own `canonical()`."""
        data = {
            f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in ("spec", "reasons")
        }
        data["spec"] = _plain(self.spec.canonical())
        data["reasons"] = dict(self.reasons)
        return data


def _by_name(items: tuple[Any, ...], name: str) -> Any:
    for item in items:
        if item.name == name:
            return item
    raise KeyError(f"{name!r} is none of {', '.join(i.name for i in items)}")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
