"""A driver that computes attention in float64 on host memory, from packed arguments alone.

What a kernel would do with them: tensors are walked through their tensor maps and the LSE through its pointer and
strides, so that whatever the launcher got wrong shows in the numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from fmha_gen.manifest import KernelRecord
from fmha_gen.reference import attention_fp64, from_bits, to_bits
from fmha_gen.runtime.driver import ADDRESS_ORDER, Addresses, Device, PackedLaunch, TensorMapArgs
from fmha_gen.runtime.tensors import TensorArg
from tests.launcher_fixtures import B200

LOG2_E = 1.4426950408889634


def at(address: int, dtype: Any, shape: tuple[int, ...], strides_bytes: tuple[int, ...]) -> np.ndarray:
    """A writable view of host memory."""
    span = np.dtype(dtype).itemsize + sum((n - 1) * s for n, s in zip(shape, strides_bytes, strict=True))
    memory = (ctypes.c_char * span).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=strides_bytes)


def view(args: TensorMapArgs) -> np.ndarray:
    """uint16 [b, s, h, d] of the memory that a map describes; its dimensions are d, s, h, b."""
    d, s, h, b = args.extents
    step_s, step_h, step_b = args.strides_bytes
    return at(args.address, np.uint16, (b, s, h, d), (step_b, step_s, step_h, 2))


class HostLaunch:
    def __init__(self, driver: HostDriver, record: KernelRecord, packed: PackedLaunch) -> None:
        self.driver, self.record, self.packed = driver, record, packed

    def __call__(self, stream: int) -> None:
        self.driver.launches.append(self.packed)
        args: dict[str, Any] = dict(zip(self.packed.names, self.packed.args, strict=True))
        q, k, v = (from_bits(view(args[f"tma_{n}"]).copy(), args["tma_q"].element) for n in "qkv")
        if not args["seqlen_k"]:
            k, v = k[:, :0], v[:, :0]
        causal = self.record.serves.masks == ("causal",)
        want = attention_fp64(q, k, v, args["softmax_scale_log2"] / LOG2_E, causal)
        view(args["tma_o"])[...] = to_bits(want.out, args["tma_q"].element)
        if args["lse"]:
            strides = tuple(4 * args[f"lse_stride_{axis}"] for axis in "bhs")
            at(args["lse"], np.float32, want.lse.shape, strides)[...] = want.lse

    def rebind(self, addresses: Addresses) -> HostLaunch:
        where = dict(zip(ADDRESS_ORDER, addresses, strict=True))
        packed = self.packed
        args = tuple(
            a._replace(address=where[a.memory])
            if isinstance(a, TensorMapArgs)
            else (where[name] if kind == "pointer" and a else a)
            for name, kind, a in zip(packed.names, packed.kinds, packed.args, strict=True)
        )
        return HostLaunch(self.driver, self.record, packed._replace(args=args))

    def launch_at(self, addresses: Addresses, stream: int) -> None:
        self.rebind(addresses)(stream)


class HostDriver:
    """`fmha_gen.runtime.driver.Driver`. launches: what was launched. loads: how many kernels were loaded."""

    image = "cubin"

    def __init__(self, device: Device = B200) -> None:
        self._device, self.launches, self.loads = device, list[PackedLaunch](), 0

    def check_version(self, min_driver: int, where: str) -> None:
        pass

    def device(self, ordinal: int) -> Device:
        return self._device

    def device_of(self, tensors: Mapping[str, TensorArg]) -> Device:
        return self._device

    def load(self, record: KernelRecord, *rest: Any) -> KernelRecord:
        self.loads += 1
        return record

    def bind(self, kernel: KernelRecord, packed: PackedLaunch, device: Device) -> HostLaunch:
        return HostLaunch(self, kernel, packed)
