"""Device memory for tools that bring host arrays: allocate, copy, free, wait. Launches allocate nothing."""

from __future__ import annotations

from types import TracebackType

from .cuda import CudaDriver
from .driver import Device


class DeviceMemory:
    """Allocations on one device, freed together when the ``with`` block ends. Raises DriverError."""

    def __init__(self, driver: CudaDriver, device: Device) -> None:
        self._driver, self._device, self._addresses = driver, device, list[int]()

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with self._driver.context(self._device.ordinal):
            for address in self._addresses:
                result = self._driver.api.cuMemFree(address)
                if kind is None:  # after a failed launch the context is lost, and what failed first matters
                    self._driver.check(result, f"{self._device.describe()}: free")
        self._addresses.clear()

    def allocate(self, size_bytes: int, name: str) -> int:
        """Device memory (at least one byte, so that every tensor has an address)."""
        where = f"{name}: {size_bytes} B on {self._device.describe()}"
        with self._driver.context(self._device.ordinal):
            address = int(self._driver.check(self._driver.api.cuMemAlloc(max(1, size_bytes)), where))
        self._addresses.append(address)
        return address

    def upload(self, data: bytes, name: str) -> int:
        """Allocate and fill device memory."""
        address = self.allocate(len(data), name)
        if data:
            where = f"{name}: {len(data)} B to {self._device.describe()}"
            with self._driver.context(self._device.ordinal):
                self._driver.check(self._driver.api.cuMemcpyHtoD(address, data, len(data)), where)
        return address

    def download(self, address: int, into: bytearray, name: str) -> None:
        """Copy device memory into `into`, whole."""
        if not into:
            return
        with self._driver.context(self._device.ordinal):
            returned = self._driver.api.cuMemcpyDtoH(into, address, len(into))
            self._driver.check(returned, f"{name}: {len(into)} B from {self._device.describe()}")

    def synchronize(self, where: str) -> None:
        """Wait for all work of the device's context; a kernel's own failure surfaces here, under `where`."""
        with self._driver.context(self._device.ordinal):
            self._driver.check(self._driver.api.cuCtxSynchronize(), where)
