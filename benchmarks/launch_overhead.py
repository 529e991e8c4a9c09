"""Host cost of a launch, in microseconds: ``python benchmarks/launch_overhead.py BUNDLE [--json FILE]``.

Needs a GPU that runs the bundle, and torch. In one process, taking turns: a bare cuLaunchKernelEx with everything made
beforehand, a prepared launch, the full call from torch tensors at addresses seen before and at new ones through the
launcher, `flash_attn_func` and the operator, and torch's own attention as a yardstick. Medians of rounds of calls on a
small problem, so that the GPU keeps up; the GPU is idle when a round starts. Opening a bundle to its first launch is
timed in fresh processes, beside imports, the context and the tensors.

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CALLS = 50
SHAPE = (1, 128, 2, 128)  # batch, seqlen, heads, head_dim
TARGETS = {  # what -> (limit, unit); docs/runtime.md has them
    "prepared launch over bare": (0.8, "us"),
    "flash_attn_func, out given, addresses seen before": (10.0, "us"),
    "flash_attn_func, out given, all addresses new": (15.0, "us"),
    "prepare, a seqlen_k that is new": (25.0, "us"),
    "open to first launch": (2.0, "ms"),
}


def first_launch(path: str) -> dict[str, float]:
    """Milliseconds of each step, in a process that has imported everything and has a context and tensors."""
    from cuda.bindings import driver as api

    from fmha_gen.runtime import Bundle, TensorArg

    def ok(returned: tuple[Any, ...]) -> Any:
        assert not int(returned[0]), returned
        return returned[1] if len(returned) > 1 else None

    ok(api.cuInit(0))
    ok(api.cuCtxSetCurrent(ok(api.cuDevicePrimaryCtxRetain(ok(api.cuDeviceGet(0))))))
    arrays = [TensorArg.contiguous(int(ok(api.cuMemAlloc(1 << 20))), SHAPE, "bf16", 0) for _ in range(4)]
    ok(api.cuCtxSynchronize())
    gc.collect()  # what the imports left is theirs
    marks = [time.perf_counter()]
    bundle = Bundle.open(path)
    marks.append(time.perf_counter())
    prepared = bundle.prepare(*arrays)
    marks.append(time.perf_counter())
    prepared(0)
    marks.append(time.perf_counter())
    ok(api.cuCtxSynchronize())
    names = ("open", "prepare", "launch")
    steps = {n: (b - a) * 1e3 for n, (a, b) in zip(names, itertools.pairwise(marks), strict=True)}
    return steps | {"open to first launch": (marks[-1] - marks[0]) * 1e3}


def fresh_processes(path: str, count: int) -> dict[str, float]:
    """Medians of `first_launch` over fresh processes; the first one reads the files into the page cache."""
    command = [sys.executable, __file__, path, "--first-launch"]
    runs = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            for _ in range(count + 1)][1:]  # fmt: skip
    return {name: round(statistics.median(r[name] for r in runs), 3) for name in runs[0]}


def rows(path: str, num_calls: int) -> dict[str, Callable[[int], Any]]:
    """What is timed: name -> call(i), where i never repeats. What is new to one row was given to no other."""
    import torch

    from fmha_gen.interop import torch as interop
    from fmha_gen.runtime import Bundle

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    def moving(shape: tuple[int, ...] = SHAPE, dtype: Any = torch.bfloat16) -> list[Any]:
        """A tensor for each call, 128 bytes behind the one before: addresses of its own in little memory."""
        size, step = math.prod(shape), 128 // dtype.itemsize
        memory = torch.zeros(num_calls * step + size, dtype=dtype, device="cuda")
        return [memory[i * step : i * step + size].view(shape) for i in range(num_calls)]

    def all_moving() -> list[tuple[Any, ...]]:
        """(q, k, v, out, lse) for each call."""
        return list(zip(*(moving() for _ in range(4)), moving(lse.shape, torch.float32), strict=True))

    def growing() -> list[tuple[Any, Any]]:
        """(k, v) for each call, as a decoding step finds its cache."""
        cache = random(2, SHAPE[0], num_calls, *SHAPE[2:])
        return [(cache[0, :, :n], cache[1, :, :n]) for n in range(1, num_calls + 1)]

    bundle = interop.use_bundle(Bundle.open(path))
    q, k, v, out = (random(*SHAPE) for _ in range(4))
    lse = torch.empty(SHAPE[0], SHAPE[2], SHAPE[1], device="cuda")
    one, attended, flashed = moving(), all_moving(), all_moving()
    attended_kv, prepared_kv, short_kv = growing(), growing(), growing()
    short, short_out = ([t[:, : 1 + i % SHAPE[1]] for i, t in enumerate(moving())] for _ in range(2))
    prepared = bundle.prepare(q, k, v, out, lse=lse)
    prepared(0)
    bound: Any = prepared._bound
    launch, shared, params = bundle.driver.api.cuLaunchKernelEx, bound._shared, bound._params  # type: ignore[attr-defined]
    config, handle = shared.configs[0], shared.handle
    flash, op = interop.flash_attn_func, torch.ops.fmha_gen.fwd.default
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    found: dict[str, Callable[[int], Any]] = {
        "bare cuLaunchKernelEx": lambda i: launch(config, handle, params, 0),
        "prepared launch": lambda i: prepared(0),
        "attention, stream given, addresses seen before": lambda i: bundle.attention(q, k, v, out, lse=lse, stream=0),
        "attention, addresses seen before": lambda i: bundle.attention(q, k, v, out, lse=lse),
        "attention, one address new": lambda i: bundle.attention(one[i], k, v, out, lse=lse),
        "attention, all addresses new": lambda i: bundle.attention(*attended[i][:4], lse=attended[i][4]),
        "flash_attn_func, out given, addresses seen before": lambda i: flash(q, k, v, out=out, lse=lse),
        "flash_attn_func, out given, all addresses new": lambda i: flash(
            *flashed[i][:3], out=flashed[i][3], lse=flashed[i][4]
        ),
        "flash_attn_func, out and lse made": lambda i: flash(q, k, v, return_lse=True),
        "torch.ops.fmha_gen.fwd, addresses seen before": lambda i: op(q, k, v, out, lse),
        "scaled_dot_product_attention of fmha_gen": lambda i: interop.scaled_dot_product_attention(qt, kt, vt),
        "attention, a seqlen_k that is new": lambda i: bundle.attention(q, *attended_kv[i], out, lse=lse),
        "prepare": lambda i: bundle.prepare(q, k, v, out, lse=lse),
        "prepare, a seqlen_k that is new": lambda i: bundle.prepare(q, *prepared_kv[i], out, lse=lse),
        "prepare, all lengths and addresses new": lambda i: bundle.prepare(short[i], *short_kv[i], short_out[i]),
    }
    return found | peers(q, k, v)


def peers(q: Any, k: Any, v: Any) -> dict[str, Callable[[int], Any]]:
    """What torch and FlashAttention-3 take for the same call."""
    import torch

    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    sdpa, switches = torch.nn.functional.scaled_dot_product_attention, torch.backends.cuda

    def with_backend(name: str) -> Callable[[int], Any]:
        def call(i: int) -> Any:
            if i % CALLS == 0:  # once a round
                for backend in ("cudnn", "flash", "mem_efficient", "math"):
                    getattr(switches, f"enable_{backend}_sdp")(backend == name)
            return sdpa(qt, kt, vt)

        return call

    found = {"torch SDPA, cuDNN": with_backend("cudnn"), "torch SDPA, flash": with_backend("flash")}
    if importlib.util.find_spec("fa3_fwd_interface"):
        fa3 = importlib.import_module("fa3_fwd_interface").flash_attn_func
        found["flash_attn_func of fa3-fwd"] = lambda i: fa3(q, k, v)
    for name in list(found):
        try:
            found[name](0)
        except RuntimeError as e:
            print(f"{name}: left out: {e}", file=sys.stderr)
            del found[name]
    return found


def measure(found: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Median microseconds of one call of each, in rounds that take turns."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in found}
    for r in range(rounds + 1):
        for name, call in found.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(r * CALLS, (r + 1) * CALLS):
                call(i)
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: round(statistics.median(t[1:]), 2) for name, t in times.items()}  # the first round warms up


def report(path: str, rounds: int, processes: int) -> dict[str, Any]:
    """Everything, as plain data."""
    import torch

    first = fresh_processes(path, processes)
    with torch.inference_mode():
        us = measure(rows(path, (rounds + 1) * CALLS), rounds)
    reached = {
        "prepared launch over bare": round(us["prepared launch"] - us["bare cuLaunchKernelEx"], 2),
        "open to first launch": first["open to first launch"],
    } | {name: us[name] for name in TARGETS if name in us}
    return {
        "device": torch.cuda.get_device_name(), "torch": str(torch.__version__), "python": sys.version.split()[0],
        "rounds": rounds, "calls": CALLS, "us": us, "first_launch_ms": first,
        "targets": {
            name: {"reached": reached[name], "limit": limit, "unit": unit, "ok": reached[name] <= limit}
            for name, (limit, unit) in TARGETS.items()
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for the first launch")
    parser.add_argument("--first-launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_launch:
        print(json.dumps(first_launch(args.bundle)))
        return 0
    found = report(args.bundle, args.rounds, args.processes)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['device']}, torch {found['torch']}, Python {found['python']}")
    for name, us in found["us"].items():
        print(f"{us:8.2f} us  {name}")
    for name, ms in found["first_launch_ms"].items():
        print(f"{ms:8.3f} ms  {name}")
    for name, t in found["targets"].items():
        print(f"{'ok    ' if t['ok'] else 'MISSED'} {name}: {t['reached']} {t['unit']}, at most {t['limit']}")
    return 0 if all(t["ok"] for t in found["targets"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
