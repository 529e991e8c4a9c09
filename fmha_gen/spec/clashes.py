"""Fields of one variant that contradict each other: one sentence each, naming the two."""

from __future__ import annotations

from dataclasses import dataclass

from .model import SM90_FIELDS, KernelSpec


@dataclass(frozen=True, slots=True)
class Clash:
    """fields: the two names. what: the sentence. fix: what to write."""

    fields: tuple[str, str]
    what: str
    fix: str


def clashes(spec: KernelSpec) -> list[Clash]:
    """Every contradiction within `spec`. What does not fit a budget is the plan's to find, with its arithmetic."""
    out = []
    if spec.paged_kv and spec.page_size is None:
        out.append(Clash(("paged_kv", "page_size"), "paged_kv=true without a page_size", "give page_size"))
    if spec.page_size is not None and not spec.paged_kv:
        what = f"page_size={spec.page_size} with paged_kv=false"
        out.append(Clash(("page_size", "paged_kv"), what, "set paged_kv: true or remove page_size"))
    if spec.split_kv and not spec.lse:
        what = "split_kv=true with lse=false: partial results are merged by their log-sum-exp"
        out.append(Clash(("split_kv", "lse"), what, "set lse: true"))
    for name in SM90_FIELDS:
        if spec.arch != "sm_90a" and getattr(spec, name) is not None:
            what = f"{name}={str(getattr(spec, name)).lower()} with arch {spec.arch}: its warps have no such choice"
            out.append(Clash((name, "archs"), what, f"remove {name}, or give sm_90a an entry of its own"))
    if spec.exp2_emulation is not None and spec.tile_n is not None and spec.exp2_emulation > spec.tile_n:
        what = (
            f"exp2_emulation={spec.exp2_emulation} with tile.n={spec.tile_n}: a row of a KV block has only "
            f"{spec.tile_n} exponentials"
        )
        out.append(Clash(("exp2_emulation", "tile"), what, f"use exp2_emulation <= {spec.tile_n}"))
    return out
