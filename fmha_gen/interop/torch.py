"""PyTorch: one operator over a bundle, and functions spelled like the attention calls that code already makes.

    from fmha_gen.interop.torch import flash_attn_func, use_bundle

    use_bundle("out/core-0.1.0")
    out = flash_attn_func(q, k, v, causal=True)

Forward inference only. The operator ``torch.ops.fmha_gen.fwd`` writes `out` and `lse`, traces under ``torch.compile``
(also ``fullgraph=True``) and runs on torch's current stream. A call outside of tracing goes to the launcher directly,
past torch's dispatcher, which costs as much as the launch.

What the kernels of this fmha-gen cannot do is refused by parameter name, also where flash-attn would accept it; a
problem that the bundle has no kernel for raises `SelectionError` with the spec line that adds one. `covers` asks first.
"""

from __future__ import annotations

import os
import threading
from typing import Any

try:
    import torch
    from torch import Tensor
except ImportError as e:
    raise ImportError(f"fmha_gen.interop.torch needs PyTorch ({e}); pip install torch") from e

from ..errors import FmhaGenError, ProblemError
from ..runtime import Bundle, TensorArg
from ..runtime.problem import describe_launch

BUNDLE_VARIABLE = "FMHA_GEN_BUNDLE"
UNBOUNDED = (None, None)

_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, float? softmax_scale=None, bool causal=False)"
    " -> ()"
)
_ORDINALS = ("q", "k", "v", "out", "lse")


# ---- the bundle behind the functions of this module

_lock = threading.Lock()
_bundle: Bundle | None = None


def use_bundle(bundle: Bundle | str | os.PathLike[str]) -> Bundle:
    """Let this process's calls run kernels of `bundle` (opened here if it is a path), and return it.

    Without this call the first one opens the bundle that the environment variable FMHA_GEN_BUNDLE names. `preload` and
    `freeze` the result before a graph capture. Raises BundleError.
    """
    global _bundle
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    with _lock:
        _bundle = opened
    return opened


def current_bundle() -> Bundle:
    """The bundle in use. Raises ProblemError when none was named, BundleError."""
    return _bundle if _bundle is not None else _first_bundle()


def _first_bundle() -> Bundle:
    global _bundle
    with _lock:
        if _bundle is None:
            path = os.environ.get(BUNDLE_VARIABLE)
            if not path:
                raise ProblemError(
                    f"bundle: none in use; call fmha_gen.interop.torch.use_bundle(PATH) or set {BUNDLE_VARIABLE}"
                )
            _bundle = Bundle.open(path)
        return _bundle


# ---- the operator


