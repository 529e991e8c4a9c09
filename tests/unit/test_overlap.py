"""Outputs that share memory with another tensor are refused, on every way to a launch; slices that share none pass."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest

from fmha_gen.errors import ProblemError
from fmha_gen.runtime import Bundle, TensorArg
from fmha_gen.runtime.cuda import CudaDriver
from fmha_gen.runtime.driver import ADDRESS_ORDER
from fmha_gen.runtime.overlap import _folded, _meet, _rows, clash, spans_bytes
from fmha_gen.runtime.problem import describe_launch
from tests.launcher_fixtures import FakeCuda, make_record, write_bundle
from tests.unit.test_recipe import torch_like

BASE = 0x7F0000000000
B, S, H, D = 2, 300, 4, 128


def bytes_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> set[int]:
    """Every byte of a small tensor, counted one by one."""
    found = set()
    for index in itertools.product(*map(range, shape)):
        start = address + item * sum(i * s for i, s in zip(index, strides, strict=True))
        found |= set(range(start, start + item))
    return found


def random_layout(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Small tensors as frameworks give them, and ones whose steps do not nest."""
    shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(3)) + (rng.choice((2, 4)),)
    if rng.random() < 0.7:
        steps = [1]
        for n in reversed(shape[1:]):
            steps.append(steps[-1] * n * rng.choice((1, 1, 2, 3)) + rng.choice((0, 0, 2)))
        strides = list(reversed(steps[1:])) if rng.random() < 0.5 else rng.sample(steps[1:], 3)
        return shape, (*strides, 1)
    return shape, (*(rng.randrange(0, 30) for _ in range(3)), 1)


def test_what_meets_is_what_a_count_of_bytes_says() -> None:
    rng = random.Random(3)
    met = 0
    for _ in range(3000):
        (shape, strides), (other, steps) = random_layout(rng), random_layout(rng)
        item, distance = rng.choice((2, 4)), 2 * rng.randrange(-60, 60)
        a, b = _rows(shape, strides, item), _rows(other, steps, 2)
        assert a is not None and b is not None
        want = bool(bytes_of(distance, shape, strides, item) & bytes_of(0, other, steps, 2))
        assert _meet(distance, a, b) == want, (distance, shape, strides, item, other, steps)
        met += want
    assert 500 < met < 2500


def test_what_is_written_twice_is_what_a_count_of_elements_says() -> None:
    rng = random.Random(4)
    folded = 0
    for _ in range(2000):
        shape, strides = random_layout(rng)
        if any(n > 1 and not s for n, s in zip(shape, strides, strict=True)):
            continue  # a stride of zero is refused before
        places = [sum(i * s for i, s in zip(x, strides, strict=True)) for x in itertools.product(*map(range, shape))]
        want = len(set(places)) < len(places)
        assert _folded(shape, strides, 2) == want, (shape, strides)
        folded += want
    assert folded > 200


def separate() -> dict[str, TensorArg]:
    shapes = dict.fromkeys(("q", "k", "v", "out"), (B, S, H, D)) | {"lse": (B, H, S)}
    return {
        n: TensorArg.contiguous(BASE + (i << 24), s, "float32" if n == "lse" else "bf16", 0)
        for i, (n, s) in enumerate(shapes.items())
    }


def slices(heads: tuple[int, ...] = (H, H, H, H), gap: int = 0) -> dict[str, TensorArg]:
    """q, k, v and out as heads of one row of a fused buffer (batch, seqlen, heads of all, head_dim)."""
    row = (sum(heads) + gap) * D
    named, at = {}, BASE
    for name, n in zip(("q", "k", "v", "out"), heads, strict=True):
        named[name] = TensorArg(at, (B, S, n, D), (S * row, row, D, 1), "bf16", 0)
        at += n * D * 2
    return named


def at(t: TensorArg, by: int) -> TensorArg:
    return dataclasses.replace(t, address=t.address + by)


