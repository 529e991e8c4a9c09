"""The GPU that is measured: what it is, its memory filled with random numbers, and its clock."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from ..arch import arch_of_device
from ..reference import to_bits
from ..runtime import TensorArg
from ..runtime.cuda import CudaDriver
from ..runtime.cuda_memory import DeviceMemory
from .cases import Case

RANDOM_ELEMS = 2**24  # of a block that is repeated to fill a tensor; each of q, k, v has its own
STREAM = 0  # torch's default stream too, so that all contenders queue up behind each other


class Gpu:
    """CUDA device `ordinal` for as long as a benchmark runs; a context manager. Raises DriverError."""

    def __init__(self, driver: CudaDriver, ordinal: int = 0) -> None:
        self.driver, self.device = driver, driver.device(ordinal)
        self._memory = DeviceMemory(driver, self.device)
        self._addresses: dict[str, int] = {}
        self._events: list[Any] = []

    def __enter__(self) -> Gpu:
        self._memory.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._memory.__exit__(*failure)

    def _call(self, name: str, *args: Any) -> Any:
        with self.driver.context(self.device.ordinal):
            return self.driver.check(getattr(self.driver.api, name)(*args), f"{self.device.describe()}: {name}")

    def attribute(self, name: str) -> int:
        handle = self._call("cuDeviceGet", self.device.ordinal)
        key = getattr(self.driver.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", key, handle))

    # ---- what it is

    @property
    def l2_bytes(self) -> int:
        return self.attribute("L2_CACHE_SIZE")

    def describe(self) -> dict[str, Any]:
        """Device, driver, and the limit by arithmetic: multiprocessors x FLOP per clock x highest clock."""
        arch = arch_of_device(self.device.compute_capability)
        clock_mhz = self.attribute("CLOCK_RATE") / 1e3
        rate = arch.mma_flop_per_clk if arch else None
        cuda = int(self._call("cuDriverGetVersion"))
        return {
            "name": self.device.name,
            "compute_capability": ".".join(str(n) for n in self.device.compute_capability),
            "num_sms": self.device.num_sms,
            "max_clock_mhz": clock_mhz,
            "l2_bytes": self.l2_bytes,
            "driver": _driver_version(),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "limit_tflops": None if rate is None else round(self.device.num_sms * rate * clock_mhz / 1e6, 1),
        }

    # ---- memory

    def fill(self, sizes: dict[str, int], dtype: str) -> None:
        """Allocate the tensors of a benchmark, inputs normally distributed. sizes: bytes by name."""
        rng = np.random.default_rng(0)
        for name, size in sizes.items():
            if name not in self._addresses:
                self._addresses[name] = self._memory.allocate(size, name)
            if name == "out":
                continue
            block = to_bits(rng.standard_normal(min(RANDOM_ELEMS, size // 2), np.float32), dtype).tobytes()
            self._call("cuMemcpyHtoD", self._addresses[name], block, len(block))
            done = len(block)
            while done < size:
                more = min(done, size - done)
                self._call("cuMemcpyDtoD", self._addresses[name] + done, self._addresses[name], more)
                done += more

    def tensors(self, case: Case, index: int) -> dict[str, TensorArg]:
        """q, k, v of input set `index`, and out."""
        found = {}
        for name, shape in case.shapes.items():
            offset = 0 if name == "out" else index * case.bytes_of(name)
            found[name] = TensorArg.contiguous(
                self._addresses[name] + offset, shape, case.problem.dtype, self.device.ordinal
            )
        return found

    def poison(self, case: Case) -> None:
        """NaN in all of out, so that what a kernel does not write is found."""
        self._call("cuMemsetD16", self._addresses["out"], 0x7FFF, case.bytes_of("out") // 2)

    # ---- the clock of `timing`

    def record(self) -> int:
        event = self._call("cuEventCreate", 0)
        self._call("cuEventRecord", event, STREAM)
        self._events.append(event)
        return len(self._events) - 1

    def milliseconds(self, start: int, end: int) -> float:
        self._call("cuEventSynchronize", self._events[end])
        return float(self._call("cuEventElapsedTime", self._events[start], self._events[end]))

    def drop_events(self) -> None:
        for event in self._events:
            self._call("cuEventDestroy", event)
        self._events.clear()


def _driver_version() -> str | None:
    """``580.159.04``, as the kernel module says; None where it does not."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found.group(1) if found else None
