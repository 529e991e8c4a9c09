"""Prepared launches of new geometries without describing the problem again.

A serving process calls with other lengths at every step, while element types, head dims, device and options stay. What
these decide (mask, scale, which kernels serve, their compiled parameter tables) is kept in a `Recipe` when a launch is
first prepared in full; a recipe then checks and packs tensors of any lengths, heads and strides.

A recipe gives what preparing in full would give, or None where that has to say what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..manifest import KernelEntry
from .bound import PreparedLaunch
from .driver import Device, Driver
from .overlap import check_overlap
from .pack import Packer
from .problem import AXES, MAX_EXTENT, Memory, Problem, Sizes, check_layout, packed_rows, plain
from .select import prefers
from .tensors import TensorArg

_NAMES = tuple(AXES)
_new = tuple.__new__


class Choice:
    """A kernel that serves a recipe's launches. packer, kernel (the driver's): None until it is first chosen."""

    __slots__ = ("compile", "entry", "kernel", "packer")

    def __init__(self, entry: KernelEntry, compile: Callable[[KernelEntry], Packer]) -> None:
        self.entry, self.compile = entry, compile
        self.packer: Packer | None = None
        self.kernel: Any = None


class Recipe:
    """What launches that differ in lengths, heads, strides and addresses share. Thread-safe.

    choices: the kernels that serve, the best one first. load: makes the driver load an entry on `device`.
    """

    __slots__ = (
        "_choices", "_device", "_driver", "_dtype", "_features", "_load", "_override", "_scale_log2", "_sms"
    )  # fmt: skip

    def __init__(
        self, problem: Problem, choices: tuple[Choice, ...], device: Device, driver: Driver,
        load: Callable[[KernelEntry, Device], Any], num_sms: int | None,
    ) -> None:  # fmt: skip
        self._choices, self._device, self._driver, self._load = choices, device, driver, load
        self._dtype, self._features, self._scale_log2 = problem.dtype, problem.features, problem.softmax_scale_log2
        self._override = num_sms is not None
        self._sms = device.num_sms if num_sms is None else num_sms

    def prepare(self, memory: Memory) -> PreparedLaunch | None:
        """A launch on these tensors; None where their shapes do not fit together. Raises ProblemError, DriverError."""
        sizes = self._sizes(memory.shapes)
        if sizes is None:
            return None
        if not plain(memory):
            for name, address, shape, strides in zip(_NAMES, *memory, strict=True):
                if shape is not None:
                    dtype = "float32" if name == "lse" else self._dtype
                    check_layout(name, TensorArg(address, tuple(shape), tuple(strides), dtype))
        check_overlap(*memory)
        return self.bind(sizes, memory)

    def _sizes(self, shapes: tuple[Any, ...]) -> Sizes | None:
        q, k, v, out, lse = shapes
        if not len(q) == len(k) == len(v) == 4:
            return None
        batch, seqlen_q, heads, dim = q
        seqlen_k, heads_kv, dim_v = k[1], k[2], v[3]
        if (
            k != (batch, seqlen_k, heads_kv, dim)
            or v != (batch, seqlen_k, heads_kv, dim_v)
            or out != (batch, seqlen_q, heads, dim_v)
            or (lse is not None and lse != (batch, heads, seqlen_q))
            or not 0 < heads_kv <= heads <= MAX_EXTENT
            or heads % heads_kv
            or not (0 <= batch <= MAX_EXTENT and 0 <= seqlen_q <= MAX_EXTENT and 0 <= seqlen_k <= MAX_EXTENT)
        ):
            return None
        return _new(Sizes, (self._dtype, batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dim_v))

    def bind(self, sizes: Sizes, memory: Memory) -> PreparedLaunch:
        """Pack and bind a launch whose tensors are checked. Raises BundleError, ProblemError, DriverError."""
        choice = self._choose(packed_rows(sizes, self._features))
        device = self._device
        packer = choice.packer
        if packer is None:
            packer = choice.packer = choice.compile(choice.entry)
        packed = packer.pack(sizes, memory, self._scale_log2, self._sms, self._override)
        if packed is None:
            return PreparedLaunch(choice.entry.id, device, None, None)
        kernel = choice.kernel
        if kernel is None:
            kernel = choice.kernel = self._load(choice.entry, device)
        return PreparedLaunch(choice.entry.id, device, packed, self._driver.bind(kernel, packed, device))

    def _choose(self, rows: int) -> Choice:
        for choice in self._choices:
            if prefers(choice.entry.serves, rows):
                return choice
        return self._choices[0]
