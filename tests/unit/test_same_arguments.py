"""For the same problem the launcher hands the simulator and the CUDA driver the same packed arguments.

Here the CUDA driver is a stand-in that records what it is asked; tests/device/test_same_arguments.py asks a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fmha_gen.runtime import Bundle, TensorArg
from fmha_gen.runtime.cuda import CudaDriver
from fmha_gen.runtime.driver import ADDRESS_ORDER, TensorMapArgs
from tests.launcher_fixtures import B200, FakeCuda, make_record, read_arguments, write_bundle

pytest.importorskip("numba", reason="the simulator needs numba")
from tests.same_arguments import on_host, problems, same, same_map, same_memory, simulator_for

SHAPES = [("bf16", 128, 128), ("fp16", 128, 128), ("bf16", 192, 128)]
NAMES = sorted(problems("bf16", 128, 128))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels = [
        make_record(dtype, (d, dv), mask, q_stage=stage)
        for dtype, d, dv in SHAPES
        for mask in ("full", "causal")
        for stage in (1, 2)
    ]
    return write_bundle(tmp_path_factory.mktemp("bundle"), kernels)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "d", "dv"), SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_problem_gives_the_same_arguments(
    path: Path, name: str, dtype: str, d: int, dv: int, causal: bool
) -> None:
    api = FakeCuda()
    options: dict[str, Any] = problems(dtype, d, dv)[name] | {"causal": causal}
    gpu = Bundle.open(path, CudaDriver(api)).prepare(**options)
    sim = simulator_for(path, B200).prepare(**on_host(options))
    packed = same(gpu, sim)
    gpu(0)
    (launched,) = api.launches
    sim_launch = sim._bound.launch  # type: ignore[union-attr]
    same_memory(packed, launched.params, sim_launch)
    assert (launched.gridDimX, launched.blockDimX, launched.sharedMemBytes) == (
        sim_launch.grid[0], sim_launch.block[0], sim_launch.dynamic_smem_bytes
    )  # fmt: skip
    maps = [(a, m) for a, m in zip(packed.args, sim_launch.params, strict=True) if isinstance(a, TensorMapArgs)]
    assert len(maps) == 4
    in_memory = [m for m in read_arguments(launched.params, packed.kinds) if isinstance(m, bytes)]
    for (args, sim_map), map_bytes in zip(maps, in_memory, strict=True):
        same_map(args, sim_map)
        fresh = FakeCuda()
        assert CudaDriver(fresh).encode(args, B200) == map_bytes, "a moved map is what encoding it gives"
        (call,) = fresh.named("cuTensorMapEncodeTiled")
        assert (call[3], tuple(call[4]), tuple(call[5]), tuple(call[6])) == (
            sim_map.address, sim_map.extents, sim_map.strides_bytes, sim_map.box
        )  # fmt: skip
        assert call[9].endswith(sim_map.swizzle.upper())


def test_moving_to_other_addresses_moves_both_alike(path: Path) -> None:
    api = FakeCuda()
    options = problems("bf16", 128, 128)["dense"]
    gpu = Bundle.open(path, CudaDriver(api)).prepare(**options)
    sim = simulator_for(path, B200).prepare(**on_host(options))
    addresses = tuple(options[n].address + 0x1000 * (i + 1) for i, n in enumerate(ADDRESS_ORDER))
    rebound = gpu.rebind(addresses)
    rebound(0)
    packed = same(gpu, sim)
    moved = sim.rebind(addresses)._bound
    same_memory(packed, api.launches[-1].params, moved.launch)  # type: ignore[union-attr]
    assert moved.launch.params[packed.names.index("lse")] == addresses[4]  # type: ignore[union-attr]
    addresses = tuple(a + 0x40 for a in addresses)
    gpu.launch_at(addresses, 0)
    same_memory(packed, api.launches[-1].params, sim.rebind(addresses)._bound.launch)  # type: ignore[union-attr]


def test_no_queries_launch_nothing_on_either(path: Path) -> None:
    api = FakeCuda()
    empty: dict[str, Any] = {
        n: TensorArg.contiguous(0x1000 * (i + 1), (2, 0 if n in ("q", "out") else 9, 4, 128), "bf16", 0)
        for i, n in enumerate(ADDRESS_ORDER[:4])
    }
    assert Bundle.open(path, CudaDriver(api)).prepare(**empty).packed is None
    assert simulator_for(path, B200).prepare(**on_host(empty)).packed is None
    assert not api.launches
