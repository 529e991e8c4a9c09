"""The one packer: a kernel's parameter table and a checked launch become argument values. Driver independent.

Nothing else knows a kernel's signature. Parameter names resolve to quantities of the launch:

| kind | value |
|---|---|
| tensor_map | the record's axes walked over its tensor's extents and strides |
| pointer | the tensor's address, 0 where it is not given and the parameter is nullable |
| i64 ``<tensor>_stride_<axis>`` | the tensor's stride in elements |
| i32 | a size of the problem, or a scalar rule of `launch_rules` |
| f32 | ``softmax_scale_log2`` |

A record is compiled once: `Packer` resolves the names to indices and checks everything that no launch can change, so
that a launch with new sizes costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from .. import launch_rules
from ..errors import BundleError, ProblemError, SelectionError
from ..manifest import KernelRecord, MapAxis, Param, TensorMapRecord
from .driver import ADDRESS_ORDER, Argument, PackedLaunch, TensorMapArgs
from .problem import AXES, MAX_EXTENT, TMA_ALIGN_BYTES, Launch, Memory, Sizes
from .tensors import ITEM_BYTES

_TENSOR_OF = {"o": "out"}  # a map may be recorded under the kernel's short name
_Q, _LSE = ADDRESS_ORDER.index("q"), ADDRESS_ORDER.index("lse")

_NUM_PLAIN = len(Sizes._fields) + len(ADDRESS_ORDER) + 1
_Op = Callable[[Sizes, Memory], Argument]
_new = tuple.__new__


def pack(record: KernelRecord, launch: Launch, num_sms: int, override: bool = False) -> PackedLaunch | None:
    """`Packer.pack` of a kernel that is not kept."""
    problem = launch.problem
    return Packer(record).pack(launch.sizes, launch.memory, problem.softmax_scale_log2, num_sms, override)


class Packer:
    """The parameter table of one kernel, compiled. Immutable, thread-safe.

    Raises BundleError for a parameter that this run time does not know (the bundle is newer) or a damaged record.
    """

    __slots__ = (
        "_block", "_cluster", "_computed", "_dtype", "_grid", "_has_lse", "_id", "_kinds", "_names", "_ordered",
        "_required", "_smem", "_symbol",
    )  # fmt: skip

    def __init__(self, record: KernelRecord) -> None:
        launch = record.launch
        self._id, self._dtype = record.id, record.serves.dtype
        self._grid = launch_rules.compile_grid(launch.grid)
        self._symbol = record.symbol
        self._block, self._cluster, self._smem = (launch.threads, 1, 1), launch.cluster, launch.dynamic_smem_bytes
        self._kinds, self._names = tuple(p.kind for p in record.params), tuple(p.name for p in record.params)
        self._has_lse = "lse" in self._names
        self._required = tuple(
            (p.name, ADDRESS_ORDER.index(p.name))
            for p in record.params
            if p.name in ADDRESS_ORDER and p.kind == "pointer" and not p.nullable
        )
        computed: list[_Op] = []
        order: list[int] = []
        for param in record.params:
            source = _compile(record, param)
            if isinstance(source, int):
                order.append(source)
            else:
                order.append(_NUM_PLAIN + len(computed))
                computed.append(source)
        self._computed = tuple(computed)
        self._ordered = itemgetter(*order) if len(order) > 1 else lambda values: tuple([values[i] for i in order])

    def pack(
        self, sizes: Sizes, memory: Memory, softmax_scale_log2: float, num_sms: int, override: bool = False
    ) -> PackedLaunch | None:
        """Arguments and geometry of one launch, checked already; None when there are no queries: do not launch.

        num_sms, override: as `launch_rules.grid` takes them. Raises SelectionError when an output is wanted that the
        kernel cannot write, ProblemError when one is missing that it needs.
        """
        if not self._has_lse and memory.shapes[_LSE] is not None:
            raise SelectionError(f"{self._id}: lse: the kernel was built without it; set `lse: true` in the spec")
        for name, index in self._required:
            if memory.shapes[index] is None:
                raise ProblemError(f"{name}: not given, and {self._id} needs it; pass {name}=")
        if not sizes.batch or not sizes.seqlen_q:
            return None
        if sizes.dtype != self._dtype:
            raise BundleError(f"{self._id}: element {self._dtype}, tensor q holds {sizes.dtype}; the record is damaged")
        grid, clusters = self._grid(sizes, num_sms, override), self._cluster[0]
        if grid % clusters:
            grid += clusters - grid % clusters  # a grid is whole clusters; surplus CTAs find no tile
        values = (*sizes, *memory.addresses, softmax_scale_log2, *[op(sizes, memory) for op in self._computed])
        return _new(
            PackedLaunch,
            (
                self._id, self._symbol, (grid, 1, 1), self._block, self._cluster, self._smem, self._kinds, self._names,
                self._ordered(values),
            ),
        )  # fmt: skip


def _compile(record: KernelRecord, param: Param) -> int | _Op:
    """Where a parameter's value lies among the plain ones (sizes, addresses, scale), or what computes it."""
    if param.kind == "tensor_map":
        where = f"{record.id}: parameter {param.name}"
        if param.tensor_map is None:
            raise BundleError(f"{where}: no tensor map record; the record is damaged")
        return _map(param.tensor_map, record.serves.dtype, where)
    if param.kind == "i64":
        return _stride(record, param)
    if param.kind == "i32":
        return _int32(record, param)
    if param.kind == "pointer" and (name := _TENSOR_OF.get(param.name, param.name)) in ADDRESS_ORDER:
        return len(Sizes._fields) + ADDRESS_ORDER.index(name)
    if param.kind == "f32" and param.name == "softmax_scale_log2":
        return _NUM_PLAIN - 1
    raise _unknown(record, param)


