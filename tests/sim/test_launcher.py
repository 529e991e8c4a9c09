"""The launcher with the simulator behind it: the probe kernel of tests/device shows that every argument arrives.

The same kernel and expectations run on real GPUs in tests/device; here strides and addresses go further. Case ids refer
to public reports.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmha_gen.errors import ProblemError, SimError
from fmha_gen.runtime import Bundle, TensorArg
from fmha_gen.sim.driver import SimDriver

pytestmark = [pytest.mark.sim, pytest.mark.compile]
CANARY = 0x4442  # 777 in bf16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cutlass", reason="the CuTe-DSL is not installed")
    from tests.device.probe_bundle import build

    return build(tmp_path_factory.mktemp("probe"), "sm_100a")


class World:
    """Placed tensors of one launch: numpy views beside what the launcher sees."""

    def __init__(self, path: Path, **driver: Any) -> None:
        self.driver = SimDriver(**driver)
        self.bundle = Bundle.open(path, self.driver)
        self.rng = np.random.default_rng(0)

    def place(self, name: str, *shape: int) -> tuple[np.ndarray, TensorArg]:
        values = self.rng.integers(0, 0x3F80, shape, np.uint16)  # finite bf16
        if name == "out":
            values[...] = CANARY
        return values, self.driver.place(name, values, "bf16")


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    ratio = q.shape[2] // k.shape[2]
    out = np.zeros(q.shape, np.uint16)
    rows = min(q.shape[1], k.shape[1])
    for h in range(q.shape[2]):
        if h % 3 == 0:
            out[:, :, h] = q[:, :, h]
        else:
            out[:, :rows, h] = (k if h % 3 == 1 else v)[:, :rows, h // ratio]
    return out


def expected_lse(q: np.ndarray, seqlen_k: int, scale: float) -> np.ndarray:
    scale_log2 = np.float64(np.float32(scale * math.log2(math.e)))
    rows = (np.arange(q.shape[1]) * scale_log2 + seqlen_k).astype(np.float32)
    return np.broadcast_to(rows, (q.shape[0], q.shape[2], q.shape[1]))


@pytest.mark.parametrize(("sq", "sk", "heads", "heads_kv"), [(1, 1, 3, 3), (129, 64, 6, 2), (70, 300, 7, 1)])
def test_every_argument_arrives(path: Path, sq: int, sk: int, heads: int, heads_kv: int) -> None:
    world = World(path)
    q, qt = world.place("q", 2, sq, heads, 128)
    (k, kt), (v, vt) = (world.place(name, 2, sk, heads_kv, 128) for name in "kv")
    out, out_t = world.place("out", 2, sq, heads, 128)
    lse = np.full((2, heads, sq), np.nan, np.float32)
    world.bundle.attention(qt, kt, vt, out_t, lse=world.driver.place("lse", lse), softmax_scale=0.5)
    assert np.array_equal(out, expected(q, k, v))
    assert np.array_equal(lse, expected_lse(q, sk, 0.5))


@pytest.mark.parametrize(("num_sms", "grid"), [(1, 1), (7, 7), (148, 18), (1000, 18)])
def test_r11_any_grid_gives_the_same(path: Path, num_sms: int, grid: int) -> None:
    world = World(path)
    (q, qt), (k, kt), (out, out_t) = (
        world.place("q", 2, 300, 3, 128), world.place("k", 2, 300, 1, 128), world.place("out", 2, 300, 3, 128)
    )  # fmt: skip
    prepared = world.bundle.prepare(qt, kt, kt, out_t, num_sms=num_sms)
    assert prepared.packed is not None and prepared.packed.grid == (grid, 1, 1)
    prepared(0)
    assert np.array_equal(out, expected(q, k, k))


def test_t02_l05_each_tensor_walks_its_own_strides(path: Path) -> None:
    """T02, L05: fused QKV, every second row, heads before rows, padded LSE; nothing beside the outputs is written."""
    world = World(path)
    qkv, qkv_t = world.place("q", 2, 140, 9, 128)
    q, q_t = qkv[:, :, :3], dataclasses.replace(qkv_t, shape=(2, 140, 3, 128))
    k_rows, k_t = world.place("k", 2, 280, 3, 128)
    k, k_t = k_rows[:, ::2], dataclasses.replace(k_t, shape=(2, 140, 3, 128), strides=(280 * 384, 2 * 384, 128, 1))
    v_heads, v_t = world.place("v", 2, 3, 140, 128)
    v, v_t = (
        v_heads.transpose(0, 2, 1, 3),
        dataclasses.replace(v_t, shape=(2, 140, 3, 128), strides=(53760, 128, 17920, 1)),
    )
    room, room_t = world.place("out", 2, 3, 150, 136)
    out_t = dataclasses.replace(room_t, shape=(2, 140, 3, 128), strides=(3 * 150 * 136, 136, 150 * 136, 1))
    lse_room = np.full((2, 3, 141, 2), -1, np.float32)
    lse_t = world.driver.place("lse", lse_room)
    lse_t = dataclasses.replace(lse_t, shape=(2, 3, 140), strides=(3 * 282, 282, 2))
    world.bundle.attention(q_t, k_t, v_t, out_t, lse=lse_t, softmax_scale=0.25)
    assert np.array_equal(room[:, :, :140, :128].transpose(0, 2, 1, 3), expected(q, k, v))
    assert (room[:, :, 140:] == CANARY).all() and (room[..., 128:] == CANARY).all()
    assert np.array_equal(lse_room[:, :, :140, 0], expected_lse(q, 140, 0.25))
    assert (lse_room[..., 1] == -1).all() and (lse_room[:, :, 140] == -1).all()


@pytest.mark.parametrize("odd", [0, 1, 7, 2**40])
def test_t04_axes_of_one_element_take_any_stride(path: Path, odd: int) -> None:
    world = World(path)
    (q, qt), (out, out_t) = world.place("q", 1, 1, 1, 128), world.place("out", 1, 1, 1, 128)
    qt, out_t = (dataclasses.replace(t, strides=(odd, odd, odd, 1)) for t in (qt, out_t))
    world.bundle.attention(qt, qt, qt, out_t)
    assert np.array_equal(out, q)


def test_expanded_heads(path: Path) -> None:
    world = World(path)
    (q, qt), (k, kt), (out, out_t) = (
        world.place("q", 2, 20, 6, 128), world.place("k", 2, 20, 1, 128), world.place("out", 2, 20, 6, 128)
    )  # fmt: skip
    many = dataclasses.replace(kt, shape=(2, 20, 6, 128), strides=(20 * 128, 128, 0, 1))
    world.bundle.attention(qt, many, many, out_t)
    assert np.array_equal(out, expected(q, k, k))


def test_t07_t10_addresses_beyond_32_bits(path: Path) -> None:
    """T07, T10: batch entries 2^31 + 64 elements apart, rows 2^33 bytes, LSE heads 2^33 elements: real addresses."""
    world = World(path)
    stride = 2**31 + 64
    base = 0x10_0000_0000
    k, v = world.rng.integers(0, 0x3F80, (2, 2, 20, 3, 128), np.uint16)
    for b in range(2):
        world.driver.place(f"k {b}", np.ascontiguousarray(k[b]), "bf16", base + 2 * stride * b)
        world.driver.place(f"v {b}", np.ascontiguousarray(v[b]), "bf16", base + 2 * stride * b + 0x10000)
    kt = TensorArg(base, (2, 20, 3, 128), (stride, 384, 128, 1), "bf16", -1)
    vt = dataclasses.replace(kt, address=base + 0x10000)
    row_stride = 2**32  # elements
    out_base = 0x40_0000_0000
    rows = [np.full((3, 128), CANARY, np.uint16) for _ in range(4)]
    for i, row in enumerate(rows):
        world.driver.place(f"out {i}", row, "bf16", out_base + 2 * row_stride * i)
    out_t = TensorArg(out_base, (2, 2, 3, 128), (2 * row_stride, row_stride, 128, 1), "bf16", -1)
    lse = [np.full((2, 2), -1, np.float32) for _ in range(3)]
    for h, part in enumerate(lse):
        world.driver.place(f"lse {h}", part, address=0x1000_0000_0000 + 4 * 2**33 * h)
    lse_t = TensorArg(0x1000_0000_0000, (2, 3, 2), (2, 2**33, 1), "float32", -1)
    q, qt = world.place("q", 2, 2, 3, 128)
    world.bundle.attention(qt, kt, vt, out_t, lse=lse_t, softmax_scale=1.0)
    assert np.array_equal(np.stack(rows).reshape(2, 2, 3, 128), expected(q, k, v))
    assert np.array_equal(np.stack(lse, axis=1), expected_lse(q, 20, 1.0))


def test_z06_no_keys_and_a_null_pointer(path: Path) -> None:
    world = World(path)
    (q, qt), (out, out_t) = world.place("q", 2, 5, 1, 128), world.place("out", 2, 5, 1, 128)
    none = TensorArg(0, (2, 0, 1, 128), (0, 128, 128, 1), "bf16", -1)
    world.bundle.attention(qt, none, none, out_t)
    assert np.array_equal(out, q)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_z05_l09_no_queries_run_nothing(path: Path, shape: tuple[int, int]) -> None:
    world = World(path)
    _, qt = world.place("q", *shape, 3, 128)
    _, kt = world.place("k", shape[0], 9, 1, 128)
    _, out_t = world.place("out", *shape, 3, 128)
    world.bundle.attention(qt, kt, kt, out_t)
    assert world.driver.last_result is None


def test_the_simulator_stops_what_a_gpu_would_corrupt(path: Path) -> None:
    """An output that is smaller than it says is a finding with kernel, seed and source line, not silence."""
    world = World(path)
    _, qt = world.place("q", 1, 20, 3, 128)
    _, small = world.place("out", 1, 10, 3, 128)
    with pytest.raises(SimError, match=r"seed 0: 1 errors? in .*\.ptx:\n.*'out'"):
        world.bundle.attention(qt, qt, qt, dataclasses.replace(small, shape=(1, 20, 3, 128)))
    _, readonly = world.place("q2", 1, 20, 3, 128)
    with pytest.raises(SimError, match="read-only"):
        world.bundle.attention(qt, qt, qt, readonly)


def test_counters_name_roles_and_loops(path: Path) -> None:
    from fmha_gen.sim.driver import counters

    world = World(path)
    _, qt = world.place("q", 1, 300, 3, 128)
    _, out_t = world.place("out", 1, 300, 3, 128)
    world.bundle.attention(qt, qt, qt, out_t, num_sms=1)
    assert world.driver.last_result is not None
    report = counters(world.driver.last_result)
    assert sum(report["roles"].values()) == sum(world.driver.last_result.counters.warps.values()) > 0
    (loops,) = report["loops"].values()
    assert max(loop["iterations"] for loop in loops) >= 9  # nine tiles by one CTA


def test_tensors_of_a_gpu_and_unknown_arrays_are_refused(path: Path) -> None:
    world = World(path)
    on_gpu = TensorArg.contiguous(0x1000, (1, 20, 3, 128), "bf16", 0)
    with pytest.raises(ProblemError, match="q: on cuda:0; the simulator needs host arrays"):
        world.bundle.prepare(on_gpu, on_gpu, on_gpu, dataclasses.replace(on_gpu, address=0x100000))
    array = np.zeros((1, 20, 3, 128), np.uint16)
    _, qt = world.place("q", 1, 20, 3, 128)
    _, out_t = world.place("out", 1, 20, 3, 128)
    with pytest.raises(ProblemError, match=r"k: 0x\w+ is no memory of the simulator; place\(\) it: k = driver.place"):
        world.bundle.attention(qt, array, qt, out_t, dtype="bf16")
    lse = np.zeros((1, 3, 20), np.float32)
    with pytest.raises(ProblemError, match=r"lse: 0x\w+ is no memory of the simulator; place\(\) it"):
        world.bundle.attention(qt, qt, qt, out_t, lse=lse)
    with pytest.raises(ProblemError, match="dtype int64"):
        world.driver.place("q", np.zeros((1, 1), np.int64))
