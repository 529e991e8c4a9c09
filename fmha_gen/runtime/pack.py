"""The one packer: a kernel's parameter table and a checked launch become argument values. Driver independent.

Nothing else knows a kernel's signature. Parameter names resolve to quantities of the launch:

| kind | value |
|---|---|
| tensor_map | the record's axes walked over its tensor's extents and strides |
| pointer | the tensor's address, 0 where it is not given and the parameter is nullable |
| i64 ``<tensor>_stride_<axis>`` | the tensor's stride in elements |
| i32 | a size of the problem, or a scalar rule of `launch_rules` |
| f32 | ``softmax_scale_log2`` |
"""

from __future__ import annotations

from .. import launch_rules
from ..errors import BundleError, ProblemError, SelectionError
from ..manifest import KernelRecord, Param, TensorMapRecord
from .driver import Argument, PackedLaunch, TensorMapArgs
from .problem import MAX_EXTENT, TMA_ALIGN_BYTES, Launch, Problem
from .tensors import ITEM_BYTES, TensorArg

_AXIS_INDEX = {"q": "bshd", "k": "bshd", "v": "bshd", "out": "bshd", "lse": "bhs"}
_TENSOR_OF = {"o": "out"}  # a map may be recorded under the kernel's short name


def pack(record: KernelRecord, launch: Launch, num_sms: int, override: bool = False) -> PackedLaunch | None:
    """Arguments and geometry of one launch of the kernel of `record`; None when there are no queries: do not launch.

    num_sms, override: as `launch_rules.grid` takes them. Raises BundleError for a parameter that this run time does not
    know (the bundle is newer), SelectionError when an output is wanted that the kernel cannot write.
    """
    problem = launch.problem
    names = tuple(p.name for p in record.params)
    if problem.lse and "lse" not in names:
        raise SelectionError(f"{record.id}: lse: the kernel was built without it; set `lse: true` in the spec")
    if problem.empty:
        return None
    grid = launch_rules.grid(record.launch.grid, problem, num_sms, override)
    cluster = record.launch.cluster
    if grid % cluster[0]:
        grid += cluster[0] - grid % cluster[0]  # a grid is whole clusters; surplus CTAs find no tile
    return PackedLaunch(
        kernel=record.id,
        symbol=record.symbol,
        grid=(grid, 1, 1),
        block=(record.launch.threads, 1, 1),
        cluster=cluster,
        dynamic_smem_bytes=record.launch.dynamic_smem_bytes,
        kinds=tuple(p.kind for p in record.params),
        names=names,
        args=tuple(_argument(record, p, launch) for p in record.params),
    )


def _argument(record: KernelRecord, param: Param, launch: Launch) -> Argument:
    if param.kind == "tensor_map":
        if param.tensor_map is None:
            raise BundleError(f"{record.id}: parameter {param.name}: no tensor map record; the record is damaged")
        return tensor_map(param.tensor_map, launch, f"{record.id}: parameter {param.name}")
    if param.kind == "pointer":
        return _pointer(record, param, launch)
    if param.kind == "i64":
        return _stride(record, param, launch)
    if param.kind == "i32":
        return _int32(record, param, launch.problem)
    if param.kind == "f32" and param.name == "softmax_scale_log2":
        return launch.problem.softmax_scale_log2
    raise _unknown(record, param)


def _pointer(record: KernelRecord, param: Param, launch: Launch) -> int:
    tensor = launch.tensors.get(_TENSOR_OF.get(param.name, param.name))
    if tensor is not None:
        return tensor.address
    if param.name not in _AXIS_INDEX:
        raise _unknown(record, param)
    if not param.nullable:
        raise ProblemError(f"{param.name}: not given, and {record.id} needs it; pass {param.name}=")
    return 0


def _stride(record: KernelRecord, param: Param, launch: Launch) -> int:
    name, found, axis = param.name.partition("_stride_")
    if not found or axis not in _AXIS_INDEX.get(name, ""):
        raise _unknown(record, param)
    tensor = launch.tensors.get(name)
    if tensor is None:
        return 0
    index = _AXIS_INDEX[name].index(axis)
    return tensor.strides[index] if tensor.shape[index] > 1 else 0


_SIZES = ("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim_qk", "head_dim_v")


def _int32(record: KernelRecord, param: Param, problem: Problem) -> int:
    if param.name in _SIZES:
        return int(getattr(problem, param.name))
    rule = record.launch.scalars.get(param.name) or launch_rules.default_scalar_rule(param.name)
    if rule is None:
        raise _unknown(record, param)
    value = launch_rules.scalar(rule, problem)
    if not 0 <= value <= MAX_EXTENT:
        raise BundleError(f"{record.id}: parameter {param.name}: rule {rule.name!r} gives {value}, beyond 32 bits")
    return value


def tensor_map(spec: TensorMapRecord, launch: Launch, where: str) -> TensorMapArgs:
    """What to encode for one tensor map.

    Axes of extent 1 get a legal stride whatever the tensor says (frameworks put 0, 1 or 2^40 there). A tensor without
    elements gets a map of extent 1 over q's memory: the driver refuses a zero extent, and the kernel never loads
    through it.
    """
    name = _TENSOR_OF.get(spec.tensor, spec.tensor)
    if name not in launch.tensors or name == "lse":
        raise BundleError(f"{where}: describes tensor {spec.tensor!r}, unknown to this fmha-gen; install a newer one")
    tensor = launch.tensors[name]
    if spec.element != tensor.dtype:
        raise BundleError(f"{where}: element {spec.element}, tensor {name} holds {tensor.dtype}; the record is damaged")
    item = ITEM_BYTES[tensor.dtype]
    extents = tuple(_extent(tensor, axis.axis, axis.extent, launch, where) for axis in spec.axes)
    memory, strides = name, tuple(_axis_stride(tensor, axis.axis) for axis in spec.axes)
    if 0 in extents:
        memory, extents = "q", tuple(max(1, n) for n in extents)
        strides = tuple(0 for _ in extents)
    row_bytes = -(-extents[0] * item // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES
    return TensorMapArgs(
        tensor=name,
        memory=memory,
        element=spec.element,
        address=launch.tensors[memory].address,
        extents=extents,
        strides_bytes=tuple(s * item if n > 1 else row_bytes for n, s in zip(extents[1:], strides[1:], strict=True)),
        box=tuple(axis.box for axis in spec.axes),
        swizzle=spec.swizzle,
        fill=spec.fill,
        l2_promotion=spec.l2_promotion,
    )


def _extent(tensor: TensorArg, axis: str, quantity: str, launch: Launch, where: str) -> int:
    if quantity not in _SIZES or axis not in "bshd":
        raise BundleError(f"{where}: axis {axis} of extent {quantity!r} is unknown here; install a newer fmha-gen")
    extent = int(getattr(launch.problem, quantity))
    have = tensor.shape["bshd".index(axis)]
    if extent != have:
        raise BundleError(f"{where}: axis {axis} is bounded by {quantity} = {extent}, the tensor has {have}")
    return extent


def _axis_stride(tensor: TensorArg, axis: str) -> int:
    return tensor.strides["bshd".index(axis)]


def _unknown(record: KernelRecord, param: Param) -> BundleError:
    return BundleError(
        f"{record.id}: parameter {param.name} ({param.kind}): unknown to this fmha-gen; the bundle is newer: "
        f"install a newer fmha-gen"
    )
