"""Shared memory: Q and O tiles, the one ring that K and V share, and the small rest.

Budget rule (FlashAttention-4's, restated): Q is ``q_stage * 128 * d * e`` bytes; O is ``q_stage * 128 * dv * e_o`` or
lies over Q; K and V alternate through ``min((224 KiB - QO) // stage, 32)`` stages, a stage being the larger of the two
tiles (half of it per CTA of a pair). Everything else (sScale, mbarriers, pointers) stays within 3072 bytes, because
(192, 128) with two Q tiles leaves exactly that of 227 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arch import Arch
from ..errors import PlanError
from .tiles import CHUNK_COLS, Shape
from .types import KvRing, SmemBuffer

PAYLOAD_BYTES = 224 * 1024  # what auto gives to Q, K, V and O
REST_BYTES = 3072  # the most that everything else may take
MAX_KV_STAGES = 32
MIN_KV_STAGES = 2  # a V stays in use while the next K is waited for
CHUNKED_O_COLS = 128  # width of the staged O of a split head_dim_v 256 kernel
SCALE_VALUES = 2  # per row: rescale factor or row sum, and the shift of its logits
TMEM_POINTER_BYTES = 8
SCALE_NOTE = "per Q tile: rescale factor or row sum [128], row shift [128], float32"


@dataclass(frozen=True, slots=True)
class SmemBudget:
    """Bytes of the large buffers of one CTA."""

    q_bytes: int
    o_bytes: int
    o_aliases_q: bool
    ring: KvRing

    @property
    def qo_bytes(self) -> int:
        return max(self.q_bytes, self.o_bytes) if self.o_aliases_q else self.q_bytes + self.o_bytes

    @property
    def payload_bytes(self) -> int:
        return self.qo_bytes + self.ring.size_bytes


def o_aliases_q(shape: Shape) -> bool:
    """Whether sO lies over sQ: only where both would not fit beside a useful ring."""
    d, dv = shape.head_dim_qk, shape.head_dim_v
    return (d == 192 and dv >= 64) or d == 256 or (dv >= 128 and shape.split)


def q_bytes(shape: Shape) -> int:
    return shape.q_stage * shape.tile_m * shape.head_dim_qk * shape.element_bytes


def o_bytes(shape: Shape) -> int:
    """Staged output: out's own type, or float32 for partial results (in two passes of 128 columns at width 256)."""
    if shape.split:
        width = CHUNKED_O_COLS if shape.head_dim_v == 256 else shape.head_dim_v
        return shape.q_stage * shape.tile_m * width * 4
    return shape.q_stage * shape.tile_m * shape.head_dim_v * shape.out_bytes


def kv_bytes(shape: Shape) -> tuple[int, int]:
    """Bytes of one CTA's K tile and V tile."""
    per_elem = shape.tile_n * shape.element_bytes
    return per_elem * shape.head_dim_qk // shape.num_ctas, per_elem * shape.head_dim_v // shape.num_ctas


def ring_kind(shape: Shape, stages: int) -> str:
    """How K and V of different sizes share `stages` stages; see `KvRing`.

    Stages of two sizes need strict alternation, which one Q tile does not have: its K runs ahead of its V.
    """
    k, v = kv_bytes(shape)
    if k <= v or shape.num_ctas > 1 or shape.q_stage == 1 or (k - v) // 2 % 1024:
        return "even"
    if stages == 3:
        return "uneven"
    return "paired" if stages % 2 == 0 else "even"


