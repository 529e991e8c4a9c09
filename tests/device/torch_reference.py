"""The float64 reference of `fmha_gen.reference` in torch: seconds where numpy takes minutes, on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch

from fmha_gen.reference import SUBNORMAL, Reference, check

MAX_LOGITS = 2**26  # at a time


def reference(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False) -> Reference:
    """As `fmha_gen.reference.reference`; tensors (batch, seqlen, heads, head_dim) in the kernel's dtype."""
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, dim_v = k.shape[1], v.shape[3]
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    like = {"dtype": torch.float64, "device": q.device}
    out = torch.zeros(batch, seqlen_q, heads, dim_v, **like)
    abs_pv, small_pv, single = (torch.zeros_like(out) for _ in range(3))
    lse = torch.full((batch, heads, seqlen_q), -math.inf, **like)
    if seqlen_k and seqlen_q and batch:
        rows = max(1, MAX_LOGITS // (heads * seqlen_k))
        for b in range(batch):
            kb, vb = (t[b].transpose(0, 1).repeat_interleave(heads // t.shape[2], 0) for t in (k, v))
            for r in range(0, seqlen_q, rows):
                qb = q[b, r : r + rows].transpose(0, 1)
                seen = _seen(r, qb.shape[1], seqlen_q, seqlen_k, q.device) if causal else None
                o, a, small, lse[b, :, r : r + rows] = _in_double(qb.double(), kb.double(), vb.double(), scale, seen)
                for whole, part in ((out, o), (abs_pv, a), (small_pv, small)):
                    whole[b, r : r + rows] = part.transpose(0, 1)
                single[b, r : r + rows] = _in_single(qb, kb, vb, scale, seen).double().transpose(0, 1)
    rms = float((single - out).square().mean().sqrt()) if out.numel() else 0.0
    return Reference(*(t.cpu().numpy() for t in (out, lse, abs_pv, small_pv)), rms)


def problems(out: Any, lse: Any, ref: Reference) -> list[str]:
    """`fmha_gen.reference.check` of torch tensors; [] is right."""
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[out.dtype]
    return check(out.float().cpu().numpy(), None if lse is None else lse.cpu().numpy(), ref, dtype)


def _seen(first: int, rows: int, seqlen_q: int, seqlen_k: int, device: Any) -> Any:
    i = torch.arange(first, first + rows, device=device)[:, None]
    return torch.arange(seqlen_k, device=device)[None, :] <= i + seqlen_k - seqlen_q


def _softmax(logits: Any, seen: Any) -> tuple[Any, Any, Any]:
    """(weights before the division, their sums, shift) of [heads, rows, keys]."""
    if seen is not None:
        logits = logits.masked_fill(~seen, -math.inf)
    top = logits.amax(-1)
    shift = torch.where(top.isinf(), 0, top)
    weights = torch.exp(logits - shift[..., None])
    return weights, weights.sum(-1), shift


def _in_double(q: Any, k: Any, v: Any, scale: float, seen: Any) -> tuple[Any, Any, Any]:
    weights, total, shift = _softmax((q @ k.transpose(1, 2)) * scale, seen)
    total_or_1 = torch.where(total == 0, 1, total)[..., None]
    small = weights.clamp(max=SUBNORMAL["fp16"]) / total_or_1
    weights = weights / total_or_1
    return weights @ v, weights @ v.abs(), small @ v.abs(), total.log() + shift


def _in_single(q: Any, k: Any, v: Any, scale: float, seen: Any) -> Any:
    """float32, P rounded to the kernel's dtype for the second product only; the quotient rounded."""
    logits = (q.float() @ k.float().transpose(1, 2)) * torch.tensor(scale, dtype=torch.float32, device=q.device)
    weights, total, _ = _softmax(logits, seen)
    product = weights.to(q.dtype).float() @ v.float()
    return (product / torch.where(total == 0, 1, total)[..., None]).to(q.dtype)
