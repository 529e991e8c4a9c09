"""`KernelSpec`: one kernel variant, frozen, and its identity.

A spec says what a kernel *fixes*. What a launch chooses (lengths, strides, head counts, scale, window sizes, the
softcap value, the number of splits) is no field here and never part of a kernel's identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import SpecError


class Registers(NamedTuple):
    """Registers per thread that each class of warps asks for with setmaxnreg (multiples of 8)."""

    softmax: int
    correction: int
    other: int


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One variant after matrix expansion. ``None`` in a field of `AUTO_FIELDS` means ``auto``: the plan chooses.

    family: ``fmha_fwd``.
    arch: ``sm_100a``.
    dtype: ``bf16`` or ``fp16``; q, k, v and out alike.
    head_dim_qk, head_dim_v: elements.
    mask: ``full`` or ``causal`` (bottom-right aligned).
    q_stage: Q tiles in flight in one CTA, 1 or 2.
    tile_m: rows of one Q tile. tile_n: keys of one KV block.
    kv_stage: stages of the shared K/V ring.
    registers: setmaxnreg split; see `Registers`.
    num_ctas: CTAs of one MMA group.
    schedule: ``static_persistent``, ``longest_first`` or, on sm_90a, ``paired`` or ``balanced``.
    exp2_emulation: how many of a row's `tile_n` exponentials in a block run on the FMA pipe, an even number.
    warpgroup_order, overlap, q_in_registers, across_tiles, recompute_s: sm_90a only, and None elsewhere. Whose turn it
        is, among the consumer warpgroups, to issue products (``gemm``) or to compute exponentials (``exp``), or
        nobody's (``none``); whether softmax of a block runs under the PV product of the one before; whether Q is kept
        in registers; whether the first QK of a tile is issued with the last PV of the tile before; whether S is
        computed again where a block's exponentials overflow, instead of being kept until they are known not to.
    rescale_threshold: growth of the row maximum, in log2 units, below which O is not rescaled.
    lse: the kernel can write the log-sum-exp (a launch may still pass a null pointer).
    source: ``file:line`` of the entry that made the variant; no part of equality or identity.
    """

    family: str
    arch: str
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    mask: str
    q_stage: int | None = None
    tile_m: int | None = None
    tile_n: int | None = None
    kv_stage: int | None = None
    registers: Registers | None = None
    num_ctas: int | None = None
    schedule: str | None = None
    exp2_emulation: int | None = None
    warpgroup_order: str | None = None
    overlap: bool | None = None
    q_in_registers: bool | None = None
    across_tiles: bool | None = None
    recompute_s: bool | None = None
    rescale_threshold: float = 8.0
    lse: bool = True
    varlen: bool = False
    paged_kv: bool = False
    page_size: int | None = None
    sink: bool = False
    softcap: bool = False
    pack_gqa: bool = False
    split_kv: bool = False
    source: str = field(default="", compare=False)

    @property
    def auto_fields(self) -> tuple[str, ...]:
        """The fields that still say ``auto``."""
        names = AUTO_FIELDS + (SM90_FIELDS if self.arch == "sm_90a" else ())
        return tuple(name for name in names if getattr(self, name) is None)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that are on, in the order of the kernel ABI (`lse` is an output, not a feature)."""
        return tuple(name for name in FEATURE_FIELDS if getattr(self, name))

    def replace(self, **changes: Any) -> KernelSpec:
        """A copy with some fields changed; the plan resolves ``auto`` fields with it."""
        return dataclasses.replace(self, **changes)

    def canonical(self) -> dict[str, Any]:
        """The fields that identify the kernel, as JSON values.

        Fields of `OPTIONAL_FIELDS` are left out at their default, so that a feature that a later release adds does not
        change the identity of kernels without it. Raises SpecError while a field still says ``auto``: two spellings of
        one kernel must have one identity, and only the plan knows what ``auto`` became.
        """
        if self.auto_fields:
            names = ", ".join(self.auto_fields)
            raise SpecError([f"{self.source or 'spec'}: {names}: still auto; plan the kernel before asking for its id"])
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "source" or (f.name in OPTIONAL_FIELDS and value == f.default):
                continue
            out[f.name] = value._asdict() if isinstance(value, Registers) else value
        return out

    @classmethod
    def from_canonical(cls, data: dict[str, Any], source: str = "") -> KernelSpec:
        """The spec whose `canonical` form is `data`, e.g. from a bundle's kernel record."""
        known = {f.name for f in dataclasses.fields(cls)} - {"source"}
        unknown = sorted(set(data) - known)
        if unknown:
            raise SpecError(
                [f"{source or 'record'}: {unknown[0]}: not a field of a spec; the record is of a newer fmha-gen"]
            )
        values = dict(data)
        if isinstance(values.get("registers"), dict):
            values["registers"] = Registers(**values["registers"])
        try:
            return cls(**values, source=source)
        except TypeError as e:
            raise SpecError([f"{source or 'record'}: {e}; the record is damaged or was edited"]) from e

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON. JSON quotes every string, so that no two specs share an encoding."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @property
    def name(self) -> str:
        """The readable part of the id, e.g. ``fmha_fwd-sm100a-bf16-d128-full-q2``. Not unique on its own."""
        dims = f"d{self.head_dim_qk}" + ("" if self.head_dim_v == self.head_dim_qk else f"x{self.head_dim_v}")
        parts = [self.family, self.arch.replace("_", ""), self.dtype, dims, self.mask]
        parts.append(f"q{self.q_stage}" if self.q_stage else "qauto")
        if self.num_ctas not in (None, 1):
            parts.append(f"{self.num_ctas}cta")
        for feature in self.features:
            parts.append(f"paged{self.page_size or ''}" if feature == "paged_kv" else feature.replace("_", ""))
        return "-".join(parts if self.lse else [*parts, "nolse"])

    @property
    def id(self) -> str:
        """`name` plus eight hex digits of `digest`; needs a spec without ``auto``."""
        return f"{self.name}-{self.digest[:8]}"


AUTO_FIELDS = ("q_stage", "tile_m", "tile_n", "kv_stage", "registers", "num_ctas", "schedule", "exp2_emulation")
FEATURE_FIELDS = ("varlen", "paged_kv", "sink", "softcap", "pack_gqa", "split_kv")
SM90_FIELDS = ("warpgroup_order", "overlap", "q_in_registers", "across_tiles", "recompute_s")
OPTIONAL_FIELDS = ("lse", *FEATURE_FIELDS, "page_size", *SM90_FIELDS)
