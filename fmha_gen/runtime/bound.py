"""`PreparedLaunch`: what `Bundle.prepare` returns."""

from __future__ import annotations

from .driver import Addresses, BoundLaunch, Device, PackedLaunch


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
        return PreparedLaunch(self.kernel, self.device, self.packed, self._bound.rebind(addresses))

    def launch_at(self, addresses: Addresses, stream: int) -> None:
        """`rebind` for one call; nothing is kept."""
        if self._bound is not None:
            self._bound.launch_at(addresses, stream)
