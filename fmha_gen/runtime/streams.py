"""Stream arguments: whatever names a CUDA stream becomes its raw handle."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import ProblemError
from . import arguments
from .tensors import HOST

MAX_HANDLE = 2**64 - 1


def stream_handle(stream: Any, tensor: Any, needed: bool = True) -> int:
    """The raw handle of `stream`.

    An int is taken as it is; objects name it by ``__cuda_stream__`` (CUDA's Python protocol), ``cuda_stream`` (torch)
    or ``handle``. None means torch's current stream on `tensor`'s device; for other tensors it is an error, because
    silently using the default stream would race with work on any other. needed=False: the driver has no streams.
    Raises ProblemError.
    """
    if type(stream) is int:
        return stream
    if stream is None:
        return _current_stream(tensor, needed)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    handle = getattr(stream, "cuda_stream", getattr(stream, "handle", None))
    if handle is not None:
        return int(handle)
    if not hasattr(stream, "__index__") or isinstance(stream, bool):
        raise ProblemError(f"stream: {type(stream).__name__} names no CUDA stream; pass its raw handle as an int")
    return arguments.integer("stream", stream, "the raw handle of a CUDA stream as an int", 0, MAX_HANDLE)


def _current_stream(tensor: Any, needed: bool) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor) and (device := tensor.get_device()) >= 0:
        return torch._C._cuda_getCurrentRawStream(device)
    if needed:
        if _in_host_memory(tensor):
            raise ProblemError(
                "q: in host memory; a CUDA launch needs q, k, v and out in device memory; copy them there "
                "(torch: .cuda()), or open the bundle with fmha_gen.sim.driver.SimDriver"
            )
        raise ProblemError("stream: not given, and q is no torch tensor; pass the raw handle (0: default stream)")
    return 0


def _in_host_memory(tensor: Any) -> bool:
    device = getattr(tensor, "device", None)  # torch's, or a TensorArg's ordinal
    return device == HOST or getattr(device, "type", None) == "cpu" or hasattr(tensor, "__array_interface__")
