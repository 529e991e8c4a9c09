"""Which kernel of a bundle serves a problem, and why the others do not: what ``fmha-gen explain`` says.

Nothing is loaded or launched, and no GPU is needed: the decision is the launcher's own (`fmha_gen.runtime.select`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import DriverError, ProblemError, SelectionError
from .manifest import KernelEntry, Manifest
from .runtime import Device, Problem, covers, select
from .runtime import explain as trace_of
from .runtime.cuda import CudaDriver
from .runtime.driver import ARCH_CAPABILITY
from .runtime.problem import resolve_mask
from .runtime.select import matching, not_built, preferred, spec_lines

ANY_SMS = 1  # selection does not look at it


@dataclass(frozen=True)
class Verdict:
    """One kernel. state: ``chosen``, ``serves`` (another one is better) or ``rejected``; why: in words."""

    kernel: str
    state: str
    why: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The launcher's decision.

    kernel: the chosen one, None where none serves; then `reasons` is what `covers` says and `spec_lines` what to add,
    or `not_built` why no spec can add one.
    verdicts: every kernel, the chosen one first, then by how close it is.
    """

    problem: str
    device: str
    kernel: str | None
    reasons: tuple[str, ...]
    spec_lines: tuple[str, ...]
    not_built: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    def report(self) -> dict[str, Any]:
        """The keys of ``fmha-gen explain --json``."""
        return {
            "problem": self.problem, "device": self.device, "kernel": self.kernel, "reasons": list(self.reasons),
            "spec_lines": list(self.spec_lines), "not_built": list(self.not_built),
            "kernels": [{"id": v.kernel, "state": v.state, "why": list(v.why)} for v in self.verdicts],
        }  # fmt: skip


def explain(manifest: Manifest, problem: Problem, device: Device, variant: str | None = None) -> Explanation:
    """What the launcher would choose. variant: a glob over kernel ids, as the launcher's ``variant=``. Pure."""
    chosen: KernelEntry | None
    try:
        chosen = select(manifest, problem, device, variant)
    except SelectionError:
        if variant is not None and not matching(manifest.kernels, variant):
            raise
        chosen = None
    asked = {e.id for e in matching(manifest.kernels, variant)}
    verdicts = []
    for entry, why in trace_of(manifest, problem, device):
        if entry.id not in asked:
            why = (*why, f"variant {variant!r} does not match")
        verdicts.append(_verdict(entry, why, chosen, problem))
    order = {"chosen": 0, "serves": 1, "rejected": 2}
    verdicts.sort(key=lambda v: (order[v.state], len(v.why), v.kernel))
    name = chosen.id if chosen else None
    about = problem.describe(), device.describe(), name
    if chosen:
        return Explanation(*about, (), (), (), tuple(verdicts))
    if variant is not None and not covers(manifest, problem, device):
        other = select(manifest, problem, device).id
        reasons: tuple[str, ...] = (f"{other} serves it, but variant {variant!r} leaves it out",)
        return Explanation(*about, reasons, (), (), tuple(verdicts))
    reasons = covers(manifest, problem, device)
    return Explanation(*about, reasons, spec_lines(problem, device), not_built(problem, device), tuple(verdicts))


def _verdict(entry: KernelEntry, why: tuple[str, ...], chosen: KernelEntry | None, problem: Problem) -> Verdict:
    if why:
        return Verdict(entry.id, "rejected", why)
    assert chosen is not None, "a kernel that serves is chosen, if no better one is"
    if entry.id == chosen.id:
        return Verdict(entry.id, "chosen", _rows(entry, problem))
    if preferred(entry, problem) != preferred(chosen, problem):
        return Verdict(entry.id, "serves", _rows(entry, problem))
    if entry.rank != chosen.rank:
        return Verdict(entry.id, "serves", (f"rank {entry.rank} comes after rank {chosen.rank}",))
    return Verdict(entry.id, "serves", ("same rank, later id",))


def _rows(entry: KernelEntry, problem: Problem) -> tuple[str, ...]:
    """For how many query rows the kernel is the better choice."""
    serves = entry.serves
    if serves.max_rows is not None:
        bounds = f"{serves.min_rows} to {serves.max_rows}"
    elif serves.min_rows:
        bounds = f"{serves.min_rows} and more"
    else:
        return ()
    return (f"for {bounds} query rows; the problem has {problem.packed_rows}",)


def make_problem(
    manifest: Manifest, *, head_dim: int, head_dim_v: int | None = None, dtype: str | None = None, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, batch: int = 1, seqlen_q: int = 4096,
    seqlen_k: int | None = None, heads: int = 16, heads_kv: int | None = None, softcap: bool = False,
    sink: bool = False, lse: bool = False,
) -> Problem:  # fmt: skip
    """A problem from a few options. dtype: bf16 where the bundle has it. Raises ProblemError."""
    mask, bounds = resolve_mask(causal, window)
    if dtype is None:
        dtypes = sorted({e.serves.dtype for e in manifest.kernels})
        dtype = dtypes[0] if dtypes else "bf16"
    features = tuple(name for name, wanted in (("sink", sink), ("softcap", softcap)) if wanted)
    return Problem(
        dtype=dtype, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_q if seqlen_k is None else seqlen_k,
        num_heads_q=heads, num_heads_kv=heads if heads_kv is None else heads_kv, head_dim_qk=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v, mask=mask, window=bounds, features=features, lse=lse,
    )  # fmt: skip


def device_for(manifest: Manifest, arch: str | None) -> Device:
    """A device of `arch`; without one, this machine's GPU, else a device of the bundle's only architecture.

    Raises ProblemError for an architecture that is unknown, or must be named.
    """
    if arch is None:
        try:
            return CudaDriver().device(0)
        except DriverError:
            archs = sorted({e.arch for e in manifest.kernels})
            if len(archs) != 1:
                raise ProblemError(
                    f"arch: this machine has no GPU, and the bundle holds {', '.join(archs) or 'no kernels'}; "
                    f"say which with --arch"
                ) from None
            arch = archs[0]
    known = {name.replace("_", ""): name for name in ARCH_CAPABILITY} | {name: name for name in ARCH_CAPABILITY}
    if arch not in known:
        raise ProblemError(f"arch: {arch!r}: not a known target; use one of {', '.join(ARCH_CAPABILITY)}")
    name = known[arch]
    return Device(0, f"any {name} device", ARCH_CAPABILITY[name], ANY_SMS, 0)


__all__ = ["Explanation", "Verdict", "device_for", "explain", "make_problem"]
