"""What a launch computes, as named rules with constants: used by the plan, the launcher and the simulator alike.

A kernel's record names a rule and its constants; the problem and the device give the rest. Python integers throughout,
so nothing overflows, and no rule divides by a quantity that may be zero. Standard library only.

| rule | constants | gives |
|---|---|---|
| ``persistent`` | rows | min(multiprocessors, tiles) CTAs; every CTA strides over the tiles |
| ``one_per_tile`` | rows | one CTA per tile |
| ``heads_per_section`` | l2_bytes | how many (head, batch) pairs share the L2 cache at a time |

`rows` are the query rows of one tile (q_stage x tile_m). A grid is one-dimensional. Zero means: do not launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

from .errors import BundleError, ProblemError
from .manifest import Rule

T = TypeVar("T")

MAX_GRID = 2**31 - 1  # CUDA's limit of gridDim.x
ELEMENT_BYTES = {"bf16": 2, "fp16": 2}

# What FlashAttention-4's longest-first scheduler budgets for K and V; about 40 % of the L2 cache of a B200.
HEADS_PER_SECTION = Rule("heads_per_section", {"l2_bytes": 50 * 2**20})


class Sizes(Protocol):
    """What the rules read of a problem (`fmha_gen.runtime.Problem` is one)."""

    @property
    def dtype(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def num_heads_q(self) -> int: ...
    @property
    def num_heads_kv(self) -> int: ...
    @property
    def seqlen_q(self) -> int: ...
    @property
    def seqlen_k(self) -> int: ...
    @property
    def head_dim_qk(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...


def num_tiles(rows: int, problem: Sizes) -> int:
    """Query tiles of the whole problem; 0 when there are no queries."""
    return problem.batch * problem.num_heads_q * -(-problem.seqlen_q // rows)


def grid(rule: Rule, problem: Sizes, num_sms: int, override: bool = False) -> int:
    """CTAs to launch, gridDim.x. 0 means that there is nothing to compute and nothing may be launched.

    num_sms: multiprocessors to lay the grid out for. override: the caller chose that number, and gets at most as many
    CTAs whatever the rule (1: one CTA walks every tile). Every schedule strides by gridDim.x, so each value gives the
    same bits.

    Raises ProblemError for `num_sms` < 1 and for a grid beyond CUDA's limit; BundleError for an unknown rule.
    """
    return compile_grid(rule)(problem, num_sms, override)


def compile_grid(rule: Rule) -> Callable[[Sizes, int, bool], int]:
    """`grid` with the rule looked up and checked once. Raises BundleError for an unknown rule."""
    compute, constants = _lookup(_GRID_RULES, rule, "grid"), rule.constants

    def size_of(problem: Sizes, num_sms: int, override: bool = False) -> int:
        if num_sms < 1:
            raise ProblemError(
                f"grid: num_sms is {num_sms}; at least 1 is needed; pass the device's multiprocessor count"
            )
        size = compute(constants, problem, num_sms)
        if override:
            size = min(size, num_sms)
        if size > MAX_GRID:
            raise ProblemError(
                f"grid: rule {rule.name!r} gives {size} CTAs for batch {problem.batch} x {problem.num_heads_q} heads x "
                f"seqlen_q {problem.seqlen_q}; CUDA allows {MAX_GRID}; split the batch"
            )
        return size

    return size_of


def scalar(rule: Rule, problem: Sizes) -> int:
    """A 32-bit kernel argument that a rule computes, e.g. ``heads_per_section``. Raises BundleError: unknown rule."""
    return compile_scalar(rule)(problem)


def compile_scalar(rule: Rule) -> Callable[[Sizes], int]:
    """`scalar` with the rule looked up and checked once. Raises BundleError for an unknown rule."""
    return partial(_lookup(_SCALAR_RULES, rule, "scalar"), rule.constants)


def default_scalar_rule(param: str) -> Rule | None:
    """The rule that computes kernel parameter `param` where a record names none; None if no rule does."""
    return {"heads_per_section": HEADS_PER_SECTION}.get(param)


def heads_per_section(l2_bytes: int, problem: Sizes) -> int:
    """(head, batch) pairs whose K and V fit in `l2_bytes` together: a power of two, then cut to the pairs there are.

    The longest-first schedule walks one section of pairs after the other, so that their K and V stay in the L2 cache.
    At least 1, also for empty problems.
    """
    elem = ELEMENT_BYTES[problem.dtype]
    kv_bytes = problem.seqlen_k * (problem.head_dim_qk + problem.head_dim_v) * elem
    pairs = max(1, problem.num_heads_q * problem.batch)
    if kv_bytes == 0:
        return pairs
    fit = l2_bytes // kv_bytes
    return min(pairs, 1 << (fit.bit_length() - 1)) if fit >= 1 else 1


def _persistent(constants: Mapping[str, int], problem: Sizes, num_sms: int) -> int:
    return min(num_sms, num_tiles(constants["rows"], problem))


def _one_per_tile(constants: Mapping[str, int], problem: Sizes, num_sms: int) -> int:
    return num_tiles(constants["rows"], problem)


def _heads_per_section(constants: Mapping[str, int], problem: Sizes) -> int:
    return heads_per_section(constants["l2_bytes"], problem)


_GridRule = Callable[[Mapping[str, int], Sizes, int], int]
_ScalarRule = Callable[[Mapping[str, int], Sizes], int]
_GRID_RULES: dict[str, _GridRule] = {"persistent": _persistent, "one_per_tile": _one_per_tile}
_SCALAR_RULES: dict[str, _ScalarRule] = {"heads_per_section": _heads_per_section}
_CONSTANTS = {"persistent": ("rows",), "one_per_tile": ("rows",), "heads_per_section": ("l2_bytes",)}


def _lookup(table: dict[str, T], rule: Rule, kind: str) -> T:
    if rule.name not in table:
        raise BundleError(
            f"launch rule {rule.name!r}: not a {kind} rule of this fmha-gen, which has {', '.join(sorted(table))}; "
            f"the bundle is newer: install a newer fmha-gen"
        )
    for name in _CONSTANTS[rule.name]:
        value = rule.constants.get(name)
        if value is None or value < 1:
            raise BundleError(
                f"launch rule {rule.name!r}: constant {name} is {value}; it must be >= 1; the record is damaged"
            )
    return table[rule.name]
