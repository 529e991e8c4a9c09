"""The vocabulary of a kernel entry: every field, its type and range, and names that people write in its stead.

One table; the reader, the JSON schema and ``docs/spec.md``'s test are made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..built import RESCALE_THRESHOLD_RANGE
from .model import Registers


@dataclass(frozen=True, slots=True)
class Leaf:
    """A single value.

    kind: ``name``, ``int``, ``float`` or ``bool``. Bounds are inclusive.

    later: choices that are known but that no template is built for; a test holds it against `built.BUILT`.
    """

    kind: str
    choices: tuple[Any, ...] = ()
    later: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    multiple: int | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a kernel entry.

    leaf: what a plain value must be, or None where only a mapping is allowed.
    members: keys of the mapping form. all_members: the mapping must have all of them.
    auto: ``auto`` is allowed. required: the entry must have the key; placeholder stands in for one that is missing.
    assign: plain value, or mapping of members, -> attributes of `KernelSpec`.
    """

    name: str
    doc: str
    assign: Callable[[Any], dict[str, Any]]
    leaf: Leaf | None = None
    members: dict[str, Leaf] = field(default_factory=dict)
    all_members: bool = False
    auto: bool = False
    required: bool = False
    placeholder: Any = None


def _plain(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


def _head_dim(value: Any) -> dict[str, Any]:
    qk, v = (value["qk"], value["v"]) if isinstance(value, dict) else (value, value)
    return {"head_dim_qk": qk, "head_dim_v": v}


def _tile(value: Any) -> dict[str, Any]:
    return {f"tile_{k}": v for k, v in value.items()} if value is not None else {"tile_m": None, "tile_n": None}


def _registers(value: Any) -> dict[str, Any]:
    return {"registers": Registers(**value) if value is not None else None}


_REGISTERS = Leaf("int", minimum=24, maximum=256, multiple=8)
_HEAD_DIM = Leaf("int", minimum=1, maximum=1024)
_FLAG = Leaf("bool")


def _flag(name: str, doc: str) -> Field:
    return Field(name, doc, _plain(name), leaf=_FLAG)


FIELDS: dict[str, Field] = {
    f.name: f
    for f in (
        Field(
            "dtype",
            "element type of q, k, v and out",
            _plain("dtype"),
            leaf=Leaf("name", choices=("bf16", "fp16", "fp8_e4m3"), later=("fp8_e4m3",)),
            required=True,
            placeholder="bf16",
        ),
        Field(
            "head_dim",
            "elements per head: one number for q, k and v alike, or {qk: 192, v: 128}",
            _head_dim,
            leaf=_HEAD_DIM,
            members={"qk": _HEAD_DIM, "v": _HEAD_DIM},
            all_members=True,
            required=True,
            placeholder=128,
        ),
        Field(
            "mask",
            "full, or causal (bottom-right aligned by used lengths)",
            _plain("mask"),
            leaf=Leaf("name", choices=("full", "causal", "window"), later=("window",)),
            required=True,
            placeholder="full",
        ),
        Field(
            "q_stage",
            "Q tiles in flight in one CTA",
            _plain("q_stage"),
            leaf=Leaf("int", choices=(1, 2)),
            auto=True,
        ),
        Field(
            "tile",
            "rows of a Q tile (m) and keys of a KV block (n)",
            _tile,
            members={
                "m": Leaf("int", choices=(64, 128, 192), later=(64,)),
                "n": Leaf("int", minimum=32, maximum=256, multiple=16),
            },
            auto=True,
        ),
        Field(
            "kv_stage",
            "stages of the shared K/V ring",
            _plain("kv_stage"),
            leaf=Leaf("int", minimum=2, maximum=32),
            auto=True,
        ),
        Field(
            "registers",
            "registers per thread (setmaxnreg) of the softmax, correction and other warps",
            _registers,
            members={"softmax": _REGISTERS, "correction": _REGISTERS, "other": _REGISTERS},
            all_members=True,
            auto=True,
        ),
        Field(
            "num_ctas",
            "CTAs that share one MMA",
            _plain("num_ctas"),
            leaf=Leaf("int", choices=(1, 2), later=(2,)),
            auto=True,
        ),
        Field(
            "schedule",
            "order in which CTAs take tiles",
            _plain("schedule"),
            leaf=Leaf("name", choices=("static_persistent", "longest_first", "paired", "balanced")),
            auto=True,
        ),
        Field(
            "warpgroup_order",
            "sm_90a: consumer warpgroups take turns to issue products (gemm) or exponentials (exp), or not (none)",
            _plain("warpgroup_order"),
            leaf=Leaf("name", choices=("none", "gemm", "exp")),
            auto=True,
        ),
        Field(
            "overlap",
            "sm_90a: softmax of a KV block runs under the PV product of the block before",
            _plain("overlap"),
            leaf=_FLAG,
            auto=True,
        ),
        Field(
            "q_in_registers",
            "sm_90a: Q is read from shared memory once a tile, and stays in registers",
            _plain("q_in_registers"),
            leaf=_FLAG,
            auto=True,
        ),
        Field(
            "across_tiles",
            "sm_90a: the next tile's first QK product runs beside a tile's last PV product, and while O is stored",
            _plain("across_tiles"),
            leaf=_FLAG,
            auto=True,
        ),
        Field(
            "recompute_s",
            "sm_90a: S is not kept beside its exponentials, but computed again in the rare block where they overflow",
            _plain("recompute_s"),
            leaf=_FLAG,
            auto=True,
        ),
        Field(
            "exp2_emulation",
            "exponentials of a row per KV block that run on the FMA pipe instead of the MUFU",
            _plain("exp2_emulation"),
            leaf=Leaf("int", minimum=0, maximum=256, multiple=2),
            auto=True,
        ),
        Field(
            "rescale_threshold",
            "growth of the row maximum, in log2 units, below which O is not rescaled "
            "(P reaches 2^threshold, and fp16 ends below 2^16)",
            _plain("rescale_threshold"),
            leaf=Leaf("float", minimum=RESCALE_THRESHOLD_RANGE[0], maximum=RESCALE_THRESHOLD_RANGE[1]),
        ),
        _flag("lse", "the kernel can write the log-sum-exp; a launch may still ask for none"),
        _flag("varlen", "ragged batches by cumulative or used lengths"),
        _flag("paged_kv", "K and V in pages, found through a page table"),
        Field("page_size", "keys per page", _plain("page_size"), leaf=Leaf("int", minimum=1, maximum=4096)),
        _flag("sink", "one extra logit per q head that joins the softmax sum"),
        _flag("softcap", "softcap * tanh(s / softcap) before the mask; the value is given at launch"),
        _flag("pack_gqa", "query heads of one KV head packed into the rows of a tile"),
        _flag("split_kv", "the keys of one tile split over CTAs, merged by a combine kernel"),
    )
}

FAMILIES = ("fmha_fwd", "fmha_combine")
ENTRY_KEYS = ("family", *FIELDS, "include", "exclude")
FILE_KEYS = ("edition", "bundle", "archs", "kernels")
BUNDLE_KEYS = ("name", "version")

# Chosen per launch. A kernel serves every value of these, so that they are never in a spec or in a kernel's identity.
LAUNCH_VALUES: dict[str, str] = {
    **dict.fromkeys(("softmax_scale", "scale", "sm_scale"), "softmax_scale is"),
    **dict.fromkeys(("seqlen_q", "seqlen_k", "seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen"), "lengths are"),
    **dict.fromkeys(("batch", "batch_size", "total_q", "total_k"), "the batch is"),
    **dict.fromkeys(("num_heads", "num_heads_q", "num_heads_kv", "num_kv_heads", "gqa_ratio", "ratio"),
                    "head counts and their ratio are"),
    **dict.fromkeys(("window", "window_left", "window_right", "window_size", "sliding_window"), "window sizes are"),
    **dict.fromkeys(("softcap_value", "logit_softcap", "soft_cap"), "the softcap's value is"),
    **dict.fromkeys(("num_splits",), "num_splits is"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), "lengths are"),
    **dict.fromkeys(("page_table", "max_pages", "num_pages"), "the page table is"),
    **dict.fromkeys(("stride", "strides", "layout"), "strides are"),
    **dict.fromkeys(("stream", "device", "seed", "num_sms"), "the device is"),
}  # fmt: skip

# Which flag of a spec makes a kernel listen to a launch value.
LAUNCH_FLAGS: dict[str, str] = {
    "window sizes are": "mask: window",
    "the softcap's value is": "softcap: true",
    "num_splits is": "split_kv: true",
    "the page table is": "paged_kv: true",
}

# Other names for a field, and what to write.
RENAMED: dict[str, str] = {
    "head_dim_qk": "head_dim: {qk: ..., v: ...}",
    "head_dim_v": "head_dim: {qk: ..., v: ...}",
    "head_dims": "head_dim",
    "tile_m": "tile: {m: ...}",
    "tile_n": "tile: {n: ...}",
    "m": "tile: {m: ...}",
    "n": "tile: {n: ...}",
    "softmax": "registers: {softmax: ..., correction: ..., other: ...}",
    "correction": "registers: {softmax: ..., correction: ..., other: ...}",
    "other": "registers: {softmax: ..., correction: ..., other: ...}",
    "causal": "mask: causal",
    "is_causal": "mask: causal",
    "dtypes": "dtype",
    "page_sizes": "page_size",
    "arch": "archs, at the top of the file",
}