def make_ring(shape: Shape, stages: int) -> KvRing:
    """The ring of `stages` stages: offsets per stage and operand, and what each load must wait for."""
    k, v = kv_bytes(shape)
    kind = ring_kind(shape, stages)
    stride, shift = max(k, v), 0
    if kind != "even":
        stride, shift = (k + v) // 2, (k - v) // 2
    k_off = tuple(s * stride - (s % 2) * shift for s in range(stages))
    v_off = tuple(s * stride + (s % 2) * shift for s in range(stages))
    loads = [(i % stages, "v" if i % 2 else "k") for i in range(4 * stages)]
    spans = {
        (s, op): ((k_off[s], k_off[s] + k) if op == "k" else (v_off[s], v_off[s] + v))
        for s in range(stages)
        for op in "kv"
    }
    # Even stages hold either: with one Q tile K runs ahead, and which stage a V takes changes with the tiles' lengths.
    size = stages * stride if kind == "even" else max(spans[load][1] for load in loads)
    waits = _ring_waits(loads, spans)
    return KvRing(
        kind=kind,
        stages=stages,
        size_bytes=size,
        k_bytes=k,
        v_bytes=v,
        stage_stride_bytes=stride,
        odd_shift_bytes=shift,
        k_offset_bytes=k_off,
        v_offset_bytes=v_off,
        k_waits=tuple(waits.get((s, "k"), (s,)) for s in range(stages)),
        v_waits=tuple(waits.get((s, "v"), (s,)) for s in range(stages)),
    )


def _ring_waits(
    loads: list[tuple[int, str]], spans: dict[tuple[int, str], tuple[int, int]]
) -> dict[tuple[int, str], tuple[int, ...]]:
    """Stages whose release each load needs: of every earlier load that it overwrites and that nothing has waited for.

    The load warp issues in ring order, so a wait made for an earlier load also holds for the later ones.
    """
    needs: dict[tuple[int, str], set[int]] = {}
    live: dict[int, tuple[int, str]] = {}  # stage -> the load in it whose release nobody has waited for
    for load in loads:
        lo, hi = spans[load]
        hit = {s for s, old in live.items() if spans[old][0] < hi and lo < spans[old][1]}
        needs.setdefault(load, set()).update(hit)
        for s in hit | {load[0]}:
            live.pop(s, None)
        live[load[0]] = load
    return {(s, op): (*sorted(n - {s}), s) for (s, op), n in needs.items()}


