"""A plan as the tables that a kernel engineer would draw. Data only: the command line prints them, or gives JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from . import registers, tmem
from .types import Arrival, KernelPlan


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain cells under named columns; `right` names the columns of numbers. `note` goes under the table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    note: str = ""


def describe(plan: KernelPlan) -> tuple[Table, ...]:
    """Every table of a plan, the big budgets first."""
    return (
        _choices(plan),
        _smem(plan),
        _ring(plan),
        *([_tmem(plan)] if plan.tmem_alloc_cols else []),
        _warps(plan),
        _pipelines(plan),
        _copies(plan),
        _products(plan),
        _model(plan),
        _params(plan),
    )


def to_text(plan: KernelPlan) -> str:
    """The tables as aligned plain text, for golden tests and logs."""
    parts = [plan.id]
    for t in describe(plan):
        widths = [max(len(row[i]) for row in (t.columns, *t.rows)) for i in range(len(t.columns))]
        lines = [
            "  ".join(
                cell.rjust(w) if column in t.right else cell.ljust(w)
                for cell, w, column in zip(row, widths, t.columns, strict=True)
            ).rstrip()
            for row in (t.columns, *t.rows)
        ]
        parts.append("\n".join([t.title, *("  " + line for line in lines), *(["  " + t.note] if t.note else [])]))
    return "\n\n".join(parts) + "\n"


def to_json(plan: KernelPlan) -> str:
    """The whole plan as deterministic JSON text."""
    return json.dumps(plan.to_dict(), indent=1, sort_keys=True) + "\n"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "/".join(str(v) for v in value)
    return str(value)


_CHOICES = (
    *("dtype", "head_dim_qk", "head_dim_v", "mask", "q_stage", "tile_m", "tile_n", "kv_stage", "registers", "num_ctas"),
    *("schedule", "exp2_emulation", "rescale_threshold", "lse"),
)
_SM90_CHOICES = ("warpgroup_order", "overlap", "q_in_registers", "across_tiles", "recompute_s")


def _choices(plan: KernelPlan) -> Table:
    spec, reasons = plan.spec, dict(plan.reasons)
    rows = tuple(
        (name, _text(getattr(spec, name)), "auto" if name in reasons else "spec", reasons.get(name, ""))
        for name in _CHOICES + (_SM90_CHOICES if plan.wgmma else ())
    )
    return Table("choices", ("field", "value", "by", "why"), rows)


def _smem(plan: KernelPlan) -> Table:
    rows = []
    for b in sorted(plan.smem, key=lambda b: (b.offset_bytes, b.alias_of is not None)):
        each = f"{b.stages} x {b.stage_stride_bytes}" if b.stage_stride_bytes else "see ring" if b.stages > 1 else ""
        over = f"over {b.alias_of}" if b.alias_of else ""
        end = b.offset_bytes + b.size_bytes
        rows.append((str(b.offset_bytes), str(end), str(b.size_bytes), b.name, each, over, b.note))
    free = plan.smem_limit_bytes - plan.smem_bytes
    note = f"{plan.smem_bytes} of {plan.smem_limit_bytes} B, {free} free; {plan.spec.arch}, one CTA an SM"
    columns = ("from", "to", "bytes", "buffer", "stages", "alias", "holds")
    return Table("shared memory", columns, tuple(rows), ("from", "to", "bytes"), note)


def _ring(plan: KernelPlan) -> Table:
    ring = plan.kv_ring
    base = plan.buffer("sK" if ring.kind == "separate" else "sKV").offset_bytes
    rows = tuple(
        (
            str(s),
            str(base + ring.k_offset_bytes[s]),
            str(base + ring.v_offset_bytes[s]),
            " and ".join(str(w) for w in ring.k_waits[s]),
            " and ".join(str(w) for w in ring.v_waits[s]),
        )
        for s in range(ring.stages)
    )
    order = "K0 K1 V0 K2 V1 ... V" if plan.spec.q_stage == 1 or plan.wgmma else "K V K V ..."
    note = f"{ring.kind}: K {ring.k_bytes} B, V {ring.v_bytes} B, {ring.size_bytes} B in all; order {order}"
    k_empty, v_empty = ("k_empty", "v_empty") if ring.kind == "separate" else ("kv_empty", "kv_empty")
    columns = ("stage", "K at", "V at", f"K waits for {k_empty} of", f"V waits for {v_empty} of")
    return Table("K/V ring", columns, rows, ("stage", "K at", "V at"), note)


def _tmem(plan: KernelPlan) -> Table:
    rows = []
    for r in sorted(plan.tmem, key=lambda r: (r.col, r.inside is not None)):
        rows.append((str(r.col), str(r.col + r.num_cols), str(r.num_cols), r.name, r.inside or "", r.note))
    for col, num in tmem.free_ranges(plan.tmem, plan.tmem_alloc_cols):
        rows.append((str(col), str(col + num), str(num), "(free)", "", ""))
    used = sum(r.num_cols for r in plan.tmem if r.inside is None)
    note = f"{used} of {plan.tmem_alloc_cols} columns of 128 lanes x 32 bits"
    columns = ("from", "to", "columns", "region", "inside", "holds")
    return Table("tensor memory", columns, tuple(rows), ("from", "to", "columns"), note)


_COUNTS = {3: "three", 4: "four"}


def _warps(plan: KernelPlan) -> Table:
    rows = tuple(
        (
            _warp_range(r.warp_ids),
            r.name,
            str(r.num_threads),
            str(r.num_regs),
            r.setmaxnreg,
            str(r.num_threads * r.num_regs),
        )
        for r in plan.roles
    )
    regs, q_stage = plan.spec.registers, plan.spec.q_stage
    assert regs is not None and q_stage is not None
    if plan.wgmma:
        groups = plan.wgmma.consumers
        sum_, total = f"{groups}x{regs.softmax} + {regs.other}", groups * regs.softmax + regs.other
    else:
        sum_ = f"{q_stage}x{regs.softmax} + {regs.correction} + {3 - q_stage}x{regs.other}"
        groups, total = 3, registers.total_regs(regs, q_stage)
    note = (
        f"{plan.launch_regs} registers a thread at launch; {sum_} = {total} of "
        f"{plan.launch_regs * (groups + 1)} per thread of the {_COUNTS[groups + 1]} warpgroups"
    )
    columns = ("warps", "role", "threads", "registers", "setmaxnreg", "in all")
    return Table("warps x registers", columns, rows, ("threads", "registers", "in all"), note)


def _warp_range(ids: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for w in ids:
        if runs and w == runs[-1][-1] + 1:
            runs[-1].append(w)
        else:
            runs.append([w])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _pipelines(plan: KernelPlan) -> Table:
    rows = []
    for b in plan.barriers:
        made = " + ".join(_arrival(a, plan) for a in b.producers)
        tx = "" if b.tx_bytes is None else str(b.tx_bytes)
        rows.append(
            (str(b.offset_bytes), b.name, str(b.stages), str(b.arrive_count), made, tx, ", ".join(b.consumers), b.note)
        )
    for n in plan.named_barriers:
        ids = f"id {n.id}-{n.id + n.count - 1}" if n.count > 1 else f"id {n.id}"
        members = f"{n.num_threads} threads"
        rows.append((ids, n.name, str(n.count), str(n.num_threads), members, "", ", ".join(n.roles), n.note))
    columns = ("at", "barrier", "stages", "arrivals", "made by", "tx B", "waits", "complete means")
    note = "proven for 0, 1, 2, 3 and many blocks a tile, one and several tiles a CTA: no deadlock, no phase skipped"
    return Table("pipelines", columns, tuple(rows), ("at", "stages", "arrivals", "tx B"), note)


def _arrival(a: Arrival, plan: KernelPlan) -> str:
    if a.unit in ("tma", "commit"):
        return f"{a.role} {a.unit}"
    units = {"thread": "threads", "warp": "warps", "one": "lane"}
    role = "softmax of the slot:" if a.role == "softmax0" and plan.spec.q_stage == 2 else a.role
    return f"{role} {a.count} {units[a.unit]}"


def _copies(plan: KernelPlan) -> Table:
    rows = tuple(
        (
            op.name,
            f"{op.rows} x {op.head_dim}",
            "(" + ", ".join(str(axis.box) for axis in op.tensor_map.axes) + ")",
            op.swizzle,
            str(op.num_boxes),
            str(op.box_bytes),
            str(op.tile_bytes),
        )
        for op in plan.operands
    )
    columns = ("tensor", "tile", "box (d, s, h, b)", "swizzle", "copies", "copy B", "tile B")
    return Table("TMA copies", columns, rows, ("copies", "copy B", "tile B"))


def _products(plan: KernelPlan) -> Table:
    rows = []
    for name, u in (("S = Q K", plan.umma_qk), ("O += P V", plan.umma_pv)):
        a = ("registers" if plan.wgmma else "TMEM") if u.a is None else f"{u.a.major}-major, SBO {u.a.sbo_bytes}"
        b = f"{u.b.major}-major, LBO {u.b.lbo_bytes}, SBO {u.b.sbo_bytes}"
        rows.append(
            (
                name,
                f"{u.m} x {u.n} x {u.k}",
                str(u.k_steps),
                f"{u.idesc:#x}" if u.idesc else "-",
                a,
                b,
                f"{u.b.base:#018x}",
            )
        )
    columns = ("product", "M x N x K", "steps", "idesc", "A", "B", "B descriptor")
    return Table("wgmma" if plan.wgmma else "tcgen05.mma", columns, tuple(rows), ("steps",), _unseen_note(plan))


def _unseen_note(plan: KernelPlan) -> str:
    """What becomes of key blocks that a causal mask hides from all rows of a warpgroup."""
    if plan.wgmma is None or plan.spec.mask != "causal":
        return ""
    if not plan.wgmma.skips_unseen:
        return "key blocks that no row of a warpgroup sees: multiplied and masked"
    most = ", ".join(f"consumer{i} up to {n}" for i, n in enumerate(plan.wgmma.unseen_blocks) if n)
    return f"key blocks of a tile that no row of a warpgroup sees: passed without a product, {most}"


def _model(plan: KernelPlan) -> Table:
    m = plan.model
    rows = (
        ("MMA", f"{m.mma_clk:.0f}", "both products of two row tiles"),
        ("MUFU", f"{m.mufu_clk:.0f}", f"{m.mufu_per_row} per row and block"),
        ("issue", f"{m.issue_clk:.0f}", f"2 x {m.softmax_slots:g} + {m.correction_slots} + {m.mma_slots} slots"),
    )
    note = f"model, not measured: clocks per pair of 128-row tiles and {plan.tiles.tile_n} keys; bound by {m.limiter}"
    return Table("bound (model)", ("unit", "clocks", "from"), rows, ("clocks",), note)


def _params(plan: KernelPlan) -> Table:
    rows = tuple((str(p.offset), str(p.size), p.name, p.kind, "may be null" if p.nullable else "") for p in plan.params)
    rule = plan.grid
    constants = ", ".join(f"{k} {v}" for k, v in rule.constants.items())
    note = f"grid rule {rule.name} ({constants}); schedule {plan.schedule.name}: {plan.schedule.order}"
    return Table("parameters", ("offset", "size", "name", "kind", ""), rows, ("offset", "size"), note)
