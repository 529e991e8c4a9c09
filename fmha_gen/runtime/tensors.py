"""What the launcher knows of a tensor: address, shape, strides, dtype, device. No tensor library is imported.

`as_tensor` reads torch tensors (through their methods), anything with ``__cuda_array_interface__``, ``__dlpack__`` or
``__array_interface__`` (numpy), or a `TensorArg` that the caller filled in from a raw pointer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ..errors import ProblemError
from . import arguments

MAX_ADDRESS = 2**64 - 1
MAX_ORDINAL = 2**31 - 1
HOST = -1  # `TensorArg.device` of memory that no GPU owns (numpy arrays, for the simulator)

_TYPESTR = {
    "<f2": "fp16", "<V2": "bf16", "|V2": "bf16", "<f4": "float32", "<f8": "float64",
    "<i4": "int32", "<i8": "int64", "<u4": "uint32", "<u2": "uint16", "|u1": "uint8", "|i1": "int8", "|b1": "bool",
}  # fmt: skip
_TORCH = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_DLPACK = {
    (2, 16): "fp16", (4, 16): "bf16", (2, 32): "float32", (2, 64): "float64", (0, 32): "int32", (0, 64): "int64",
    (1, 32): "uint32", (1, 16): "uint16",
}  # fmt: skip
ITEM_BYTES = {
    "bf16": 2, "fp16": 2, "uint16": 2, "float32": 4, "float64": 8, "int32": 4, "uint32": 4, "int64": 8, "uint8": 1,
    "int8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A strided tensor in memory.

    address: of element (0, ..., 0), bytes. shape, strides: per axis; strides in elements.
    dtype: ``bf16``, ``fp16``, ``float32``, ... device: CUDA ordinal, `HOST`, or None when it is not known.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None = None

    @classmethod
    def contiguous(cls, address: int, shape: tuple[int, ...], dtype: str, device: int | None = None) -> TensorArg:
        """A dense row-major tensor at a raw pointer."""
        shape = arguments.extents("shape", shape)
        return cls(address, shape, contiguous_strides(shape), dtype, device)

    @property
    def numel(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements; axes after an empty one count as if it held one element."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def as_tensor(obj: Any, name: str, dtype: str | None = None) -> TensorArg:
    """Describe `obj`, which arguments and errors call `name`.

    dtype: what its elements are, where the object cannot say it (bf16 kept as uint16 bit patterns).
    Raises ProblemError when `obj` is no tensor, or is not laid out in whole elements.
    """
    arg = _describe(obj, name)
    if dtype is not None and arg.dtype == "uint16" and ITEM_BYTES.get(dtype) == 2:
        return TensorArg(arg.address, arg.shape, arg.strides, dtype, arg.device)
    return arg


def _describe(obj: Any, name: str) -> TensorArg:
    if isinstance(obj, TensorArg):
        return _checked(obj, name)
    if type(obj).__module__.partition(".")[0] == "torch" and hasattr(obj, "data_ptr"):
        return _from_torch(obj)
    if (interface := getattr(obj, "__cuda_array_interface__", None)) is not None:
        return _from_array_interface(interface, name, None)
    if (interface := getattr(obj, "__array_interface__", None)) is not None:
        return _from_array_interface(interface, name, HOST)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _from_dlpack(obj, name)
    raise ProblemError(
        f"{name}: {type(obj).__name__} is no tensor; pass an object with __cuda_array_interface__ or __dlpack__, "
        f"or a TensorArg(address, shape, strides, dtype)"
    )


def _checked(t: TensorArg, name: str) -> TensorArg:
    """What a caller filled in, in plain types. Raises ProblemError."""
    if not isinstance(t.dtype, str):
        raise arguments.wrong(f"{name}: dtype", t.dtype, "a name as a string, e.g. 'bf16'")
    device = t.device
    if device is not None:
        device = arguments.integer(f"{name}: device", device, "a CUDA ordinal, or None", HOST, MAX_ORDINAL)
    address = arguments.integer(f"{name}: address", t.address, "an address in bytes", 0, MAX_ADDRESS)
    shape, strides = arguments.extents(f"{name}: shape", t.shape), arguments.extents(f"{name}: strides", t.strides)
    if shape is t.shape and strides is t.strides and address is t.address and device is t.device:
        return t
    return TensorArg(address, shape, strides, t.dtype, device)


def _from_torch(t: Any) -> TensorArg:
    dtype = str(t.dtype)
    device = t.get_device()
    return TensorArg(
        t.data_ptr(), tuple(t.shape), tuple(t.stride()), _TORCH.get(dtype, dtype.removeprefix("torch.")), device
    )


def _from_array_interface(interface: Any, name: str, device: int | None) -> TensorArg:
    shape = tuple(int(n) for n in interface["shape"])
    dtype = _TYPESTR.get(interface["typestr"], interface["typestr"])
    byte_strides = interface.get("strides")
    if byte_strides is None:
        return TensorArg(_address(interface, name), shape, contiguous_strides(shape), dtype, device)
    item = ITEM_BYTES.get(dtype, 1)
    for axis, stride in enumerate(byte_strides):
        if stride % item and shape[axis] > 1:
            raise ProblemError(
                f"{name}: stride of axis {axis} is {stride} bytes, no multiple of the {item}-byte {dtype} element; "
                f"make it contiguous"
            )
    return TensorArg(_address(interface, name), shape, tuple(s // item for s in byte_strides), dtype, device)


def _address(interface: Any, name: str) -> int:
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise ProblemError(f"{name}: its array interface has no data pointer; pass an array that owns its memory")
    return int(data[0] or 0)


class _DLTensor(ctypes.Structure):
    """DLTensor of the DLPack ABI (dlpack.h), which is a DLManagedTensor's first member."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13


def _capsule(obj: Any, on_device: bool) -> Any:
    """A DLPack capsule without synchronisation: the launch is ordered on the stream that the caller names."""
    if not on_device:
        return obj.__dlpack__()
    try:
        return obj.__dlpack__(stream=-1)
    except RuntimeError:  # JAX 0.11 takes -1 for the handle of a stream; without one, it does not synchronise either
        return obj.__dlpack__()


def _from_dlpack(obj: Any, name: str) -> TensorArg:
    """Read a DLPack capsule and drop it: the caller keeps `obj`, and with it the memory, alive."""
    capsule = _capsule(obj, on_device=int(obj.__dlpack_device__()[0]) in (_DL_CUDA, _DL_CUDA_MANAGED))
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    t = _DLTensor.from_address(get(capsule, b"dltensor"))
    shape = tuple(t.shape[i] for i in range(t.ndim))
    strides = tuple(t.strides[i] for i in range(t.ndim)) if t.strides else contiguous_strides(shape)
    if t.device_type not in (_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED):
        raise ProblemError(f"{name}: DLPack device type {t.device_type}; only CUDA and host memory can be used")
    dtype = _DLPACK.get((t.code, t.bits), f"DLPack type {t.code} of {t.bits} bits") if t.lanes == 1 else "vector"
    device = HOST if t.device_type == _DL_CPU else int(t.device_id)
    return TensorArg(int(t.data or 0) + int(t.byte_offset), shape, strides, dtype, device)
