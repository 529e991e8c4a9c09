"""The problem of one launch: sizes, mask and scale, checked in plain words before anything else happens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ProblemError
from . import arguments
from .overlap import check_overlap
from .tensors import ITEM_BYTES, TensorArg, as_tensor

MAX_EXTENT = 2**31 - 1  # lengths and head counts are 32-bit in the kernels, as are TMA coordinates
TMA_ALIGN_BYTES = 16
TMA_STRIDE_LIMIT_BYTES = 2**40
_STRIDE_LIMIT = TMA_STRIDE_LIMIT_BYTES // 4  # elements of 32 bits, and a safe one of 16
LOG2_E = math.log2(math.e)
F32_SMALLEST_NORMAL = 2.0**-126
F32_MAX = 3.4028234663852886e38
ELEMENTS = ("bf16", "fp16")
AXES = {
    "q": ("batch", "seqlen_q", "num_heads_q", "head_dim_qk"),
    "k": ("batch", "seqlen_k", "num_heads_kv", "head_dim_qk"),
    "v": ("batch", "seqlen_k", "num_heads_kv", "head_dim_v"),
    "out": ("batch", "seqlen_q", "num_heads_q", "head_dim_v"),
    "lse": ("batch", "num_heads_q", "seqlen_q"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes and options of a dense attention launch, without addresses: what selects a kernel.

    dtype: ``bf16`` or ``fp16``, of q, k, v and out. mask: ``full``, ``causal`` (bottom-right aligned) or ``window``.
    window: (left, right) around the bottom-right diagonal, inclusive, None unbounded; only with mask ``window``.
    features: what the launch asks for beyond that (``softcap``, ``sink``, ...), sorted.
    softmax_scale: finite and >= 0, natural units. lse: whether the log-sum-exp is wanted.

    Raises ProblemError for sizes or values that no kernel could serve.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    mask: str = "full"
    window: tuple[int | None, int | None] | None = None
    features: tuple[str, ...] = ()
    softmax_scale: float | None = None
    lse: bool = False

    def __post_init__(self) -> None:
        for name in ("dtype", "mask"):
            if not isinstance(getattr(self, name), str):
                raise arguments.wrong(name, getattr(self, name), "a name as a string")
        if not isinstance(self.features, (tuple, list)) or not all(isinstance(f, str) for f in self.features):
            raise arguments.wrong("features", self.features, "a tuple of names, e.g. ('sink',)")
        if not isinstance(self.lse, bool):
            raise arguments.wrong("lse", self.lse, "True or False")
        self._check_window()
        for name in ("batch", "seqlen_q", "seqlen_k"):
            _check_extent(name, getattr(self, name), 0)
        for name in ("num_heads_q", "num_heads_kv", "head_dim_qk", "head_dim_v"):
            _check_extent(name, getattr(self, name), 1)
        if self.num_heads_q % self.num_heads_kv:
            raise ProblemError(
                f"num_heads_q: {self.num_heads_q} with num_heads_kv {self.num_heads_kv}; every KV head serves the same "
                f"number of q heads, and {self.num_heads_q} / {self.num_heads_kv} is no whole number; "
                f"pass a multiple of num_heads_kv"
            )
        if self.softmax_scale is None:
            object.__setattr__(self, "softmax_scale", 1.0 / math.sqrt(self.head_dim_qk))
        else:
            object.__setattr__(self, "softmax_scale", check_scale(self.softmax_scale))

    def _check_window(self) -> None:
        if (self.window is None) != (self.mask != "window"):
            raise ProblemError(
                f"window: {self.window!r} with mask {self.mask!r}; bounds belong to mask 'window' and to no other; "
                f"`resolve_mask(causal, window)` gives both"
            )
        if self.window is not None and resolve_mask(False, self.window) != ("window", self.window):
            raise ProblemError(f"window: {self.window!r} bounds nothing, or is causal; `resolve_mask` gives its mask")

    @property
    def ratio(self) -> int:
        """q heads that share one KV head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def packed_rows(self) -> int:
        """Query rows that one sequence of tiles walks: seqlen_q, times the ratio when q heads are packed into rows."""
        return packed_rows(self, self.features)

    @property
    def softmax_scale_log2(self) -> float:
        """softmax_scale * log2(e), what the kernels multiply by before exp2; at least the smallest normal float32.

        A scale of zero asks for uniform weights. Kernels mark masked scores -inf before they scale, and 0 * -inf is
        NaN; 2^-126 gives the same weights for every score below 2^116 and keeps -inf.
        """
        assert self.softmax_scale is not None
        return max(self.softmax_scale * LOG2_E, F32_SMALLEST_NORMAL)

    @property
    def empty(self) -> bool:
        """No queries: nothing is computed and nothing is launched."""
        return self.batch == 0 or self.seqlen_q == 0

    def describe(self) -> str:
        """One line for errors."""
        dims = str(self.head_dim_qk)
        if self.head_dim_v != self.head_dim_qk:
            dims = f"({self.head_dim_qk}, {self.head_dim_v})"
        mask = f"window {self.window}" if self.window else self.mask
        more = "".join(f", {f}" for f in self.features) + (", lse" if self.lse else "")
        return (
            f"{self.dtype} head_dim {dims}, {mask} mask, batch {self.batch}, seqlen {self.seqlen_q} x "
            f"{self.seqlen_k}, heads {self.num_heads_q}/{self.num_heads_kv}{more}"
        )


