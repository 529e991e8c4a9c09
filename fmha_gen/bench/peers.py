"""What users would otherwise run, through PyTorch where it is installed: cuDNN's attention, FlashAttention-3.

Peers read the very memory that our kernels read; nothing is copied.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from ..runtime import TensorArg
from .cases import Case
from .timing import Contender

PEERS = ("cudnn", "fa3")
_PACKAGE = {"cudnn": "torch", "fa3": "fa3_fwd_interface"}
TITLES = {"cudnn": "cuDNN", "fa3": "FlashAttention-3"}


def available() -> tuple[str, ...]:
    """The peers whose packages are installed, where torch sees a GPU."""
    if not importlib.util.find_spec("torch"):
        return ()
    import torch

    return tuple(p for p in PEERS if torch.cuda.is_available() and importlib.util.find_spec(_PACKAGE[p]))


class Peers:
    """The peers `names` on one device. Use inside `session`."""

    def __init__(self, names: tuple[str, ...], ordinal: int) -> None:
        import torch

        self.torch, self.names, self.ordinal = torch, names, ordinal
        self._fa3: Any = importlib.import_module("fa3_fwd_interface").flash_attn_func if "fa3" in names else None

    @contextlib.contextmanager
    def session(self) -> Iterator[Peers]:
        """Peers may run inside: on device `ordinal`, without autograd, and torch's attention is cuDNN's only."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with self.torch.cuda.device(self.ordinal), self.torch.inference_mode():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                yield self

    def versions(self) -> dict[str, str]:
        """Of torch and of what each peer is."""
        found = {"torch": str(self.torch.__version__)}
        if "cudnn" in self.names:
            v = int(self.torch.backends.cudnn.version() or 0)
            found["cudnn"] = f"{v // 10000}.{v % 10000 // 100}.{v % 100}"
        if "fa3" in self.names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found["fa3"] = importlib.metadata.version("fa3-fwd")
        return found

    def tensor(self, arg: TensorArg) -> Any:
        """A torch tensor over device memory."""
        array = type("Memory", (), {})()
        array.__cuda_array_interface__ = {
            "shape": arg.shape, "typestr": "<i2", "data": (arg.address, False), "version": 3,
            "strides": tuple(2 * s for s in arg.strides),
        }  # fmt: skip
        dtype = self.torch.bfloat16 if arg.dtype == "bf16" else self.torch.float16
        return self.torch.as_tensor(array, device=f"cuda:{self.ordinal}").view(dtype)

    def contender(self, name: str, case: Case, sets: list[dict[str, TensorArg]]) -> Contender:
        """`name` on these input sets; launch(i) returns its (batch, seqlen, heads, head_dim) output."""
        tensors = [tuple(self.tensor(s[n]) for n in "qkv") for s in sets]
        call = self._cudnn_call(case, tensors) if name == "cudnn" else self._fa3_call(case, tensors)
        return Contender(name, call)

    def _cudnn_call(self, case: Case, tensors: list[Any]) -> Callable[[int], Any]:
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        causal = case.problem.mask == "causal"
        options: dict[str, Any] = {"enable_gqa": True} if case.problem.ratio > 1 else {}
        views = [tuple(t.transpose(1, 2) for t in qkv) for qkv in tensors]
        return lambda i: sdpa(*views[i], is_causal=causal, **options).transpose(1, 2)

    def _fa3_call(self, case: Case, tensors: list[Any]) -> Callable[[int], Any]:
        call, causal = self._fa3, case.problem.mask == "causal"
        return lambda i: call(*tensors[i], causal=causal)

    def difference(self, ours: TensorArg, theirs: Any) -> float:
        """RMS of the difference over RMS of theirs; NaN where either is."""
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        a, b = self.tensor(ours).float(), theirs.float()
        return float((a - b).norm() / b.norm())

    def matrix_product_tflops(self) -> float:
        """What an 8192^3 bf16 matrix product reaches here: the rate that the device holds under full load."""
        torch, n = self.torch, 8192
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        times = []
        for i in range(13):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.mm(a, b)
            end.record()
            if i >= 3:
                times.append((start, end))
        torch.cuda.synchronize()
        ms = sorted(s.elapsed_time(e) for s, e in times)[len(times) // 2]
        return 2 * n**3 / ms / 1e9
