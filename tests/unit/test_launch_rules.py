"""Launch rules against hand-derived numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fmha_gen import launch_rules
from fmha_gen.errors import BundleError, ProblemError
from fmha_gen.manifest import Rule


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    seqlen_q: int = 300
    seqlen_k: int = 4096
    num_heads_q: int = 8
    num_heads_kv: int = 2
    head_dim_qk: int = 128
    head_dim_v: int = 128
    dtype: str = "bf16"


PERSISTENT = Rule("persistent", {"rows": 256})
ONE_PER_TILE = Rule("one_per_tile", {"rows": 128})


def test_grid_counts_tiles_of_all_heads_and_batches() -> None:
    # 300 rows: 2 tiles of 256, 3 tiles of 128; 16 (head, batch) pairs
    assert launch_rules.grid(PERSISTENT, Sizes(), num_sms=148) == 32
    assert launch_rules.grid(ONE_PER_TILE, Sizes(), num_sms=148) == 48
    assert launch_rules.grid(PERSISTENT, Sizes(seqlen_q=256), num_sms=148) == 16
    assert launch_rules.grid(PERSISTENT, Sizes(seqlen_q=257), num_sms=148) == 32


@pytest.mark.parametrize(("num_sms", "expected"), [(1, 1), (7, 7), (31, 31), (32, 32), (148, 32), (1000, 32)])
def test_r11_grid_override(num_sms: int, expected: int) -> None:
    """R11: any multiprocessor count lays out a legal grid, never more CTAs than tiles."""
    assert launch_rules.grid(PERSISTENT, Sizes(), num_sms) == expected
    assert launch_rules.grid(ONE_PER_TILE, Sizes(), num_sms) == 48


@pytest.mark.parametrize(("num_sms", "expected"), [(1, 1), (7, 7), (148, 48), (1000, 48)])
def test_r11_an_override_bounds_the_grid_of_every_rule(num_sms: int, expected: int) -> None:
    assert launch_rules.grid(ONE_PER_TILE, Sizes(), num_sms, override=True) == expected
    assert launch_rules.grid(PERSISTENT, Sizes(), num_sms, override=True) == min(expected, 32)
    assert launch_rules.grid(ONE_PER_TILE, Sizes(batch=0), num_sms, override=True) == 0


@pytest.mark.parametrize("num_sms", [0, -1])
def test_r11_no_multiprocessors_is_refused(num_sms: int) -> None:
    """R11: a count that was queried as 0 in a spawned worker must not become an empty grid."""
    with pytest.raises(ProblemError, match=f"num_sms is {num_sms}"):
        launch_rules.grid(PERSISTENT, Sizes(), num_sms)


@pytest.mark.parametrize("sizes", [Sizes(batch=2, seqlen_q=0), Sizes(batch=0, seqlen_q=64)])
@pytest.mark.parametrize("rule", [PERSISTENT, ONE_PER_TILE])
def test_l09_no_queries_is_no_launch(sizes: Sizes, rule: Rule) -> None:
    """L09: nothing divides by the number of tiles."""
    assert launch_rules.grid(rule, sizes, num_sms=148) == 0
    assert launch_rules.scalar(launch_rules.HEADS_PER_SECTION, sizes) >= 1


def test_grid_beyond_cuda_limit_is_refused_with_the_arithmetic() -> None:
    huge = Sizes(batch=2**20, num_heads_q=128, seqlen_q=128 * 32)
    assert launch_rules.num_tiles(128, huge) == 2**32
    with pytest.raises(ProblemError, match="4294967296 CTAs"):
        launch_rules.grid(ONE_PER_TILE, huge, num_sms=148)
    assert launch_rules.grid(PERSISTENT, huge, num_sms=148) == 148


def test_heads_per_section_by_hand() -> None:
    # 4096 keys x 256 x 2 B = 2 MiB of K and V per pair; 50 MiB hold 25 -> 16
    assert launch_rules.scalar(launch_rules.HEADS_PER_SECTION, Sizes()) == 16
    assert launch_rules.scalar(launch_rules.HEADS_PER_SECTION, Sizes(batch=1)) == 8  # only 8 pairs
    assert launch_rules.scalar(launch_rules.HEADS_PER_SECTION, Sizes(batch=64)) == 16
    # 128 Ki keys: 64 MiB, more than the budget
    assert launch_rules.scalar(launch_rules.HEADS_PER_SECTION, Sizes(seqlen_k=131072)) == 1
    assert launch_rules.scalar(launch_rules.HEADS_PER_SECTION, Sizes(seqlen_k=0)) == 16
    # 2^31 - 1 keys: the bytes need more than 32 bits
    assert launch_rules.scalar(launch_rules.HEADS_PER_SECTION, Sizes(seqlen_k=2**31 - 1)) == 1


def test_heads_per_section_exact_fit() -> None:
    one_pair = 4096 * 256 * 2
    assert launch_rules.heads_per_section(one_pair, Sizes()) == 1
    assert launch_rules.heads_per_section(one_pair - 1, Sizes()) == 1
    assert launch_rules.heads_per_section(2 * one_pair, Sizes()) == 2
    assert launch_rules.heads_per_section(4 * one_pair - 1, Sizes()) == 2


def test_unknown_rule_and_damaged_constants_are_refused() -> None:
    with pytest.raises(BundleError, match="'stream_k': not a grid rule.*one_per_tile, persistent"):
        launch_rules.grid(Rule("stream_k", {}), Sizes(), 148)
    with pytest.raises(BundleError, match="constant rows is None"):
        launch_rules.grid(Rule("persistent", {}), Sizes(), 148)
    with pytest.raises(BundleError, match="constant rows is 0"):
        launch_rules.grid(Rule("persistent", {"rows": 0}), Sizes(), 148)
    with pytest.raises(BundleError, match="not a scalar rule"):
        launch_rules.scalar(PERSISTENT, Sizes())
