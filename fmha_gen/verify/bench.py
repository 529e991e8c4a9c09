"""Where a verified kernel runs: the simulator or a GPU, both through the public launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ..manifest import KernelEntry
from ..runtime import Bundle, TensorArg
from ..runtime.cuda import CudaDriver
from ..runtime.cuda_memory import DeviceMemory
from ..runtime.driver import ARCH_CAPABILITY, Device
from .buffers import Buffer
from .cases import Case


class Bench(Protocol):
    """Runs one problem on one kernel; buffers hold what the kernel wrote afterwards."""

    def refuses(self, entry: KernelEntry) -> str | None:
        """Why a kernel cannot run here (it is for another architecture), or None."""

    def run(self, kernel: str, case: Case, buffers: Mapping[str, Buffer], causal: bool, seed: int) -> None:
        """Raises SimError with the simulator's findings, or what the launcher raises."""


class SimBench:
    """The simulator."""

    def __init__(self, bundle: str | os.PathLike[str]) -> None:
        from ..sim.driver import SimDriver

        self.driver = SimDriver()
        self.bundle = Bundle.open(bundle, self.driver)

    def refuses(self, entry: KernelEntry) -> str | None:
        if not _is_for(entry, self.driver.device(0)):
            return f"{entry.arch} kernels do not run in the simulator; verify them on a GPU with --driver cuda"
        return None

    def run(self, kernel: str, case: Case, buffers: Mapping[str, Buffer], causal: bool, seed: int) -> None:
        self.driver.reset(seed=seed)
        tensors = {}
        for name, b in buffers.items():
            whole = self.driver.place(name, b.base, b.dtype)
            tensors[name] = _inside(b, whole.address, whole.device)
        _launch(self.bundle, kernel, case, tensors, causal)


class CudaBench:
    """CUDA device 0; a seed is a repetition."""

    def __init__(self, bundle: str | os.PathLike[str]) -> None:
        self.driver = CudaDriver()
        self.bundle = Bundle.open(bundle, self.driver)
        self.device = self.driver.device(0)

    def refuses(self, entry: KernelEntry) -> str | None:
        if not _is_for(entry, self.device):
            return f"{entry.arch} kernels do not run on {self.device.describe()}"
        return None

    def run(self, kernel: str, case: Case, buffers: Mapping[str, Buffer], causal: bool, seed: int) -> None:
        with DeviceMemory(self.driver, self.device) as memory:
            addresses = {name: memory.upload(b.base.tobytes(), name) for name, b in buffers.items()}
            tensors = {name: _inside(b, addresses[name], 0) for name, b in buffers.items()}
            _launch(self.bundle, kernel, case, tensors, causal)
            memory.synchronize(f"{kernel}: {case.name}")
            for name in ("out", "lse"):
                if name in buffers:
                    data = bytearray(buffers[name].base.nbytes)
                    memory.download(addresses[name], data, name)
                    buffers[name].base[...] = np.frombuffer(data, buffers[name].base.dtype)


def _is_for(entry: KernelEntry, device: Device) -> bool:
    return ARCH_CAPABILITY.get(entry.arch) == device.compute_capability


def _inside(buffer: Buffer, base_address: int, device: int | None) -> TensorArg:
    address = base_address + buffer.offset * buffer.base.itemsize
    return TensorArg(address, buffer.shape, buffer.strides, buffer.dtype, device)


def _launch(bundle: Bundle, kernel: str, case: Case, tensors: Mapping[str, TensorArg], causal: bool) -> None:
    bundle.prepare(
        tensors["q"], tensors["k"], tensors["v"], tensors["out"], lse=tensors.get("lse"), causal=causal,
        softmax_scale=case.scale, variant=kernel, num_sms=case.sms,
    )(0)  # fmt: skip


def open_bench(driver: str, bundle: str | os.PathLike[str]) -> Bench:
    """The bench of ``--driver``."""
    return CudaBench(bundle) if driver == "cuda" else SimBench(bundle)