Q = separate()["q"]
SIZE = 2 * B * S * H * D
FUSED, GQA = slices(), slices((4, 2, 2, 4), gap=3)
TOKENS = TensorArg(BASE, (B, H, S), (H * S * 2, 1, H * 2), "float32", 0)  # lse beside something else of each token
LEGAL: dict[str, dict[str, Any]] = {
    "separate": {},
    "slices of a fused buffer": FUSED,
    "slices of a fused buffer of grouped heads, padded": GQA,
    "out ends where q starts": {"out": at(Q, -SIZE)},
    "out starts where q ends": {"out": at(Q, SIZE)},
    "out in every second row of q's buffer": {
        "q": dataclasses.replace(Q, strides=(S * 2 * H * D, 2 * H * D, D, 1)),
        "out": dataclasses.replace(at(Q, H * D * 2), strides=(S * 2 * H * D, 2 * H * D, D, 1)),
    },
    "out in q's heads, which are laid out first": {
        "q": dataclasses.replace(Q, strides=(2 * H * S * D, D, 2 * S * D, 1)),
        "out": dataclasses.replace(at(Q, S * D * 2), strides=(2 * H * S * D, D, 2 * S * D, 1)),
    },
    "out between the rows of an expanded k": {
        "k": dataclasses.replace(Q, shape=(B, S, H, D), strides=(0, 2 * D, 0, 1)),
        "out": TensorArg(BASE + 2 * D, (B, S, H, D), (4 * S * H * D, 2 * H * D, 2 * D, 1), "bf16", 0),
        "q": at(Q, 1 << 30),
    },
    "lse between out's rows": {
        "out": TensorArg(BASE, (B, S, H, D), (S * H * (D + 8), H * (D + 8), D + 8, 1), "bf16", 0),
        "lse": TensorArg(BASE + 2 * D, (B, H, S), (S * H * 68, 68, H * 68), "float32", 0),
        "q": at(Q, 1 << 30),
    },
    "size-1 axes with odd strides": {
        "q": TensorArg(BASE, (1, 1, 1, D), (7, 2**40, 0, 1), "bf16", 0),
        "k": TensorArg(BASE + 256, (1, 1, 1, D), (2**40, 1, 1, 1), "bf16", 0),
        "v": TensorArg(BASE + 512, (1, 1, 1, D), (0, 0, 0, 1), "bf16", 0),
        "out": TensorArg(BASE + 768, (1, 1, 1, D), (3, 2**50, 9, 1), "bf16", 0),
        "lse": TensorArg(BASE + 1024, (1, 1, 1), (2**50, 2, 3), "float32", 0),
    },
    "no keys, anywhere": {n: TensorArg.contiguous(BASE + (3 << 24), (B, 0, H, D), "bf16", 0) for n in ("k", "v")},
}  # fmt: skip
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "out is q": ({"out": Q}, "out", "q"),
    "out is v": ({"out": separate()["v"]}, "out", "v"),
    "out starts in the last 16 bytes of k": ({"out": at(separate()["k"], SIZE - 16)}, "out", "k"),
    "out ends in the first 16 bytes of v": ({"out": at(separate()["v"], 16 - SIZE)}, "out", "v"),
    "one head off in a fused buffer": (FUSED | {"out": at(FUSED["out"], -D * 2)}, "out", "v"),
    "one head off of grouped heads": (GQA | {"out": at(GQA["out"], -D * 2)}, "out", "v"),
    "8 elements off in a fused buffer": (FUSED | {"out": at(FUSED["out"], 16)}, "out", "q"),
    "one row off": (
        {"out": dataclasses.replace(Q, strides=(S * 2 * H * D, 2 * H * D, D, 1), address=Q.address + H * D * 2)},
        "out", "q",
    ),
    "lse in out": ({"lse": at(separate()["lse"], -(1 << 24))}, "lse", "out"),
    "lse in q": ({"lse": dataclasses.replace(separate()["lse"], address=BASE + SIZE - 4)}, "lse", "q"),
    "the last lse in k": ({"lse": at(separate()["lse"], -(3 << 24) - 4 * (B * H * S - 1))}, "lse", "k"),
    "lse among out's rows": (
        {"lse": TensorArg(BASE + (3 << 24) + 2 * D - 4, (B, H, S), (S * H * 64, 64, H * 64), "float32", 0)},
        "lse", "out",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels = [make_record(mask=mask, q_stage=stage) for mask in ("full", "causal") for stage in (1, 2)]
    return write_bundle(tmp_path_factory.mktemp("bundle"), kernels)[0]


def ways(path: Path, named: dict[str, Any], elsewhere: dict[str, Any]) -> dict[str, Any]:
    """Every way that leads to a launch: in full, by a recipe of the kind, and by addresses new to a geometry."""
    fresh, kind, geometry = (Bundle.open(path, CudaDriver(FakeCuda())) for _ in range(3))
    kind.prepare(**torch_like(separate()))
    geometry.attention(**torch_like(elsewhere), stream=0)
    return {
        "in full": lambda: fresh.prepare(**named),
        "in full, torch": lambda: fresh.attention(**torch_like(named), stream=0),
        "recipe": lambda: kind.prepare(**torch_like(named)),
        "new addresses": lambda: geometry.attention(**torch_like(named), stream=0),
        "new addresses again": lambda: geometry.attention(**torch_like(named), stream=0),
    }


def apart(named: dict[str, Any]) -> dict[str, Any]:
    """The same geometry, each tensor at a place of its own."""
    return {n: dataclasses.replace(t, address=(i + 1) << 40) for i, (n, t) in enumerate(named.items())}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_an_output_that_shares_memory_is_refused_by_name_on_every_way(path: Path, what: str) -> None:
    change, output, other = WRONG[what]
    named = separate() | change
    words = set()
    for way, launch in ways(path, named, apart(named)).items():
        with pytest.raises(ProblemError, match=f"^{output}: shares memory with {other} ") as e:
            launch()
            pytest.fail(way)
        words.add(str(e.value))
    assert len(words) == 1 and hex(named[output].address) in words.pop()


@pytest.mark.parametrize("what", sorted(LEGAL))
def test_tensors_that_share_no_element_are_launched_on_every_way(path: Path, what: str) -> None:
    named = separate() | LEGAL[what]
    for launch in ways(path, named, apart(named)).values():
        launch()


def test_an_output_that_writes_an_element_twice_is_refused(path: Path) -> None:
    for name, strides in (("out", (S * H * D, D, D, 1)), ("lse", (H * S, S // 2, 1))):
        named = separate()
        named[name] = dataclasses.replace(named[name], strides=strides)
        for launch in ways(path, named, separate()).values():
            with pytest.raises(ProblemError, match=f"^{name}: strides .* must not write one element twice"):
                launch()


def test_inputs_may_share_memory() -> None:
    """K and V of one buffer, q that is k: nothing is written there."""
    describe_launch(**(separate() | {"k": Q, "v": at(Q, 256)}))


def test_a_layout_that_would_take_long_is_let_pass_soon() -> None:
    """Only what surely overlaps is refused; the answer never takes more than a moment."""
    rng = random.Random(5)
    for _ in range(50):
        shapes = ((7, 4001, 13, D),) * 4 + (None,)
        strides = (*((8 * rng.randrange(1, 2**30), 8 * rng.randrange(1, 2**20), 8 * rng.randrange(1, 2**24), 1)
                     for _ in range(4)), None)  # fmt: skip
        addresses = tuple(BASE + 16 * rng.randrange(2**20) for _ in ADDRESS_ORDER)
        start = time.perf_counter()
        clash(addresses, shapes, strides, spans_bytes(shapes, strides))
        assert time.perf_counter() - start < 0.25
