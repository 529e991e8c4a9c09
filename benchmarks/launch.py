"""Host cost of a launch, in microseconds: ``python benchmarks/launch.py BUNDLE``. Needs a GPU and torch.

Compares, in one process: a bare cuLaunchKernelEx with everything made beforehand, a prepared launch, and the full call
from torch tensors at addresses seen before and at new ones; torch's own attention as a yardstick. Medians of 60 rounds
of 50 calls.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fmha_gen.runtime import Bundle

ROUNDS, CALLS = 60, 50


def measure(call: Callable[[int], Any]) -> float:
    """Median microseconds of one call."""
    times = []
    for r in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(CALLS):
            call(r * CALLS + i)
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def main() -> None:
    start = time.perf_counter()
    bundle = Bundle.open(sys.argv[1])
    opened = time.perf_counter() - start
    shape = (1, 128, 2, 128)
    pool = torch.randn(ROUNDS * CALLS + 1, *shape, device="cuda").to(torch.bfloat16)
    q, k, v, out = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(4))
    lse = torch.empty(1, 2, 128, device="cuda")
    torch.cuda.synchronize()
    bundle.driver.device(0)  # imports cuda.bindings
    start = time.perf_counter()
    prepared = bundle.prepare(q, k, v, out, lse=lse)
    prepared(0)
    first = time.perf_counter() - start
    bound: Any = prepared._bound
    api, shared, params = bundle.driver.api, bound._shared, bound._params  # type: ignore[attr-defined]
    config, handle = shared.configs[0], shared.handle
    q_bhsd, k_bhsd = q.transpose(1, 2), k.transpose(1, 2)
    rows = {
        "bare cuLaunchKernelEx": lambda i: api.cuLaunchKernelEx(config, handle, params, 0),
        "prepared launch": lambda i: prepared(0),
        "attention(), addresses seen before": lambda i: bundle.attention(q, k, v, out, lse=lse),
        "attention(), one new address a call": lambda i: bundle.attention(pool[i], k, v, out, lse=lse),
        "  of which slicing the pool": lambda i: pool[i],
        "attention(), stream given": lambda i: bundle.attention(q, k, v, out, lse=lse, stream=0),
        "prepare() in full": lambda i: bundle.prepare(q, k, v, out, lse=lse),
        "torch scaled_dot_product_attention": lambda i: torch.nn.functional.scaled_dot_product_attention(
            q_bhsd, k_bhsd, k_bhsd
        ),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"open {opened * 1e3:.2f} ms; prepare and first launch {first * 1e3:.2f} ms")
    for name, call in rows.items():
        print(f"{measure(call):8.2f} us  {name}")


if __name__ == "__main__":
    main()
