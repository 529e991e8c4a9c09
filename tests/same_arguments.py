"""What the simulator and a GPU are handed for the same problem, side by side: for tests/unit and tests/device."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

from fmha_gen.manifest import KernelRecord
from fmha_gen.runtime import Bundle, Device, PreparedLaunch, TensorArg
from fmha_gen.runtime.driver import ADDRESS_ORDER, ARCH_CAPABILITY, PackedLaunch, TensorMapArgs
from fmha_gen.runtime.tensors import HOST
from fmha_gen.sim.driver import Lines, SimDriver, SimKernel
from fmha_gen.sim.tensormap import TensorMap
from tests.launcher_fixtures import read_arguments

BASE = 0x10_0000_0000


class ArgumentsOnly(SimDriver):
    """The simulator's driver, without translating PTX: what it is handed is all that matters."""

    def load(self, record: KernelRecord, image: bytes, device: Device, where: str, *rest: Any) -> SimKernel:
        return SimKernel(record.id, "", record.symbol, record.resources.registers, {}, Lines(None), where)


def simulator_for(path: Path, device: Device) -> Bundle:
    """The bundle in a simulator that reports `device`'s architecture and multiprocessors."""
    arch = next(a for a, cc in ARCH_CAPABILITY.items() if cc == device.compute_capability)
    return Bundle.open(path, ArgumentsOnly(num_sms=device.num_sms, arch=arch))


def _dense(name: str, shape: tuple[int, ...], dtype: str) -> TensorArg:
    return TensorArg.contiguous(BASE + ADDRESS_ORDER.index(name) * 2**42, shape, dtype, 0)


def problems(dtype: str, d: int, dv: int) -> dict[str, dict[str, Any]]:
    """Tensors and options by name; addresses are made up, nothing is launched on them."""

    def tensors(b: int, sq: int, sk: int, h: int, hk: int, lse: bool = True) -> dict[str, Any]:
        named = {
            "q": _dense("q", (b, sq, h, d), dtype), "k": _dense("k", (b, sk, hk, d), dtype),
            "v": _dense("v", (b, sk, hk, dv), dtype), "out": _dense("out", (b, sq, h, dv), dtype),
        }  # fmt: skip
        return named | ({"lse": _dense("lse", (b, h, sq), "float32")} if lse else {})

    def strided(named: dict[str, Any], **strides: tuple[int, ...]) -> dict[str, Any]:
        return named | {n: dataclasses.replace(named[n], strides=s) for n, s in strides.items()}

    far = 2**31 + 64
    return {
        "dense": tensors(2, 300, 500, 8, 2),
        "no lse": tensors(2, 300, 500, 8, 2, lse=False),
        "one row": tensors(1, 1, 1, 1, 1),
        "many tiles": tensors(64, 4096, 4096, 32, 4),
        "no keys": tensors(2, 5, 0, 2, 1),
        "scale": tensors(1, 129, 64, 6, 2) | {"softmax_scale": 0.3},
        "uniform": tensors(1, 129, 64, 6, 2) | {"softmax_scale": 0.0},
        "bhsd": strided(
            tensors(2, 300, 300, 4, 4), q=(4 * 300 * d, d, 300 * d, 1), out=(4 * 300 * dv, dv, 300 * dv, 1)
        ),
        "fused qkv": strided(tensors(2, 70, 70, 3, 3), q=(70 * 9 * d, 9 * d, d, 1), k=(70 * 9 * d, 9 * d, d, 1)),
        "expanded heads": strided(tensors(2, 70, 90, 4, 4), k=(90 * d, d, 0, 1), v=(90 * dv, dv, 0, 1)),
        "odd strides of single elements": strided(tensors(1, 1, 1, 1, 1), q=(7, 0, 2**40, 1), lse=(3, 5, 2**41)),
        "far apart": strided(
            tensors(2, 20, 20, 3, 1), k=(far, d, d, 1), out=(2**33, 2**34, 20 * 2**34, 1), lse=(2**36, 2**33, 2)
        ),
        "few multiprocessors": tensors(4, 300, 300, 8, 8) | {"num_sms": 7},
    }


def on_host(options: dict[str, Any]) -> dict[str, Any]:
    """The same call for the simulator, whose memory is the host's."""
    return {
        n: dataclasses.replace(v, device=HOST) if isinstance(v, TensorArg) else v for n, v in options.items()
    }  # fmt: skip


def same(gpu: PreparedLaunch, sim: PreparedLaunch) -> PackedLaunch:
    """Both launches have the same kernel, geometry and arguments. Returns them."""
    assert gpu.kernel == sim.kernel
    assert gpu.packed is not None and gpu.packed == sim.packed
    return gpu.packed


def same_memory(packed: PackedLaunch, params_address: int, launch: Any) -> None:
    """What a GPU reads through `kernelParams` is what the simulator's kernel gets, bit for bit; maps by address."""
    got = read_arguments(params_address, packed.kinds)
    assert len(got) == len(launch.params) == len(packed.args)
    for name, kind, gpu, sim in zip(packed.names, packed.kinds, got, launch.params, strict=True):
        if kind == "tensor_map":
            assert isinstance(sim, TensorMap)
            assert int.from_bytes(gpu[:8], "little") == sim.address, name
        elif kind == "f32":
            assert struct.pack("f", gpu) == struct.pack("f", sim), name
        else:
            assert gpu == sim, name
    assert (launch.grid, launch.block, launch.cluster) == (packed.grid, packed.block, packed.cluster)
    assert launch.dynamic_smem_bytes == packed.dynamic_smem_bytes


def same_map(args: TensorMapArgs, sim: TensorMap) -> None:
    """The simulator's map says what the driver is asked to encode."""
    for name in ("address", "extents", "strides_bytes", "box", "swizzle", "fill"):
        assert getattr(args, name) == getattr(sim, name), (args.tensor, name)
    assert sim.element == {"bf16": "bf16", "fp16": "f16"}[args.element]