def auto_kv_stages(shape: Shape) -> int:
    """Stages that fit 224 KiB beside Q and O; (192, 128) gets its third by the uneven layout. 0 if none fits."""
    room = PAYLOAD_BYTES - _qo_bytes(shape)
    stages = min(room // max(kv_bytes(shape)), MAX_KV_STAGES)
    if stages <= 3 and ring_kind(shape, 3) == "uneven" and make_ring(shape, 3).size_bytes <= room:
        return 3
    return max(stages, 0)


def _qo_bytes(shape: Shape) -> int:
    q, o = q_bytes(shape), o_bytes(shape)
    return max(q, o) if o_aliases_q(shape) else q + o


def solve_budget(shape: Shape, kv_stage: int | None, arch: Arch, where: str) -> SmemBudget:
    """Choose or check the number of stages. Raises PlanError with the arithmetic when it cannot be."""
    stages = auto_kv_stages(shape) if kv_stage is None else kv_stage
    label = "kv_stage=auto" if kv_stage is None else f"kv_stage={kv_stage}"
    if kv_stage is not None and not MIN_KV_STAGES <= kv_stage <= MAX_KV_STAGES:
        best = auto_kv_stages(shape)
        raise PlanError(
            f"{where}: {label}: K and V alternate through one ring, in which a V is still read while the next K must "
            f"arrive: {MIN_KV_STAGES} to {MAX_KV_STAGES} stages; {_stages_that_fit(shape, best)}"
        )
    budget = SmemBudget(
        q_bytes(shape), o_bytes(shape), o_aliases_q(shape), make_ring(shape, max(stages, MIN_KV_STAGES))
    )
    limit = arch.smem_bytes - REST_BYTES
    if budget.payload_bytes > limit:
        raise PlanError(f"{where}: {label}: {_too_big(shape, budget, arch)}")
    return budget


def _too_big(shape: Shape, budget: SmemBudget, arch: Arch) -> str:
    ring = budget.ring
    if ring.kind == "even":
        kv = f"kv {ring.stages}x{ring.stage_stride_bytes}"
    else:
        num_k = (ring.stages + 1) // 2
        kv = f"kv {num_k}x{ring.k_bytes}+{ring.stages - num_k}x{ring.v_bytes}"
    qo = f"q over o {budget.qo_bytes}" if budget.o_aliases_q else f"q {budget.q_bytes} + o {budget.o_bytes}"
    total, rest = budget.payload_bytes, ""
    if total <= arch.smem_bytes:
        total, rest = total + REST_BYTES, f" + the rest {REST_BYTES}"
    best = auto_kv_stages(shape)
    fix = _stages_that_fit(shape, best)
    return f"needs {total} B SMEM ({qo} + {kv}{rest}), {arch.name} allows {arch.smem_bytes}; {fix}"


def _stages_that_fit(shape: Shape, best: int) -> str:
    """What to do, in values that the plan takes. best: the most stages that fit, 0 or 1 if no ring does."""
    if best < MIN_KV_STAGES:
        return _smaller(shape)
    return f"use kv_stage {MIN_KV_STAGES}" + (f" to {best}" if best > MIN_KV_STAGES else "")


def _smaller(shape: Shape) -> str:
    hints = ["q_stage 1"] if shape.q_stage == 2 else []
    half = shape.tile_n // 2 // CHUNK_COLS * CHUNK_COLS
    hints += [f"tile.n {half}"] if shape.tile_n >= 128 else []
    return "use " + " or ".join([*hints, "smaller head dimensions"])


def layout_smem(
    shape: Shape, budget: SmemBudget, barrier_bytes: int, arch: Arch, where: str
) -> tuple[tuple[SmemBuffer, ...], int]:
    """Buffers in address order, and the dynamic shared memory of a launch.

    Q, the ring and O come first, all 1024-byte aligned as swizzled tiles must be; sScale, mbarriers and the TMEM
    pointer follow. An O over Q starts where Q does; its tiles meet other stages of Q than their own, so that a load
    of Q waits for all of them.
    """
    q_stride, o_stride = budget.q_bytes // shape.q_stage, budget.o_bytes // shape.q_stage
    buffers = [
        SmemBuffer("sQ", 0, budget.q_bytes, shape.q_stage, q_stride, note="Q tiles"),
        SmemBuffer("sKV", budget.q_bytes, budget.ring.size_bytes, budget.ring.stages, 0, note="K and V, see the ring"),
    ]
    end = budget.q_bytes + budget.ring.size_bytes
    if budget.o_aliases_q:
        grow = max(0, budget.o_bytes - budget.q_bytes)  # a float32 O may be the larger one
        buffers.append(
            SmemBuffer("sO", 0, budget.o_bytes, shape.q_stage, o_stride, alias_of="sQ", note="O tiles, over Q")
        )
        buffers[1] = replace(buffers[1], offset_bytes=budget.q_bytes + grow)
        end += grow
    else:
        buffers.append(SmemBuffer("sO", end, budget.o_bytes, shape.q_stage, o_stride, note="O tiles"))
        end += budget.o_bytes
    scale_stride = shape.tile_m * SCALE_VALUES * 4
    rest = end
    for name, size, stages, stride, align, note in (
        ("sScale", shape.q_stage * scale_stride, shape.q_stage, scale_stride, 128, SCALE_NOTE),
        ("mbarriers", barrier_bytes, 1, 0, 8, "8 bytes each"),
        ("tmem_pointer", TMEM_POINTER_BYTES, 1, 0, 8, "written by tcgen05.alloc"),
    ):
        buffers.append(SmemBuffer(name, end, size, stages, stride, align, note=note))
        end += size
    if end - rest > REST_BYTES or end > arch.smem_bytes:
        raise PlanError(
            f"{where}: needs {end} B SMEM (tiles {rest} + sScale {shape.q_stage * scale_stride} + mbarriers "
            f"{barrier_bytes} + TMEM pointer {TMEM_POINTER_BYTES}), {arch.name} allows {arch.smem_bytes}, and "
            f"{REST_BYTES} beside the tiles; {_stages_that_fit(shape, budget.ring.stages - 1)}"
        )
    return tuple(buffers), end
