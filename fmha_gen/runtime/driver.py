"""The protocol between the launcher and what executes a kernel, and the records that cross it.

Two drivers implement it: `fmha_gen.runtime.cuda.CudaDriver` (cuda.bindings) and `fmha_gen.sim.driver.SimDriver`, which
the caller injects. Both get the same packed arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..manifest import KernelRecord
from .tensors import ITEM_BYTES, TensorArg

# Which compute capability runs an architecture's cubins. Arch-specific ("a") code runs on exactly one; an explicit
# table, since neither names nor numbers say what is compatible.
ARCH_CAPABILITY: dict[str, tuple[int, int]] = {
    "sm_90a": (9, 0),
    "sm_100a": (10, 0),
    "sm_103a": (10, 3),
}


@dataclass(frozen=True, slots=True)
class Device:
    """What selection and grids need of a device.

    ordinal: CUDA ordinal. max_dynamic_smem_bytes: the opt-in limit of one CTA.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    max_dynamic_smem_bytes: int

    def describe(self) -> str:
        major, minor = self.compute_capability
        return f"device {self.ordinal} ({self.name}, compute capability {major}.{minor})"


class TensorMapArgs(NamedTuple):
    """Everything that cuTensorMapEncodeTiled wants, as plain numbers; dimension 0 is innermost and dense.

    tensor: which tensor it describes. memory: the tensor whose address it carries (q where `tensor` is empty).
    element: ``bf16`` or ``fp16``. extents, box: elements per dimension.
    strides_bytes: of dimensions 1, 2, ... swizzle: ``none 32B 64B 128B``. fill: ``zero`` or ``nan``.
    """

    tensor: str
    memory: str
    element: str
    address: int
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    fill: str
    l2_promotion: str

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to one past the last element."""
        span = self.extents[0] * ITEM_BYTES[self.element]
        for extent, stride in zip(self.extents[1:], self.strides_bytes, strict=True):
            span += (extent - 1) * stride
        return span


Argument = TensorMapArgs | int | float


class PackedLaunch(NamedTuple):
    """One launch, driver independent: geometry and the arguments in parameter order.

    args[i] belongs to params[i]: a TensorMapArgs, an int (pointer, i64, i32) or a float (f32). grid is (x, 1, 1).
    """

    kernel: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    args: tuple[Argument, ...]


ADDRESS_ORDER = ("q", "k", "v", "out", "lse")
Addresses = tuple[int, ...]
"""Of the tensors in ADDRESS_ORDER; lse is 0 where it is not wanted."""


class BoundLaunch(Protocol):
    """A launch with everything bound that can be: calling it is one trip to the driver. Any thread may call it."""

    def __call__(self, stream: int) -> None: ...

    def rebind(self, addresses: Addresses) -> BoundLaunch:
        """The same launch on tensors of the same geometry, aligned as it needs, at other addresses."""

    def launch_at(self, addresses: Addresses, stream: int) -> None:
        """`rebind` for one call."""


class Driver(Protocol):
    """Loads verified kernel images and launches packed arguments."""

    image: str
    """Which file of a kernel it loads: ``cubin`` or ``ptx``."""

    def check_version(self, min_driver: int, where: str) -> None:
        """Refuse a driver older than branch `min_driver`. Raises DriverError."""

    def device(self, ordinal: int) -> Device:
        """The properties of a device. Raises DriverError."""

    def device_of(self, tensors: Mapping[str, TensorArg]) -> Device:
        """The device that holds the tensors of a launch. Raises ProblemError or DriverError."""

    def load(
        self,
        record: KernelRecord,
        image: bytes,
        device: Device,
        where: str,
        line_map: Mapping[str, Any] | None,
        plan: Mapping[str, Any] | None,
    ) -> Any:
        """Load a kernel so that no later launch on `device` loads anything. `image` is verified already.

        line_map, plan: of a PTX image, decoded and checked (see docs/bundle.md); None with a cubin. plan: its roles and
        registers are those that the simulator names and checks. line_map: for messages; None where there is none.
        """

    def bind(self, kernel: Any, packed: PackedLaunch, device: Device) -> BoundLaunch:
        """Encode the tensor maps and lay the arguments out."""
