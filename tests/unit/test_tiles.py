"""Which tiles the CTAs of an sm_90a kernel take: rendered functions and `fmha_gen/device/tiles.py` run on integers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fmha_gen
from fmha_gen.plan import make_plan
from fmha_gen.render import render
from fmha_gen.spec import KernelSpec

SPEC = KernelSpec("fmha_fwd", "sm_90a", "bf16", 128, 128, "causal", tile_m=128, tile_n=128, source="s.yaml:7")
ROWS = 128
WALKED = (
    "first_tile",
    "next_tile",
    "first_sorted_tile",
    "count_tiles",
    "tile_coordinates",
    "count_keys",
    "count_blocks",
    "count_unseen_blocks",
)
# m blocks, (heads, batch), grid
PROBLEMS = list(
    product(
        (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 32, 33, 64, 128),
        ((1, 1), (3, 1), (1, 5), (8, 2), (16, 4)),
        (1, 2, 3, 7, 64, 132),
    )
)


def plain_cutlass() -> dict[str, ModuleType]:
    """The few names of CuTe DSL that the walk uses, on Python integers."""
    cutlass: Any = ModuleType("cutlass")
    cute: Any = ModuleType("cutlass.cute")
    cute.jit = lambda f: f
    cutlass.cute, cutlass.Int32 = cute, int
    cutlass.min, cutlass.max = min, max
    cutlass.select_ = lambda condition, a, b: a if condition else b
    return {"cutlass": cutlass, "cutlass.cute": cute}


class Walk:
    """The walk of one schedule's kernel over a problem, CTA by CTA."""

    def __init__(self, schedule: str, monkeypatch: pytest.MonkeyPatch, spec: KernelSpec = SPEC) -> None:
        self.plan = make_plan(spec.replace(schedule=schedule))
        modules = plain_cutlass()
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        path = Path(fmha_gen.__file__).parent / "device/tiles.py"
        tiles: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), tiles)
        self.cta, self.grid = 0, 0
        modules["cutlass.cute"].arch = SimpleNamespace(block_idx=lambda: (self.cta, 0, 0))  # type: ignore[attr-defined]
        self.names: dict[str, Any] = {
            "cutlass": modules["cutlass"],
            "cute": modules["cutlass.cute"],
            "Int32": int,
            "ptx": SimpleNamespace(grid_size=lambda: self.grid),
            "tiles": SimpleNamespace(**tiles),
            "ROWS_PER_TILE": self.plan.tiles.rows_per_tile,
            "GROUP_ROWS": 64,
            "TILE_N": self.plan.tiles.tile_n,
        }
        module = ast.parse(render(self.plan).text)
        module.body = [f for f in module.body if isinstance(f, ast.FunctionDef) and f.name in WALKED]
        exec(compile(module, f"{schedule} kernel", "exec"), self.names)

    def tiles(self, problem: SimpleNamespace, grid: int) -> list[list[tuple[int, int, int]]]:
        """(m_block, head, batch) of the tiles that each CTA takes, in order."""
        out = []
        self.grid = grid
        for self.cta in range(grid):
            mine, tile, num_tiles = [], self.names["first_tile"](problem), self.names["count_tiles"](problem)
            while tile < num_tiles:
                assert len(mine) < num_tiles, f"CTA {self.cta} of {grid} takes more than all {num_tiles} tiles"
                mine.append(self.names["tile_coordinates"](tile, problem))
                tile = self.names["next_tile"](tile, problem)
            out.append(mine)
        return out

    def longest(self, problem: SimpleNamespace, grid: int) -> float:
        """Key blocks of the CTA with most, over the average."""
        blocks: Callable[[int, Any], int] = self.names["count_blocks"]
        work = [sum(blocks(m, problem) for m, _, _ in mine) for mine in self.tiles(problem, grid)]
        return max(work) * grid / sum(work)


def problem_of(m_blocks: int, heads: int, batch: int, tail: int = 0) -> SimpleNamespace:
    rows = m_blocks * ROWS - tail
    return SimpleNamespace(seqlen_q=rows, seqlen_k=rows, num_heads_q=heads, batch=batch)


