"""Prepared launches by tensor geometry and address, so that a repeated call costs a look-up and one driver call.

Only torch tensors are cached: their metadata is cheap to read. A key holds everything that preparing looks at, so a
hit is what preparing again would give. Entries refer to no tensor and keep no memory alive.

Addresses that are new are written into a scratch block for one launch; those that come a second time get arguments of
their own. So a caller whose addresses never repeat fills no memory.
"""

from __future__ import annotations

from typing import Any

from .bound import PreparedLaunch
from .driver import Addresses

MAX_GEOMETRIES = 512
MAX_ADDRESSES = 512  # per geometry; a prepared launch holds about 1 KiB


class Geometry:
    """Launches that differ in addresses only. first: the one that was prepared in full."""

    __slots__ = ("by_address", "first", "seen")

    def __init__(self, first: PreparedLaunch) -> None:
        self.first = first
        self.by_address: dict[Addresses, PreparedLaunch] = {}
        self.seen: set[Addresses] = set()


class LaunchCache:
    """Thread-safe by the atomicity of dict reads and writes; two threads may prepare the same launch once each."""

    __slots__ = ("_geometries",)

    def __init__(self) -> None:
        self._geometries: dict[Any, Geometry] = {}

    def key(self, q: Any, k: Any, v: Any, out: Any, lse: Any, options: tuple[Any, ...]) -> tuple[Any, Addresses] | None:
        """(geometry, addresses) of a call on torch tensors; None where it cannot be cached."""
        try:
            geometry = (
                q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.dtype, k.get_device(), v.shape,
                v.stride(), v.dtype, v.get_device(), out.shape, out.stride(), out.dtype, out.get_device(),
                None if lse is None else (lse.shape, lse.stride(), lse.dtype, lse.get_device()), options,
            )  # fmt: skip
            return geometry, (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
            )  # fmt: skip
        except AttributeError:
            return None

    def launch(self, key: tuple[Any, Addresses], stream: int) -> bool:
        """Launch what was prepared for `key`, or for its geometry at other addresses. False: prepare it first."""
        try:
            geometry = self._geometries.get(key[0])
        except TypeError:  # an option that cannot be hashed, and so is wrong or rare
            return False
        if geometry is None:
            return False
        found = geometry.by_address.get(key[1])
        if found is None:
            return self._launch_moved(geometry, key[1], stream)
        found(stream)
        return True

    def _launch_moved(self, geometry: Geometry, addresses: Addresses, stream: int) -> bool:
        q, k, v, out, lse = addresses
        if (q | k | v | out) & 15 or lse & 3 or not (q and k and v and out):
            return False  # preparing says what is wrong
        if addresses not in geometry.seen:
            if len(geometry.seen) >= MAX_ADDRESSES:
                geometry.seen = set()
            geometry.seen.add(addresses)
            geometry.first.launch_at(addresses, stream)
            return True
        launch = geometry.first.rebind(addresses)
        if len(geometry.by_address) >= MAX_ADDRESSES:
            geometry.by_address = {}
        geometry.by_address[addresses] = launch
        launch(stream)
        return True

    def store(self, key: tuple[Any, Addresses], launch: PreparedLaunch) -> None:
        """Remember a launch that was prepared in full."""
        try:
            if len(self._geometries) >= MAX_GEOMETRIES:
                self._geometries = {}
            geometry = self._geometries.setdefault(key[0], Geometry(launch))
        except TypeError:
            return
        geometry.by_address[key[1]] = launch
