"""What is timed: problems of a fixed number of tokens, and the arithmetic of their work. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ProblemError, SelectionError
from ..manifest import Manifest
from ..runtime import Device, Problem, select
from ..runtime.select import matching, runs_on

HIDDEN = 2048  # num_heads_q * head_dim_v of the default problems, as attention benchmarks have it
ITEM_BYTES = 2


@dataclass(frozen=True)
class BenchOptions:
    """Which problems, and how often. None: what the bundle's kernels serve.

    tokens: batch * seqlen, so that every length has about the same amount of data. heads: default HIDDEN / head_dim_v.
    only: a glob over kernel ids. rounds: timed samples of each contender, of which the median counts.
    """

    dtype: str | None = None
    head_dims: tuple[int, ...] | None = None
    masks: tuple[str, ...] = ("full", "causal")
    seqlens: tuple[int, ...] = (1024, 4096, 16384)
    tokens: int = 16384
    heads: int | None = None
    heads_kv: int | None = None
    only: str | None = None
    rounds: int = 20
    peers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Case:
    """One timed problem: self-attention of `batch` sequences. kernel: what the launcher takes for it."""

    problem: Problem
    kernel: str

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """(batch, seqlen, heads, head_dim) of q, k, v and out."""
        p = self.problem
        return {
            "q": (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_qk),
            "k": (p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim_qk),
            "v": (p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim_v),
            "out": (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v),
        }

    def bytes_of(self, name: str) -> int:
        batch, seqlen, heads, head_dim = self.shapes[name]
        return batch * seqlen * heads * head_dim * ITEM_BYTES

    @property
    def flop(self) -> float:
        """Two matrix products of what is visible: ``2 sq sk (d_qk + d_v)`` per head, half of it for causal."""
        p = self.problem
        full = 2.0 * p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k * (p.head_dim_qk + p.head_dim_v)
        return full / 2 if p.mask == "causal" else full

    @property
    def shape(self) -> str:
        """``d128``, ``d192x128``, as kernel ids write it."""
        p = self.problem
        return f"d{p.head_dim_qk}" if p.head_dim_qk == p.head_dim_v else f"d{p.head_dim_qk}x{p.head_dim_v}"

    def num_sets(self, l2_bytes: int) -> int:
        """Sets of inputs to rotate, so that a launch finds nothing of its own inputs in an L2 of that size.

        Between two uses of a set the others bring in at least twice the cache; never fewer than two sets.
        """
        per_set = sum(self.bytes_of(name) for name in ("q", "k", "v"))
        return max(2, 1 + -(-2 * l2_bytes // per_set))


def cases_of(manifest: Manifest, device: Device, options: BenchOptions) -> list[Case]:
    """The problems that `options` name and the bundle serves on `device`, grouped by mask, head dims, length.

    Raises ProblemError for options that are wrong in themselves, SelectionError when the bundle serves none of them.
    """
    _check(options)
    usable = [e for e in matching(manifest.kernels, options.only) if runs_on(e, device)]
    dtypes = sorted({e.serves.dtype for e in usable})
    dtype = options.dtype or (dtypes[0] if dtypes else "bf16")
    served = [e.serves for e in usable if e.serves.dtype == dtype and not e.serves.features]
    dims = sorted({(s.head_dim_qk, s.head_dim_v) for s in served})
    if options.head_dims is not None:
        dims = [d for d in dims if d[0] in options.head_dims]
    cases = []
    for mask in options.masks:
        for dim in dims:
            if any(mask in s.masks and (s.head_dim_qk, s.head_dim_v) == dim for s in served):
                cases += [_case(manifest, device, options, dtype, mask, dim, n) for n in options.seqlens]
    if not cases:
        held = ", ".join(sorted({e.arch for e in manifest.kernels})) or "nothing"
        raise SelectionError(
            f"bench: no kernel of bundle {manifest.name} {manifest.version} is to be timed on {device.describe()}: it "
            f"holds {held}, and the options ask for {dtype}, {' and '.join(options.masks)}"
            + (f", head_dim {list(options.head_dims)}" if options.head_dims else "")
            + (f", {options.only}" if options.only else "")
            + "; build for this device, or ask for less"
        )
    return cases


def _case(
    manifest: Manifest, device: Device, options: BenchOptions, dtype: str, mask: str, dims: tuple[int, int], seqlen: int
) -> Case:
    heads = options.heads or max(1, HIDDEN // dims[1])
    problem = Problem(
        dtype=dtype, batch=max(1, options.tokens // seqlen), seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads,
        num_heads_kv=options.heads_kv or heads, head_dim_qk=dims[0], head_dim_v=dims[1], mask=mask,
    )  # fmt: skip
    return Case(problem, select(manifest, problem, device, options.only).id)


def _check(options: BenchOptions) -> None:
    for name, values in (("seqlen", options.seqlens), ("tokens", (options.tokens,)), ("rounds", (options.rounds,))):
        for value in values:
            if value < 1:
                raise ProblemError(f"bench: {name}: {value}; it must be at least 1")
    for mask in options.masks:
        if mask not in ("full", "causal"):
            raise ProblemError(f"bench: mask: {mask!r}; it is one of full, causal")


def total_bytes(cases: Sequence[Case], l2_bytes: int) -> dict[str, int]:
    """Device memory that the largest case takes, by tensor; out is not rotated."""
    sizes = dict.fromkeys(("q", "k", "v", "out"), 0)
    for case in cases:
        sets = case.num_sets(l2_bytes)
        for name in sizes:
            sizes[name] = max(sizes[name], case.bytes_of(name) * (1 if name == "out" else sets))
    return sizes