def _stride(record: KernelRecord, param: Param) -> _Op:
    name, found, letter = param.name.partition("_stride_")
    axes = _letters(name)
    if not found or letter not in axes:
        raise _unknown(record, param)
    index, axis = ADDRESS_ORDER.index(name), axes.index(letter)

    def stride(sizes: Sizes, memory: Memory) -> int:
        shape = memory.shapes[index]
        return memory.strides[index][axis] if shape is not None and shape[axis] > 1 else 0

    return stride


def _int32(record: KernelRecord, param: Param) -> int | _Op:
    name = param.name
    if name in Sizes._fields and name != "dtype":
        return Sizes._fields.index(name)
    rule = record.launch.scalars.get(name) or launch_rules.default_scalar_rule(name)
    if rule is None:
        raise _unknown(record, param)
    compute = launch_rules.compile_scalar(rule)

    def computed(sizes: Sizes, memory: Memory) -> int:
        value = compute(sizes)
        if not 0 <= value <= MAX_EXTENT:
            raise BundleError(f"{record.id}: parameter {name}: rule {rule.name!r} gives {value}, beyond 32 bits")
        return value

    return computed


def _map(spec: TensorMapRecord, dtype: str, where: str) -> _Op:
    """What to encode for one tensor map.

    Axes of extent 1 get a legal stride whatever the tensor says (frameworks put 0, 1 or 2^40 there). A tensor without
    elements gets a map of extent 1 over q's memory: the driver refuses a zero extent, and the kernel never loads
    through it.
    """
    name = _TENSOR_OF.get(spec.tensor, spec.tensor)
    if name not in ADDRESS_ORDER or name == "lse":
        raise BundleError(f"{where}: describes tensor {spec.tensor!r}, unknown to this fmha-gen; install a newer one")
    if spec.element != dtype:
        raise BundleError(f"{where}: element {spec.element}, tensor {name} holds {dtype}; the record is damaged")
    index, axes = ADDRESS_ORDER.index(name), tuple([_WALKED.get((name, a.axis, a.extent), -1) for a in spec.axes])
    if -1 in axes:
        raise _not_walked(name, spec.axes[axes.index(-1)], where)
    outer, item = axes[1:], ITEM_BYTES[dtype]
    if len(axes) < 2:
        raise BundleError(f"{where}: a map of {len(axes)} axes; the driver encodes at least 2; the record is damaged")
    box, swizzle, fill, promotion = tuple(a.box for a in spec.axes), spec.swizzle, spec.fill, spec.l2_promotion
    extents_of = itemgetter(*axes)
    last: tuple[Any, ...] = (None, None, None, None)  # one launch's q and out are often the next one's

    def encode(sizes: Sizes, memory: Memory) -> TensorMapArgs:
        nonlocal last
        shape, at, address = memory.shapes[index], memory.strides[index], memory.addresses[index]
        known_shape, known_at, known_address, known = last
        if shape == known_shape and at == known_at and address == known_address:
            return known
        source = index
        assert shape is not None
        if 0 in shape:
            shape, at, source = tuple([n or 1 for n in shape]), (0, 0, 0, 0), _Q
        extents = extents_of(shape)
        if 1 in extents:
            row = -(-extents[0] * item // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES
            strides = tuple([at[a] * item if shape[a] > 1 else row for a in outer])
        else:
            strides = tuple([at[a] * item for a in outer])
        head = (name, ADDRESS_ORDER[source], dtype, memory.addresses[source])
        args = _new(TensorMapArgs, (*head, extents, strides, box, swizzle, fill, promotion))
        if source == index:
            last = (shape, at, address, args)
        return args

    return encode


def _not_walked(tensor: str, walked: MapAxis, where: str) -> BundleError:
    """What is wrong with an axis of a map. Its extent must be that axis's own: TMA bounds accesses by it."""
    letter, extent = walked.axis, walked.extent
    letters = _letters(tensor)
    if letter not in letters or extent not in AXES["q"] + AXES["v"] + AXES["k"]:
        return BundleError(f"{where}: axis {letter} of extent {extent!r} is unknown here; install a newer fmha-gen")
    axis = letters.index(letter)
    return BundleError(f"{where}: axis {letter} is bounded by {extent}, that of {tensor} is {AXES[tensor][axis]}")


def _letters(tensor: str) -> str:
    """The one-letter names of a tensor's axes, in their order."""
    return "" if tensor not in AXES else "bhs" if tensor == "lse" else "bshd"


_WALKED = {
    (tensor, letter, extent): axis
    for tensor, extents in AXES.items()
    for axis, (letter, extent) in enumerate(zip(_letters(tensor), extents, strict=True))
}
"""(tensor, letter, extent) of a map's axis -> which axis of the tensor it walks."""


def _unknown(record: KernelRecord, param: Param) -> BundleError:
    return BundleError(
        f"{record.id}: parameter {param.name} ({param.kind}): unknown to this fmha-gen; the bundle is newer: "
        f"install a newer fmha-gen"
    )
