"""Prepared launches by tensor geometry and address, so that a repeated call costs a look-up and one driver call.

Only torch tensors are cached: their metadata is cheap to read. A key holds everything that preparing looks at, so a
hit is what preparing again would give. Entries refer to no tensor and keep no memory alive.
"""

from __future__ import annotations

from typing import Any

from .bound import PreparedLaunch

MAX_GEOMETRIES = 512
MAX_ADDRESSES = 512  # per geometry; a prepared launch holds about 2 KiB


class Geometry:
    """Launches that differ in addresses only. first: the one that was prepared in full."""

    __slots__ = ("by_address", "first")

    def __init__(self, first: PreparedLaunch) -> None:
        self.first = first
        self.by_address: dict[tuple[int, ...], PreparedLaunch] = {}


class LaunchCache:
    """Thread-safe by the atomicity of dict reads and writes; two threads may prepare the same launch once each."""

    __slots__ = ("_geometries",)

    def __init__(self) -> None:
        self._geometries: dict[Any, Geometry] = {}

    def key(self, q: Any, k: Any, v: Any, out: Any, lse: Any, options: tuple[Any, ...]) -> tuple[Any, Any] | None:
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

    def find(self, key: tuple[Any, Any]) -> PreparedLaunch | None:
        """The launch for `key`, rebound to its addresses where only those are new; None when it must be prepared."""
        try:
            geometry = self._geometries.get(key[0])
        except TypeError:  # an option that cannot be hashed, and so is wrong or rare
            return None
        if geometry is None:
            return None
        addresses = key[1]
        found = geometry.by_address.get(addresses)
        if found is None:
            found = self._rebind(geometry, addresses)
        return found

    def _rebind(self, geometry: Geometry, addresses: tuple[int, ...]) -> PreparedLaunch | None:
        q, k, v, out, lse = addresses
        if (q | k | v | out) & 15 or lse & 3 or not (q and k and v and out):
            return None  # preparing says what is wrong
        launch = geometry.first.rebind({"q": q, "k": k, "v": v, "out": out, "lse": lse})
        if len(geometry.by_address) >= MAX_ADDRESSES:
            geometry.by_address = {}
        geometry.by_address[addresses] = launch
        return launch

    def store(self, key: tuple[Any, Any], launch: PreparedLaunch) -> None:
        """Remember a launch that was prepared in full."""
        try:
            if len(self._geometries) >= MAX_GEOMETRIES:
                self._geometries = {}
            geometry = self._geometries.setdefault(key[0], Geometry(launch))
        except TypeError:
            return
        geometry.by_address[key[1]] = launch
