"""What packing means, written out: every parameter looked up by name in every launch. `Packer` must give the same."""

from __future__ import annotations

from fmha_gen import launch_rules
from fmha_gen.manifest import KernelRecord, Param, TensorMapRecord
from fmha_gen.runtime.driver import Argument, PackedLaunch, TensorMapArgs
from fmha_gen.runtime.problem import Launch
from fmha_gen.runtime.tensors import ITEM_BYTES

AXES = {"q": "bshd", "k": "bshd", "v": "bshd", "out": "bshd", "lse": "bhs"}
ROW_ALIGN_BYTES = 16


def pack(record: KernelRecord, launch: Launch, num_sms: int, override: bool = False) -> PackedLaunch | None:
    """As `fmha_gen.runtime.pack.pack`, for records and launches without faults."""
    if launch.problem.empty:
        return None
    grid = launch_rules.grid(record.launch.grid, launch.problem, num_sms, override)
    while grid % record.launch.cluster[0]:
        grid += 1
    return PackedLaunch(
        kernel=record.id,
        symbol=record.symbol,
        grid=(grid, 1, 1),
        block=(record.launch.threads, 1, 1),
        cluster=record.launch.cluster,
        dynamic_smem_bytes=record.launch.dynamic_smem_bytes,
        kinds=tuple(p.kind for p in record.params),
        names=tuple(p.name for p in record.params),
        args=tuple(_argument(record, p, launch) for p in record.params),
    )


def _argument(record: KernelRecord, param: Param, launch: Launch) -> Argument:
    if param.tensor_map is not None:
        return _tensor_map(param.tensor_map, launch)
    if param.kind == "pointer":
        tensor = launch.tensors.get(param.name)
        return 0 if tensor is None else tensor.address
    if param.kind == "i64":
        name, axis = param.name.split("_stride_")
        tensor, index = launch.tensors.get(name), AXES[name].index(axis)
        return 0 if tensor is None or tensor.shape[index] == 1 else tensor.strides[index]
    if param.name == "softmax_scale_log2":
        return launch.problem.softmax_scale_log2
    if hasattr(launch.problem, param.name):
        return int(getattr(launch.problem, param.name))
    rule = record.launch.scalars.get(param.name) or launch_rules.default_scalar_rule(param.name)
    assert rule is not None
    return launch_rules.scalar(rule, launch.problem)


def _tensor_map(spec: TensorMapRecord, launch: Launch) -> TensorMapArgs:
    name = {"o": "out"}.get(spec.tensor, spec.tensor)
    tensor, item = launch.tensors[name], ITEM_BYTES[spec.element]
    memory = name
    extents = [int(getattr(launch.problem, axis.extent)) for axis in spec.axes]
    strides = [tensor.strides["bshd".index(axis.axis)] for axis in spec.axes]
    if 0 in extents:
        memory, extents, strides = "q", [max(1, n) for n in extents], [0] * len(extents)
    row_bytes = -(-extents[0] * item // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES
    return TensorMapArgs(
        tensor=name,
        memory=memory,
        element=spec.element,
        address=launch.tensors[memory].address,
        extents=tuple(extents),
        strides_bytes=tuple(s * item if n > 1 else row_bytes for n, s in zip(extents[1:], strides[1:], strict=True)),
        box=tuple(axis.box for axis in spec.axes),
        swizzle=spec.swizzle,
        fill=spec.fill,
        l2_promotion=spec.l2_promotion,
    )
