"""One kernel against its cases: numbers, bits, canaries, findings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import FmhaGenError
from ..manifest import KernelEntry
from ..reference import Reference, check, elementwise_limit, from_bits, reference, round_to
from .bench import Bench
from .buffers import Buffer, canary_problem, make_input, make_output
from .cases import Case, inputs

MAX_PROBLEMS = 4  # per kernel; a broken one fails everywhere


@dataclass(frozen=True)
class CaseVerdict:
    """What one case showed. worst_error: largest error as a share of its bound. seeds: under which it ran."""

    name: str
    seeds: tuple[int, ...]
    worst_error: float
    problems: tuple[str, ...]


@dataclass(frozen=True)
class KernelVerdict:
    """What all cases showed of one kernel. seconds: wall time. skipped: why it could not run here, or None."""

    id: str
    ptx_sha256: str
    cubin_sha256: str
    cases: tuple[CaseVerdict, ...]
    seconds: float
    skipped: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that is wrong, each with its case."""
        return tuple(f"{c.name}: {p}" for c in self.cases for p in c.problems)

    @property
    def passed(self) -> bool:
        """Ran, and nothing is wrong."""
        return self.skipped is None and not self.problems

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    @property
    def num_problems(self) -> int:
        """Cases that ran."""
        return len(self.cases)

    @property
    def num_seeds(self) -> int:
        """Scheduler seeds under which the bits were compared."""
        return max((len(c.seeds) for c in self.cases), default=0)

    @property
    def worst_error(self) -> float:
        """Largest error of any element as a share of its bound; 1 is the limit."""
        return max((c.worst_error for c in self.cases), default=0.0)


@dataclass
class Outcome:
    """Bits of one run."""

    out: NDArray[np.uint16]
    lse: NDArray[np.float32] | None


@dataclass
class KernelCheck:
    """Runs the cases of one kernel."""

    bench: Bench
    entry: KernelEntry
    seeds: Sequence[int]
    _references: dict[tuple[str, float | None], Reference] = field(default_factory=dict)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self, cases: Sequence[Case], ptx_sha256: str, cubin_sha256: str) -> KernelVerdict:
        """Every case until too much is wrong."""
        start = time.perf_counter()
        verdicts: list[CaseVerdict] = []
        if not self.entry.serves.lse:
            cases = [replace(case, lse=False) for case in cases]
        for case in cases:
            verdicts.append(self.case(case))
            if sum(len(v.problems) for v in verdicts) >= MAX_PROBLEMS:
                break
        return KernelVerdict(self.entry.id, ptx_sha256, cubin_sha256, tuple(verdicts), time.perf_counter() - start)

    def case(self, case: Case) -> CaseVerdict:
        """One case under its seeds: right numbers under the first, the same bits under the others."""
        seeds = tuple(self.seeds) if case.all_seeds else (self.seeds[0],)
        problems: list[str] = []
        worst, first = 0.0, None
        for seed in seeds:
            outcome, wrong = self._execute(case, seed)
            problems.extend(f"seed {seed}: {w}" for w in wrong)
            if outcome is None:
                break
            if first is None:
                first = self._outcomes[case.name] = outcome
                worst, wrong = self._numbers(case, outcome)
                problems.extend(wrong)
            else:
                problems.extend(f"seed {seed}: {d}" for d in different_bits(outcome, first, f"seed {seeds[0]}"))
            if problems:
                break
        same = self._outcomes.get(case.same_bits_as or "")
        if first is not None and same is not None:
            problems.extend(different_bits(first, same, f"{case.same_bits_as!r}"))
        return CaseVerdict(case.name, seeds, worst, tuple(problems))

    def _execute(self, case: Case, seed: int) -> tuple[Outcome | None, list[str]]:
        """What the kernel wrote, and what is wrong without looking at the numbers."""
        buffers = self._buffers(case)
        try:
            self.bench.run(self.entry.id, case, buffers, self._causal, seed)
        except FmhaGenError as e:
            return None, [str(e)]
        outputs = [b for name, b in buffers.items() if name in ("out", "lse")]
        wrong = [problem for b in outputs if (problem := canary_problem(b))]
        lse = np.array(buffers["lse"].view) if case.lse else None
        return Outcome(np.array(buffers["out"].view), lse), wrong

    def _buffers(self, case: Case) -> dict[str, Buffer]:
        serves = self.entry.serves
        dtype = serves.dtype
        q, k, v = inputs(case, serves.head_dim_qk, serves.head_dim_v)
        buffers = {n: make_input(n, a, dtype, case.layout, case.poison) for n, a in (("q", q), ("k", k), ("v", v))}
        out_shape = (case.batch, case.seqlen_q, case.heads_q, serves.head_dim_v)
        buffers["out"] = make_output("out", out_shape, dtype, case.layout)
        if case.lse:
            buffers["lse"] = make_output("lse", (case.batch, case.heads_q, case.seqlen_q), "float32", case.layout)
        return buffers

    def _numbers(self, case: Case, outcome: Outcome) -> tuple[float, list[str]]:
        """(largest error as a share of its bound, what is outside the tolerance)."""
        dtype = self.entry.serves.dtype
        ref = self._reference(case)
        out = from_bits(outcome.out, dtype)
        wrong = check(out, outcome.lse, ref, dtype)
        bound = elementwise_limit(ref, dtype)
        with np.errstate(invalid="ignore"):
            error = np.where(out == ref.out, 0.0, np.abs(out - ref.out))
        share = np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0), where=bound > 0)
        return float(np.max(np.nan_to_num(share, nan=np.inf), initial=0.0)), wrong

    def _reference(self, case: Case) -> Reference:
        key = (case.inputs_name, case.scale)
        if key not in self._references:
            serves = self.entry.serves
            q, k, v = (round_to(a, serves.dtype) for a in inputs(case, serves.head_dim_qk, serves.head_dim_v))
            self._references[key] = reference(q, k, v, serves.dtype, softmax_scale=case.scale, causal=self._causal)
        return self._references[key]

    @property
    def _causal(self) -> bool:
        return self.entry.serves.masks == ("causal",)


def different_bits(got: Outcome, want: Outcome, other: str) -> list[str]:
    """How two runs on the same inputs differ."""
    differing = []
    for name, a, b in (("out", got.out, want.out), ("lse", got.lse, want.lse)):
        if a is None or b is None:
            continue
        bits_a, bits_b = (x.view(np.uint32) if x.dtype == np.float32 else x for x in (a, b))
        count = int(np.count_nonzero(bits_a != bits_b))
        if count:
            differing.append(f"{name}: {count} of {a.size} elements have other bits than under {other}")
    return differing