def resolve_mask(causal: bool, window: Any) -> tuple[str, tuple[int | None, int | None] | None]:
    """(mask, window) of a launch; `None` is the one spelling of an unbounded side.

    ``(None, None)`` is ``full``, ``(None, 0)`` is ``causal``; causal with a bounded left is a window of right 0.
    Raises ProblemError for negative bounds, other types, and causal with right > 0.
    """
    if not isinstance(causal, bool):
        raise ProblemError(f"causal: {causal!r} is no bool; pass True or False")
    if window is None:
        return ("causal" if causal else "full"), None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ProblemError(f"window: {window!r}; it is a pair (left, right), each a number of keys or None (unbounded)")
    left = _window_bound("window_left", window[0])
    right = _window_bound("window_right", window[1])
    if causal:
        if right not in (None, 0):
            raise ProblemError(
                f"window_right: {right} with causal=True; causal means window_right = 0; drop one of the two"
            )
        right = 0
    if left is None and right in (None, 0):
        return ("full" if right is None else "causal"), None
    return "window", (left, right)


def _window_bound(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ProblemError(f"{name}: {value!r} is no integer; pass a number of keys >= 0, or None for no bound")
    value = int(value.__index__())
    if value < 0:
        raise ProblemError(
            f"{name}: {value} is negative; bounds are inclusive numbers of keys >= 0; unbounded is spelled None, not -1"
        )
    return value


def check_scale(value: Any) -> float:
    """A softmax scale as float. Raises ProblemError by name: not a number, not finite, negative, beyond float32."""
    scale = arguments.number("softmax_scale", value, "a float >= 0, or None for 1/sqrt(head_dim_qk)")
    if not math.isfinite(scale):
        raise ProblemError(f"softmax_scale: {scale} is not finite; pass a float >= 0, or None for 1/sqrt(head_dim_qk)")
    if scale < 0:
        raise ProblemError(
            f"softmax_scale: {scale} is negative; the row maximum is taken before scaling, which needs scale >= 0; "
            f"negate q instead"
        )
    if scale * LOG2_E > F32_MAX:
        raise ProblemError(
            f"softmax_scale: {scale} x log2(e) is beyond the float32 range (at most {F32_MAX:.4g}); scale q instead"
        )
    return scale


def _check_extent(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ProblemError(f"{name}: {value!r} is no int; pass a Python integer")
    if not least <= value <= MAX_EXTENT:
        raise ProblemError(f"{name}: {value}; it must be in {least}..{MAX_EXTENT} (32 bits in the kernel)")


class Sizes(NamedTuple):
    """The sizes of a `Problem`, cheap to make: what launch rules and packing read."""

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int


def packed_rows(sizes: Sizes | Problem, features: tuple[str, ...]) -> int:
    """Query rows that one sequence of tiles walks."""
    ratio = sizes.num_heads_q // sizes.num_heads_kv if "pack_gqa" in features else 1
    return sizes.seqlen_q * ratio


class Memory(NamedTuple):
    """The tensors of a launch in ADDRESS_ORDER; lse is (0, None, None) where it is not wanted. Strides in elements."""

    addresses: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    strides: tuple[Any, ...]


class Launch(NamedTuple):
    """A problem with its tensors, all checked: q, k, v, out and, if wanted, lse."""

    problem: Problem
    tensors: Mapping[str, TensorArg]
    sizes: Sizes
    memory: Memory


def describe_launch(
    q: Any, k: Any, v: Any, out: Any, lse: Any = None, *, causal: bool = False, window: Any = None,
    softmax_scale: Any = None, features: tuple[str, ...] = (), dtype: str | None = None,
    served: tuple[str, ...] = ELEMENTS,
) -> Launch:  # fmt: skip
    """Read and check the tensors of a dense launch.

    q (batch, seqlen_q, num_heads_q, head_dim_qk); k and v (batch, seqlen_k, num_heads_kv, head_dim_qk | head_dim_v);
    out as q with head_dim_v; lse (batch, num_heads_q, seqlen_q) float32, or None when it is not wanted.
    Any strides with a unit last one; 16-byte aligned addresses and strides, since the TMA unit reads them. out and lse
    share no element with another tensor.
    dtype: element type of 16-bit integer arrays; others must have it already. served: dtypes that the bundle holds, for
    the message.
    Raises ProblemError naming the tensor, what it has and what is wanted.
    """
    mask, bounds = resolve_mask(causal, window)
    named = {"q": q, "k": k, "v": v, "out": out} | ({} if lse is None else {"lse": lse})
    tensors = {name: as_tensor(obj, name, None if name == "lse" else dtype) for name, obj in named.items()}
    _check_ranks(tensors)
    _check_dtypes(tensors, served, dtype)
    (batch, seqlen_q, heads, dim), (_, seqlen_k, heads_kv, _) = tensors["q"].shape, tensors["k"].shape
    sizes = Sizes(tensors["q"].dtype, batch, seqlen_q, seqlen_k, heads, heads_kv, dim, tensors["v"].shape[3])
    problem = Problem(*sizes, mask, bounds, tuple(sorted(features)), softmax_scale, lse is not None)
    _check_shapes(sizes, tensors)
    _check_devices(tensors)
    memory = _memory([tensors.get(name) for name in AXES])
    if not plain(memory):
        for name, tensor in tensors.items():
            check_layout(name, tensor)
    check_overlap(*memory)
    return Launch(problem, tensors, sizes, memory)


def _memory(given: list[TensorArg | None]) -> Memory:
    return Memory(
        tuple([0 if t is None else t.address for t in given]),
        tuple([None if t is None else t.shape for t in given]),
        tuple([None if t is None else t.strides for t in given]),
    )


def _check_ranks(tensors: Mapping[str, TensorArg]) -> None:
    for name, t in tensors.items():
        rank = 3 if name == "lse" else 4
        if len(t.shape) != rank:
            raise ProblemError(
                f"{name}: shape {t.shape} has {len(t.shape)} axes; wanted {rank}: ({', '.join(AXES[name])}); reshape it"
            )
        if len(t.strides) != rank:
            raise ProblemError(f"{name}: {len(t.strides)} strides for shape {t.shape}; wanted one per axis")


def _check_dtypes(tensors: Mapping[str, TensorArg], served: tuple[str, ...], asked: str | None) -> None:
    found = {name: t.dtype for name, t in tensors.items() if name != "lse"}
    if len(set(found.values())) > 1 or found["q"] not in ELEMENTS:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        hint = " (16-bit integers hold bit patterns: say which with dtype=)" if "uint16" in found.values() else ""
        raise ProblemError(
            f"dtype: {listed}; q, k, v and out must share one of {', '.join(served)}, which is what the bundle holds"
            f"{hint}; convert them"
        )
    if asked is not None and found["q"] != asked:
        raise ProblemError(
            f"dtype: {asked}, but q, k, v and out are {found['q']}; dtype= is for tensors that hold bit patterns "
            f"(uint16); leave it out, or convert the tensors"
        )
    if "lse" in tensors and tensors["lse"].dtype != "float32":
        raise ProblemError(f"lse: dtype {tensors['lse'].dtype}; wanted float32; allocate it as float32")


def _check_shapes(sizes: Sizes, tensors: Mapping[str, TensorArg]) -> None:
    for name, t in tensors.items():
        wanted = tuple([getattr(sizes, axis) for axis in AXES[name]])
        if t.shape != wanted:
            given = ", ".join(f"{other} {tensors[other].shape}" for other in ("q", "k", "v"))
            raise ProblemError(f"{name}: shape {t.shape}; wanted {wanted} = ({', '.join(AXES[name])}), from {given}")


def _check_devices(tensors: Mapping[str, TensorArg]) -> None:
    known = {name: t.device for name, t in tensors.items() if t.device is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name} on {'host' if d < 0 else f'cuda:{d}'}" for name, d in known.items())
        raise ProblemError(f"device: {listed}; all tensors of a launch must be on one device; copy them there")


def plain(memory: Memory) -> bool:
    """Whether `check_layout` surely finds nothing wrong with any of the tensors."""
    q, k, v, out, lse = memory.strides
    a, b, c, d, e = memory.addresses
    if lse is not None:
        x, y, z = lse
        if not e or e & 3 or not (x > 0 and y > 0 and z > 0 and x | y | z < _STRIDE_LIMIT):
            return False
    # bitwise or: negative if one of them is, below a power of two if all are, a multiple of 8 if all are
    bits = q[0] | q[1] | q[2] | k[0] | k[1] | k[2] | v[0] | v[1] | v[2] | out[0] | out[1] | out[2]
    return bool(
        0 <= bits < _STRIDE_LIMIT
        and not bits & 7
        and out[0] and out[1] and out[2]
        and q[3] == k[3] == v[3] == out[3] == 1
        and a and b and c and d
        and not (a | b | c | d) & 15
    )  # fmt: skip


def check_layout(name: str, t: TensorArg) -> None:
    """Alignment and strides that the hardware needs; axes of extent 1 take any stride, empty tensors any address."""
    item = ITEM_BYTES[t.dtype]
    if t.numel == 0:
        return
    align = item if name == "lse" else TMA_ALIGN_BYTES
    if t.address == 0:
        raise ProblemError(f"{name}: null pointer for shape {t.shape}; pass the tensor's memory")
    if t.address % align:
        multiple = f"{align // item} elements" if align > item else f"{align} bytes"
        raise ProblemError(
            f"{name}: pointer must be {align}-byte aligned, is at offset {t.address % align} ({t.address:#x}); "
            f"copy the tensor or slice it at a multiple of {multiple}"
        )
    limit = TMA_STRIDE_LIMIT_BYTES // item
    step = 1 if name == "lse" else align // item
    least = 1 if name in ("out", "lse") else 0
    last = len(t.shape) - 1
    for axis, (extent, stride) in enumerate(zip(t.shape, t.strides, strict=True)):
        if axis == last and name != "lse":
            fine = stride == 1
        else:
            fine = least <= stride < limit and not stride % step
        if not fine and extent > 1:
            raise _bad_stride(name, t, axis, stride * item)


def _bad_stride(name: str, t: TensorArg, axis: int, stride_bytes: int) -> ProblemError:
    """What is wrong with one stride."""
    what = f"{name}: stride of axis {axis} ({AXES[name][axis]}) is {t.strides[axis]} elements"
    if stride_bytes < 0:
        return ProblemError(f"{what}; negative strides are not supported; copy the tensor")
    if stride_bytes == 0 and name in ("out", "lse"):
        return ProblemError(f"{what}; an output must not write one element twice; allocate it without expanding")
    if axis == len(t.shape) - 1 and name != "lse":
        return ProblemError(f"{what}; the last axis must be contiguous (stride 1); copy the tensor")
    if stride_bytes >= TMA_STRIDE_LIMIT_BYTES:
        return ProblemError(
            f"{what} = {stride_bytes} bytes; the TMA unit addresses strides below 2^40 = {TMA_STRIDE_LIMIT_BYTES}; "
            f"use a smaller buffer"
        )
    return ProblemError(
        f"{what} = {stride_bytes} bytes; it must be a multiple of {TMA_ALIGN_BYTES} bytes; pad the rows"
    )