def _run(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False,
) -> None:  # fmt: skip
    """Launch on torch's current stream of q's device."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or out.requires_grad):
        _refuse_grad(q, k, v, out)
    device, stream = q.get_device(), 0
    if device >= 0:
        stream = torch._C._cuda_getCurrentRawStream(device)
    elif q.is_meta:
        return  # shapes without memory: there is nothing to compute
    bundle = _bundle if _bundle is not None else _first_bundle()
    bundle.attend(q, k, v, out, lse, (causal, None, softmax_scale, None, None, None, None), stream)


def _trace(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False,
) -> None:  # fmt: skip
    """What tracing sees: outputs are given, so that nothing is made. A problem without a kernel fails when it runs."""
    _refuse_grad(q, k, v, out)


def _refuse_grad(*tensors: Tensor) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in zip(_ORDINALS, tensors, strict=False):
        if tensor.requires_grad:
            raise ProblemError(
                f"{name}: requires grad; these kernels compute the forward pass only, and the result would be cut off "
                f"from the graph; call under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
            )


_library = torch.library.Library("fmha_gen", "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CUDA", "CPU"):  # on CPU tensors the launcher says in words what is wrong, or the simulator runs
    _library.impl("fwd", _run, _key)
torch.library.register_fake("fmha_gen::fwd", _trace, lib=_library)
_op = torch.ops.fmha_gen.fwd.default

_num_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: -1)  # a torch that does not say


def _launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, softmax_scale: float | None, causal: bool
) -> None:
    """The operator, or its kernel directly where nothing stands between: plain tensors, no tracing, no modes."""
    if (
        not torch.compiler.is_dynamo_compiling()  # other tracing has modes or tensors of its own
        and type(q) is type(k) is type(v) is type(out) is Tensor
        and _num_dispatch_modes() == 0
    ):
        _run(q, k, v, out, lse, softmax_scale, causal)
    else:
        _check_tensors(q=q, k=k, v=v, out=out)
        if lse is not None:
            _check_tensors(lse=lse)
        _op(q, k, v, out, lse, softmax_scale, causal)


def _check_tensors(**named: Any) -> None:
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ProblemError(f"{name}: {type(tensor).__name__} is no torch tensor; pass one")


# ---- flash-attn's spelling


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = UNBOUNDED,
    softcap: float | None = 0.0,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    return_lse: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    attention_chunk: int = 0,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T) v: the forward inference subset of flash-attn 2, 3 and 4.

    q (batch, seqlen_q, num_heads_q, head_dim_qk); k, v (batch, seqlen_k, num_heads_kv, head_dim_qk | head_dim_v); bf16
    or fp16; any strides with a unit last one, so that BHSD views, slices of a fused QKV and expanded heads are not
    copied. Options are given by name: flash-attn's versions order them differently.

    softmax_scale: default 1/sqrt(head_dim_qk). causal: bottom-right aligned, as in flash-attn.
    window_size: (left, right); None or any negative number is unbounded. (unbounded, 0) is causal, and causal means
    right = 0, as in flash-attn. A bounded window is not built yet.
    return_lse or return_attn_probs: also return lse, float32 (batch, num_heads_q, seqlen_q), natural logarithm.
    out, lse: tensors to write into; a given lse is returned too.
    deterministic: the forward pass always is. num_splits: 0 (flash-attn's own choice) and 1 run unsplit.
    Everything else must keep the value that switches it off.

    A query without keys: out 0, lse -inf. Returns out, or (out, lse).
    Raises ProblemError, SelectionError, BundleError, DriverError.
    """
    if window_size is not UNBOUNDED or type(causal) is not bool:  # as defaults need no call
        causal = _flash_mask(causal, window_size)
    try:
        off = (
            softcap, dropout_p, num_splits, pack_gqa, sm_margin, attention_chunk, alibi_slopes, learnable_sink, s_aux,
            qv, q_descale, k_descale, v_descale,
        ) == _OFF  # fmt: skip
    except RuntimeError:  # a tensor of several values is neither true nor false
        off = False
    if not off:
        _refuse_flash_options(
            softcap=softcap, dropout_p=dropout_p, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin,
            attention_chunk=attention_chunk, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, s_aux=s_aux,
            qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
    if softmax_scale is not None:
        _check_scale("softmax_scale", softmax_scale)
    if out is None:
        out = _empty_out(q, v)
    if lse is None and (return_lse or return_attn_probs):
        lse = _empty_lse(q)
    _launch(q, k, v, out, lse, softmax_scale, causal)
    return out if lse is None else (out, lse)


def _flash_mask(causal: Any, window_size: Any) -> bool:
    """Whether the mask is causal. Raises ProblemError for a bounded window and for wrong types."""
    if not isinstance(causal, bool):
        raise ProblemError(f"causal: {causal!r} is no bool; pass True or False")
    if window_size is UNBOUNDED or window_size is None:
        return causal
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ProblemError(f"window_size: {window_size!r}; it is a pair (left, right); None or -1 is unbounded")
    left, right = window_size
    for bound in (left, right):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise ProblemError(f"window_size: {window_size!r}; a bound is an int, or None or negative for unbounded")
    left_bounded = left is not None and left >= 0
    right_bounded = right is not None and right >= 0
    if left_bounded or (right_bounded and right != 0 and not causal):
        raise ProblemError(
            f"window_size: {tuple(window_size)}: bounded windows are not built yet; pass (-1, -1), or causal=True"
        )
    return causal or right_bounded


_OFF = (0.0, 0.0, 1, None, 0, 0, None, None, None, None, None, None, None)  # one comparison says that all are

# parameter of flash-attn -> what it would need
_NEEDS = {
    "softcap": "kernels with softcap",
    "dropout_p": "dropout, which inference has none of",
    "num_splits": "split-KV kernels; pass 1",
    "pack_gqa": "kernels that pack grouped heads; pass None",
    "sm_margin": "a grid that leaves multiprocessors free",
    "attention_chunk": "kernels with chunked masks",
    "alibi_slopes": "kernels with ALiBi",
    "learnable_sink": "kernels with a sink",
    "s_aux": "kernels with a sink",
    "qv": "kernels with a second query operand",
    "q_descale": "fp8 kernels",
    "k_descale": "fp8 kernels",
    "v_descale": "fp8 kernels",
}


def _refuse_flash_options(**given: Any) -> None:
    """Name the first option that asks for what is not built, if one does."""
    for name, value in given.items():
        is_tensor = isinstance(value, Tensor)
        off = not is_tensor and (value in (0, 1) if name == "num_splits" else not value)
        if not off:
            shown = f"tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
            raise ProblemError(f"{name}: {shown}: not built yet: it needs {_NEEDS[name]}; leave it out")


def _check_scale(name: str, scale: Any) -> None:
    """A tensor would be read back from the device, which waits for it. Raises ProblemError."""
    if isinstance(scale, Tensor):
        raise ProblemError(f"{name}: a tensor; reading it would wait for the device; pass a Python float")


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    """An output for `q`, dense in q's own order of axes where q is dense."""
    if not isinstance(q, Tensor) or not isinstance(v, Tensor):
        _check_tensors(q=q, v=v)
    if q.dim() != 4 or v.dim() != 4:
        raise ProblemError(
            f"q: shape {tuple(q.shape)}, v: shape {tuple(v.shape)}; wanted 4 axes each: (batch, seqlen, num_heads, "
            f"head_dim); reshape them"
        )
    head_dim_v = v.shape[3]
    return torch.empty_like(q) if q.shape[3] == head_dim_v else q.new_empty((*q.shape[:3], head_dim_v))


def _empty_lse(q: Tensor) -> Tensor:
    if not isinstance(q, Tensor):
        _check_tensors(q=q)
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


# ---- torch's spelling


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` for what the bundle's kernels can do, without a copy.

    query (batch, num_heads_q, seqlen_q, head_dim_qk); key, value (batch, num_heads_kv, seqlen_k, ...): views with any
    strides but a unit last one. Returns (batch, num_heads_q, seqlen_q, head_dim_v), laid out as (batch, seqlen_q,
    num_heads_q, head_dim_v).
    is_causal: torch aligns the mask top-left, these kernels bottom-right: equal lengths only.
    enable_gqa: needed where num_heads_kv differs from num_heads_q, as in torch.

    Raises ProblemError for attn_mask, dropout and causal on unequal lengths; SelectionError, BundleError, DriverError.
    """
    _check_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    _launch(q, k, v, out, None, scale, is_causal)
    return out.transpose(1, 2)


def _check_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float, is_causal: Any, scale: Any,
    enable_gqa: bool,
) -> None:  # fmt: skip
    if attn_mask is not None:
        raise ProblemError("attn_mask: not built: the kernels know full and causal masks; pass None, or is_causal=True")
    if isinstance(dropout_p, Tensor) or dropout_p:
        raise ProblemError(f"dropout_p: {dropout_p}: inference has no dropout; pass 0.0")
    if not isinstance(is_causal, bool):
        raise ProblemError(f"is_causal: {is_causal!r} is no bool; pass True or False")
    _check_scale("scale", scale)
    for name, t in (("query", query), ("key", key), ("value", value)):
        _check_tensors(**{name: t})
        if t.dim() != 4:
            raise ProblemError(
                f"{name}: shape {tuple(t.shape)} has {t.dim()} axes; wanted 4: (batch, num_heads, seqlen, head_dim); "
                f"reshape it"
            )
    if is_causal and query.shape[2] != key.shape[2]:
        raise ProblemError(
            f"is_causal: seqlen_q {query.shape[2]}, seqlen_k {key.shape[2]}: torch aligns the causal mask top-left, "
            f"these kernels bottom-right, and the two agree for equal lengths only; flash_attn_func aligns bottom-right"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ProblemError(
            f"enable_gqa: False, with {query.shape[1]} query heads on {key.shape[1]} KV heads; pass enable_gqa=True"
        )


# ---- asking first


def covers(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = UNBOUNDED,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> list[str]:
    """Why `flash_attn_func` would refuse these tensors and options; empty when it runs them.

    Launches and loads nothing. Shapes as in `flash_attn_func`. Without tensors: `Bundle.covers`.
    """
    try:
        causal = _flash_mask(causal, window_size)
        _check_scale("softmax_scale", softmax_scale)
        _check_tensors(q=q, k=k, v=v)
        if not isinstance(return_lse, bool):
            raise ProblemError(f"return_lse: {type(return_lse).__name__} is no bool; pass True or False")
        _refuse_grad(q, k, v)
        bundle, item = current_bundle(), str(q.dtype).removeprefix("torch.")
        dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(item, item)
        shape = (*q.shape[:3], *v.shape[3:])
        out = TensorArg.contiguous(1 << 62, shape, dtype, q.get_device())  # beyond whatever q, k and v are
        lse = TensorArg.contiguous(1 << 63, (q.shape[0], q.shape[2], q.shape[1]), "float32", q.get_device()) if (
            return_lse and q.dim() == 4
        ) else None  # fmt: skip
        launch = describe_launch(q, k, v, out, lse, causal=causal, softmax_scale=softmax_scale)
        return list(bundle.covers(launch.problem, bundle.driver.device_of(launch.tensors)))
    except FmhaGenError as e:
        return [str(e)]


__all__ = ["covers", "current_bundle", "flash_attn_func", "scaled_dot_product_attention", "use_bundle"]
