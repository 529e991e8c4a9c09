"""`PreparedLaunch`: what `Bundle.prepare` returns."""

from __future__ import annotations

from typing import Any

from . import arguments
from .driver import ADDRESS_ORDER, Addresses, BoundLaunch, Device, PackedLaunch
from .tensors import MAX_ADDRESS


class PreparedLaunch:
    """A launch with kernel, grid, tensor maps and arguments bound. Call it with a stream handle.

    kernel: id of the chosen kernel. packed: what was bound first, None where there are no queries: calling does nothing
    then. `rebind` moves the launch to other memory and leaves `packed` as it is.
    """

    __slots__ = ("_bound", "device", "kernel", "packed")

    def __init__(self, kernel: str, device: Device, packed: PackedLaunch | None, bound: BoundLaunch | None) -> None:
        self.kernel, self.device, self.packed, self._bound = kernel, device, packed, bound

    def __call__(self, stream: int) -> None:
        """Launch on the stream with this raw handle. Raises DriverError."""
        if self._bound is not None:
            self._bound(stream)

    def rebind(self, addresses: Addresses) -> PreparedLaunch:
        """The same launch on tensors of the same shapes and strides at other addresses.

        addresses: of q, k, v, out and lse (0 where it was not given), aligned like the first ones (16 bytes, lse 4);
        out and lse share no element with another tensor. Neither is checked here.
        """
        if self._bound is None:
            return self
        try:
            bound = self._bound.rebind(addresses)
        except Exception:
            _check_addresses(addresses)
            raise
        return PreparedLaunch(self.kernel, self.device, self.packed, bound)

    def launch_at(self, addresses: Addresses, stream: int) -> None:
        """`rebind` for one call; nothing is kept."""
        if self._bound is not None:
            try:
                self._bound.launch_at(addresses, stream)
            except Exception:
                _check_addresses(addresses)
                raise


def _check_addresses(addresses: Any) -> None:
    """Say what is wrong with addresses that a launch failed on, if anything is. Raises ProblemError."""
    wanted = f"a tuple of the addresses of {', '.join(ADDRESS_ORDER)}, 0 for an lse that is not wanted"
    if not isinstance(addresses, (tuple, list)) or len(addresses) != len(ADDRESS_ORDER):
        raise arguments.wrong("addresses", addresses, wanted)
    for name, address in zip(ADDRESS_ORDER, addresses, strict=True):
        arguments.integer(f"addresses: {name}", address, "an address in bytes", 0, MAX_ADDRESS)
