"""What attention is: float64 results in the project's conventions, and the tolerance a kernel is held to.

Conventions: tensors are (batch, seqlen, num_heads, head_dim); query head h reads key head h // ratio. Masks are aligned
to the bottom right: key j is visible to row i iff ``j - i - (seqlen_k - seqlen_q)`` lies in [-left, right]; causal is
right = 0. LSE is natural-log, (batch, num_heads_q, seqlen_q). A row without keys gives out 0 and LSE -inf, or the sink.

Tolerance: per element ``|err| <= u*|o| + (u + 2e-4) * sum(p*|v|)`` with u half an ulp of 1 in the kernel's type (and
what subnormals lose of the output and of P), and an RMS error of at most 1.3 times that of a float32 computation that
rounds P to the kernel's type as the kernel does.
LSE within ``2e-4 + 1e-5*|LSE|``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ProblemError

Floats = NDArray[np.floating[Any]]
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
RMS_RATIO = 1.3
RMS_ROWS = 64
SUBNORMAL = {"bf16": 2.0**-134, "fp16": 2.0**-25}  # half the smallest step of the dtype
LSE_ABSOLUTE, LSE_RELATIVE = 2e-4, 1e-5
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Reference:
    """out, abs_pv, small_pv: float64 (batch, seqlen_q, num_heads_q, head_dim_v); lse: (batch, num_heads_q, seqlen_q).

    abs_pv is sum(p*|v|), the scale of the elementwise tolerance. small_pv is sum(min(p, half fp16's smallest step)*|v|)
    over the row sum, p being 1 for the row's largest logit: what an fp16 P can lose of probabilities below fp16's
    normal numbers. rms is the RMS error of the float32 computation against out, NaN when it was not computed.
    """

    out: NDArray[np.float64]
    lse: NDArray[np.float64]
    abs_pv: NDArray[np.float64]
    small_pv: NDArray[np.float64]
    rms: float = math.nan


def round_to(x: Floats, dtype: str) -> NDArray[np.float32]:
    """`x` rounded to nearest even in `dtype` ("bf16" or "fp16"), as float32. NaN stays NaN, too large becomes inf."""
    return from_bits(to_bits(x, dtype), dtype)


def to_bits(x: Floats, dtype: str) -> NDArray[np.uint16]:
    """Bit patterns of `x` rounded to `dtype`. Doubles are rounded once, not through float32."""
    _unit(dtype)
    x = np.asarray(x)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "fp16":
            return x.astype(np.float16).view(np.uint16)
        # Truncate to float32 towards zero with a sticky last bit, so that the second rounding sees every lost bit.
        single = x.astype(np.float32)
        bits = single.view(np.uint32)
        if x.dtype == np.float64:
            away = np.abs(single.astype(np.float64)) > np.abs(x)
            bits = bits - away
            bits = bits | (bits.view(np.float32).astype(np.float64) != x) & np.isfinite(x)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bits(bits: NDArray[np.uint16], dtype: str) -> NDArray[np.float32]:
    """float32 values of `dtype` bit patterns."""
    _unit(dtype)
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def visible(seqlen_q: int, seqlen_k: int, causal: bool, window: Sequence[int | None] | None) -> NDArray[np.bool_]:
    """bool [seqlen_q, seqlen_k]: which keys each row attends to."""
    left, right = (None, None) if window is None else window
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and bound < 0:
            raise ProblemError(f"window: {name} is {bound}; it must be at least 0, or None for no bound")
    if causal:
        right = 0
    ahead = np.arange(seqlen_k)[None, :] - np.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    mask = np.ones((seqlen_q, seqlen_k), bool)
    if right is not None:
        mask &= ahead <= right
    if left is not None:
        mask &= ahead >= -left
    return mask


def attention_fp64(
    q: Floats,
    k: Floats,
    v: Floats,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sink: Floats | None = None,
    seqused_k: Sequence[int] | None = None,
) -> Reference:
    """Attention in float64.

    softmax_scale: default 1/sqrt(head_dim_qk); 0 gives uniform weights. window: (left, right), None is unbounded.
    softcap: ``softcap * tanh(scale * s / softcap)`` before the mask; None or 0 is none. sink: one natural-unit logit
    per query head that joins the sum without a value. seqused_k: keys in use per batch entry (default all); what lies
    behind them, and keys that a row does not see, do not matter, even NaN.

    Raises ProblemError for shapes or values that the conventions do not allow.
    """
    scale = _check(q, k, v, softmax_scale, softcap, sink)
    batch, seqlen_q, heads_q, _ = q.shape
    ratio = heads_q // k.shape[2] if k.shape[2] else 1
    out = np.zeros((batch, seqlen_q, heads_q, v.shape[3]))
    abs_pv, small_pv = np.zeros_like(out), np.zeros_like(out)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf)
    for b in range(batch):
        used = k.shape[1] if seqused_k is None else int(seqused_k[b])
        mask = visible(seqlen_q, used, causal, window)
        for h in range(heads_q):
            kh, vh = (np.asarray(t[b, :used, h // ratio], np.float64) for t in (k, v))
            logits = _logits(np.asarray(q[b, :, h], np.float64), kh, scale, softcap, mask)
            p, lse[b, h], largest = _softmax(logits, None if sink is None else float(sink[h]))
            out[b, :, h] = _weighted(p, vh, mask)
            abs_pv[b, :, h] = _weighted(p, np.abs(vh), mask)
            small_pv[b, :, h] = _weighted(np.minimum(p, SUBNORMAL["fp16"] * largest[:, None]), np.abs(vh), mask)
    return Reference(out, lse, abs_pv, small_pv)


def attention_fp32_rounded_p(
    q: Floats,
    k: Floats,
    v: Floats,
    dtype: str,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sink: Floats | None = None,
) -> NDArray[np.float32]:
    """The kernel's arithmetic without its blocks; shape as `attention_fp64`'s out.

    float32 throughout, P rounded to `dtype` for the second product only (its sum is of unrounded P), the quotient
    rounded to `dtype`.
    """
    scale = _check(q, k, v, softmax_scale, softcap, sink)
    heads_q = q.shape[2]
    ratio = heads_q // k.shape[2] if k.shape[2] else 1
    mask = visible(q.shape[1], k.shape[1], causal, window)
    out = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    for b in range(q.shape[0]):
        for h in range(heads_q):
            qh, kh, vh = (np.asarray(t, np.float32) for t in (q[b, :, h], k[b, :, h // ratio], v[b, :, h // ratio]))
            logits = _logits(qh, kh, float(np.float32(scale)), softcap, mask)
            top = np.max(logits, axis=1, initial=-np.inf)
            top = np.where(np.isfinite(top), top, 0).astype(np.float32)
            p = np.exp2((logits - top[:, None]) * np.float32(_LOG2E))
            total = p.sum(axis=1, dtype=np.float32)
            if sink is not None:
                total = total + np.exp2((np.float32(sink[h]) - top) * np.float32(_LOG2E))
            inverse = np.divide(1, total, out=np.zeros_like(total), where=total > 0)
            out[b, :, h] = _weighted(round_to(p, dtype), vh, mask) * inverse[:, None]
    return round_to(out, dtype)


def reference(q: Floats, k: Floats, v: Floats, dtype: str, **options: Any) -> Reference:
    """`attention_fp64` of inputs already rounded to `dtype`, with the RMS error of `attention_fp32_rounded_p`."""
    ref = attention_fp64(q, k, v, **options)
    if options.get("seqused_k") is not None:
        return ref
    with np.errstate(invalid="ignore"):  # infinite values cancel to NaN: then there is no RMS to compare with
        return replace(ref, rms=_rms(attention_fp32_rounded_p(q, k, v, dtype, **options) - ref.out))


def check(out: Floats, lse: Floats | None, ref: Reference, dtype: str) -> list[str]:
    """Every way in which a kernel's `out` (and `lse`, if given) leave the tolerance around `ref`; [] is right.

    Storing an output below the dtype's smallest normal adds half a subnormal step to the elementwise limit, an fp16 P
    `small_pv`. The RMS criterion applies from RMS_ROWS rows on (a row's elements share its rounded P: below, chance
    dominates the ratio) when `ref.rms` is known.
    """
    problems = []
    for name, got, want in (("out", out, ref.out), ("lse", lse, ref.lse)):
        if got is not None and np.shape(got) != want.shape:
            problems.append(f"{name}: shape {np.shape(got)}; the reference has {want.shape}")
    if problems:
        return problems
    got_out = np.asarray(out, np.float64)
    problems += _exceeding("out", got_out, ref.out, elementwise_limit(ref, dtype))
    if not problems and got_out[..., 0].size >= RMS_ROWS and not math.isnan(ref.rms):
        got_rms, allowed = _rms(got_out - ref.out), RMS_RATIO * ref.rms + 2.0**-22 * _rms(ref.abs_pv)
        if got_rms > allowed:
            problems.append(
                f"out: RMS error {got_rms:.3e}; {RMS_RATIO} x {ref.rms:.3e} (float32, rounded P) allow {allowed:.3e}"
            )
    if lse is not None:
        finite = np.where(np.isfinite(ref.lse), ref.lse, 0)
        problems += _exceeding(
            "lse", np.asarray(lse, np.float64), ref.lse, LSE_ABSOLUTE + LSE_RELATIVE * np.abs(finite)
        )
    return problems


def elementwise_limit(ref: Reference, dtype: str) -> NDArray[np.float64]:
    """The largest error of each element of out."""
    u = _unit(dtype)
    limit: NDArray[np.float64] = u * np.abs(ref.out) + (u + 2e-4) * ref.abs_pv + SUBNORMAL[dtype]
    return limit + ref.small_pv if dtype == "fp16" else limit


def _exceeding(name: str, got: NDArray[np.float64], want: NDArray[np.float64], limit: NDArray[np.float64]) -> list[str]:
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
        bad = ~((got == want) | (error <= limit))
    if not bad.any():
        return []
    # The worst by its share of the limit; anything not finite first.
    share = np.where(bad, np.where(np.isfinite(error), error / np.maximum(limit, 1e-300), np.inf), 0)
    at = np.unravel_index(int(share.argmax()), bad.shape)
    where = ", ".join(str(int(i)) for i in at)
    return [
        f"{name}: {int(bad.sum())} of {bad.size} elements are outside the tolerance; worst at [{where}]: got "
        f"{got[at]:.6g}, reference {want[at]:.6g}, error {error[at]:.3e}, limit {limit[at]:.3e}"
    ]


def _unit(dtype: str) -> float:
    if dtype not in UNIT_ROUNDOFF:
        raise ProblemError(f"dtype {dtype!r}; known are {', '.join(UNIT_ROUNDOFF)}")
    return UNIT_ROUNDOFF[dtype]


def _rms(x: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def _check(
    q: Floats, k: Floats, v: Floats, softmax_scale: float | None, softcap: float | None, sink: Floats | None
) -> float:
    """Validate a problem; the softmax scale in force."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            raise ProblemError(f"{name}: shape {t.shape}; (batch, seqlen, num_heads, head_dim) is expected")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ProblemError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: batch must agree, k and v share seqlen and heads, q and k head_dim"
        )
    if (k.shape[2] == 0 and q.shape[2]) or (k.shape[2] and q.shape[2] % k.shape[2]):
        raise ProblemError(f"num_heads_q {q.shape[2]} is not a multiple of num_heads_kv {k.shape[2]}")
    if sink is not None and (np.shape(sink) != (q.shape[2],) or np.isnan(sink).any() or np.isposinf(sink).any()):
        raise ProblemError(f"sink: {sink}; one number below +inf for each of {q.shape[2]} query heads is expected")
    if softcap is not None and not (math.isfinite(softcap) and softcap >= 0):
        raise ProblemError(f"softcap: {softcap}; it must be finite and at least 0 (0: none)")
    if softmax_scale is None:
        return 1 / math.sqrt(q.shape[3])
    if not (math.isfinite(softmax_scale) and softmax_scale >= 0):
        raise ProblemError(f"softmax_scale: {softmax_scale}; it must be finite and at least 0")
    return float(softmax_scale)


def _logits(q: Floats, k: Floats, scale: float, softcap: float | None, mask: NDArray[np.bool_]) -> Floats:
    """Scaled, capped and then masked logits [rows, keys]; masking last keeps 0 * -inf out."""
    with np.errstate(over="ignore", invalid="ignore"):
        s = (q @ k.T) * scale
    if softcap:
        s = (softcap * np.tanh(s / softcap)).astype(s.dtype)
    return np.where(mask, s, s.dtype.type(-np.inf))


def _softmax(
    logits: Floats, sink: float | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(weights [rows, keys], LSE [rows], weight of a row's largest logit) with the conventions for empty rows."""
    top = np.max(logits, axis=1, initial=-np.inf if sink is None else sink)
    shift = np.where(np.isneginf(top), 0, top)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(logits - shift[:, None])
        total = weights.sum(axis=1)
        if sink is not None:
            total = total + np.exp(sink - shift)
        lse = np.log(total) + shift
        largest = np.divide(1, total, out=np.zeros_like(total), where=total != 0)
    weights = np.divide(weights, total[:, None], out=np.zeros_like(weights), where=total[:, None] != 0)
    return weights, lse, largest


def _weighted(p: Floats, v: Floats, mask: NDArray[np.bool_]) -> Floats:
    """p @ v where keys that a row does not see count nothing, whatever v holds there."""
    if np.isfinite(v).all():
        return p @ v
    with np.errstate(invalid="ignore"):
        return np.stack([np.where(m[:, None], w[:, None] * v, 0).sum(axis=0) for w, m in zip(p, mask, strict=True)])
