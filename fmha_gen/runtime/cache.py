"""Prepared launches by tensor geometry and address, so that a repeated call costs a look-up and one driver call.

Only torch tensors are cached: their metadata is cheap to read. A key holds everything that preparing looks at, so a
hit is what preparing again would give. Entries refer to no tensor and keep no memory alive.

Addresses that are new are written into a scratch block for one launch; those that come a second time get arguments of
their own. So a caller whose addresses never repeat fills no memory. Geometries that are new (a sequence that grew) are
packed by the `Recipe` of their kind.
"""

from __future__ import annotations

from typing import Any

from .bound import PreparedLaunch
from .driver import Addresses
from .overlap import apart, clash, spans_bytes
from .problem import Memory
from .recipe import Recipe

MAX_GEOMETRIES = 512
MAX_ADDRESSES = 512  # per geometry; a prepared launch holds about 1 KiB
MAX_RECIPES = 256

Key = tuple[Any, Addresses]
"""(geometry, addresses) of a call: q's shape, strides, dtype and device, then k's, v's, out's; lse's, then options."""


class Geometry:
    """Launches that differ in addresses only. first: the one that was prepared in full.

    layout: shapes, strides and spans in bytes of the tensors; None until addresses move, which many lengths never see.
    """

    __slots__ = ("by_address", "first", "layout", "seen")

    def __init__(self, first: PreparedLaunch) -> None:
        self.first = first
        self.layout: tuple[Any, ...] | None = None
        self.by_address: dict[Addresses, PreparedLaunch] = {}
        self.seen: set[Addresses] = set()


class LaunchCache:
    """Thread-safe by the atomicity of dict reads and writes; two threads may prepare the same launch once each."""

    __slots__ = ("_geometries", "_recipes")

    def __init__(self) -> None:
        self._geometries: dict[Any, Geometry] = {}
        self._recipes: dict[Any, Recipe] = {}

    def key(self, q: Any, k: Any, v: Any, out: Any, lse: Any, options: tuple[Any, ...]) -> Key | None:
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

    def launch(self, key: Key, stream: int) -> bool:
        """Launch what was prepared for `key`, or for its geometry at other addresses. False: prepare it first."""
        described, addresses = key
        try:
            geometry = self._geometries.get(described)
        except TypeError:  # an option that cannot be hashed, and so is wrong or rare
            return False
        if geometry is None:
            return False
        found = geometry.by_address.get(addresses)
        if found is None:
            return self._launch_moved(geometry, key, stream)
        found(stream)
        return True

    def _launch_moved(self, geometry: Geometry, key: Key, stream: int) -> bool:
        addresses = key[1]
        q, k, v, out, lse = addresses
        if (q | k | v | out) & 15 or lse & 3 or not (q and k and v and out):
            return False  # preparing says what is wrong
        if addresses not in geometry.seen:
            layout = geometry.layout
            if layout is None:
                shapes, strides = _layout(key[0])
                layout = geometry.layout = shapes, strides, spans_bytes(shapes, strides)
            if not apart(addresses, layout[2]) and clash(addresses, *layout):
                return False
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

    def store(self, key: Key, launch: PreparedLaunch) -> None:
        """Remember a launch that was prepared."""
        try:
            if len(self._geometries) >= MAX_GEOMETRIES:
                self._geometries = {}
            geometry = self._geometries.setdefault(key[0], Geometry(launch))
        except TypeError:
            return
        geometry.by_address[key[1]] = launch

    # ---- geometries that are new

    def prepare(self, key: Key) -> PreparedLaunch | None:
        """The launch of `key`, by the recipe of its kind; None: prepare it in full. Raises as preparing does."""
        geometry, addresses = key
        try:
            recipe = self._recipes.get(_kind(geometry))
        except (TypeError, IndexError):  # an option that cannot be hashed, a tensor without axes
            return None
        if recipe is None:
            return None
        return recipe.prepare(tuple.__new__(Memory, (addresses, *_layout(geometry))))

    def learn(self, key: Key, recipe: Recipe) -> None:
        """Remember how launches like that of `key` are prepared."""
        try:
            if len(self._recipes) >= MAX_RECIPES:
                self._recipes = {}
            self._recipes[_kind(key[0])] = recipe
        except TypeError:
            return


def _layout(geometry: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(shapes, strides) of the tensors in ADDRESS_ORDER."""
    q, q_strides, _, _, k, k_strides, _, _, v, v_strides, _, _, out, out_strides, _, _, lse, _ = geometry
    lse, lse_strides = (None, None) if lse is None else lse[:2]
    return (q, k, v, out, lse), (q_strides, k_strides, v_strides, out_strides, lse_strides)


def _kind(geometry: Any) -> Any:
    """What a recipe holds for: element types and devices, head dims of q and v, whether lse is wanted, the options."""
    q, _, q_dtype, q_device, _, _, k_dtype, k_device, v, _, v_dtype, v_device, _, _, o_dtype, o_device, lse, options = (
        geometry
    )
    return (
        q_dtype, q_device, k_dtype, k_device, v_dtype, v_device, o_dtype, o_device, q[-1], v[-1],
        None if lse is None else lse[2:], options,
    )  # fmt: skip
