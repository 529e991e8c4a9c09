"""For the same problem the launcher hands the simulator and a real GPU's driver the same packed arguments.

Nothing is launched: addresses are made up.
"""

from __future__ import annotations

from typing import Any

import pytest

from fmha_gen.runtime import Bundle
from fmha_gen.runtime.driver import TensorMapArgs
from fmha_gen.runtime.select import runs_on

pytest.importorskip("numba", reason="the simulator needs numba")
from tests.launcher_fixtures import read_arguments
from tests.same_arguments import on_host, problems, same, same_map, same_memory, simulator_for

pytestmark = pytest.mark.device
NAMES = sorted(problems("bf16", 128, 128))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_problem_gives_the_same_arguments(bundle: Bundle, name: str) -> None:
    driver: Any = bundle.driver
    device = driver.device(0)
    sim_bundle = simulator_for(bundle.path, device)
    kinds = {
        (e.serves.dtype, e.serves.head_dim_qk, e.serves.head_dim_v, mask)
        for e in bundle.kernels
        if runs_on(e, device) and not e.serves.features
        for mask in e.serves.masks
    }
    assert kinds
    for dtype, d, dv, mask in sorted(kinds):
        options = problems(dtype, d, dv)[name] | {"causal": mask == "causal"}
        gpu, sim = bundle.prepare(**options), sim_bundle.prepare(**on_host(options))
        packed = same(gpu, sim)
        bound: Any = gpu._bound
        launch = sim._bound.launch  # type: ignore[union-attr]
        same_memory(packed, bound._params, launch)
        in_memory = read_arguments(bound._params, packed.kinds)
        for args, sim_map, found in zip(packed.args, launch.params, in_memory, strict=True):
            if isinstance(args, TensorMapArgs):
                same_map(args, sim_map)
                assert found == driver.encode(args, device), "a map that was moved is what the driver encodes anew"
        moved = tuple(0 if n not in options else options[n].address + 0x2000 for n in ("q", "k", "v", "out", "lse"))
        rebound = bound.rebind(moved)
        same_memory(packed, rebound._params, sim.rebind(moved)._bound.launch)  # type: ignore[union-attr]