def test_balanced_takes_every_tile_once(monkeypatch):
    """450 problems and grids, among them one CTA, more CTAs than tiles, and heads of an odd number of tiles."""
    walk = Walk("balanced", monkeypatch)
    assert len(PROBLEMS) == 450
    for m_blocks, (heads, batch), grid in PROBLEMS:
        problem = problem_of(m_blocks, heads, batch, tail=m_blocks % 3)
        taken = [t for mine in walk.tiles(problem, grid) for t in mine]
        expected = set(product(range(m_blocks), range(heads), range(batch)))
        assert len(taken) == len(expected) and set(taken) == expected, (m_blocks, heads, batch, grid)


def test_balanced_is_never_less_even_than_paired(monkeypatch):
    balanced, paired = Walk("balanced", monkeypatch), Walk("paired", monkeypatch)
    for m_blocks, (heads, batch), grid in PROBLEMS:
        problem = problem_of(m_blocks, heads, batch)
        b, p = balanced.longest(problem, grid), paired.longest(problem, grid)
        assert b <= p, (m_blocks, heads, batch, grid, b, p)


@pytest.mark.parametrize(("m_blocks", "heads", "batch"), [(8, 16, 16), (32, 16, 4), (128, 16, 1), (32, 8, 4)])
def test_on_132_sms_balanced_leaves_little(m_blocks, heads, batch, monkeypatch):
    """The measured problems (`docs/sm90-tuning.md`): 1,024 pairs or 512 on 132 CTAs."""
    problem = problem_of(m_blocks, heads, batch)
    balanced = Walk("balanced", monkeypatch).longest(problem, 132)
    paired = Walk("paired", monkeypatch).longest(problem, 132)
    assert balanced < 1.03 < paired


def test_balanced_starts_in_pairs_and_ends_by_size(monkeypatch):
    """Three CTAs, four heads of four tiles: a round of three pairs, then the inner pair of head 1 and heads 2 and 3.

    Those by size: 3 of heads 2 and 3; 2 of 1, 2, 3; 1 of 3, 2, 1; 0 of 3 and 2.
    """
    assert Walk("balanced", monkeypatch).tiles(problem_of(4, 4, 1), 3) == [
        [(3, 0, 0), (0, 0, 0), (3, 2, 0), (1, 3, 0), (1, 2, 0)],
        [(2, 0, 0), (1, 0, 0), (3, 3, 0), (2, 3, 0), (1, 1, 0)],
        [(3, 1, 0), (0, 1, 0), (2, 1, 0), (2, 2, 0), (0, 3, 0), (0, 2, 0)],
    ]


@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 64), (128, 48), (192, 64), (192, 96)])
def test_unseen_blocks_are_those_whose_keys_no_row_of_the_warpgroup_sees(tile_m, tile_n, monkeypatch):
    """Key by key, wherever the diagonal falls; at least one block stays, and never more go than the plan proved."""
    spec = SPEC.replace(tile_m=tile_m, tile_n=tile_n, across_tiles=True)
    walk = Walk("balanced", monkeypatch, spec)
    assert walk.plan.wgmma is not None
    most = walk.plan.wgmma.unseen_blocks
    seen_most = [0] * len(most)
    for rows, keys in product((1, 63, 64, 65, 128, 200, 384, 500), (1, 40, 63, 64, 65, 129, 250, 384, 500, 555)):
        problem = SimpleNamespace(seqlen_q=rows, seqlen_k=keys, num_heads_q=1, batch=1)
        for m_block, group in product(range(-(-rows // tile_m)), range(len(most))):
            blocks = walk.names["count_blocks"](m_block, problem)
            if blocks == 0:
                continue
            first = m_block * tile_m + group * 64
            mine = range(min(first, rows - 1), min(first + 64, rows))  # rows past the end go with the last one
            hidden = [all(n * tile_n > row + keys - rows for row in mine) for n in range(blocks)]
            skip = walk.names["count_unseen_blocks"](m_block, group, problem)
            assert skip == min(sum(hidden), blocks - 1), (rows, keys, m_block, group)
            assert hidden == sorted(hidden) and skip <= most[group]
            seen_most[group] = max(seen_most[group], skip)
    assert tuple(seen_most) == most
