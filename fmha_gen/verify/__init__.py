"""Verification of a bundle: every kernel executed, in the simulator or on a GPU, before anybody relies on it.

`verify_bundle` runs each kernel on the problems of `cases` through the public launcher and compares with the float64
reference. In the simulator every check is on (the ``isa`` profile): a kernel that gives right numbers by luck, with a
fence or a wait missing, fails too. ``proof.json`` records what passed, keyed by kernel, PTX and cubin digests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError, ProblemError, SelectionError
from ..manifest import KernelEntry, Manifest
from ..manifest_io import read_cubin, read_line_map, read_manifest, read_plan, read_ptx, read_record
from ..output_file import check_output, write_output
from ..runtime.select import matching
from .bench import open_bench
from .cases import full_cases, quick_cases
from .kernel import CaseVerdict, KernelCheck, KernelVerdict
from .pool import Task, side_by_side, under_limit

PROOF_NAME = "proof.json"
PROOF_FORMAT = (1, 0)
QUICK_SEEDS, FULL_SEEDS = 3, 8
TIME_LIMIT_S = 120.0

Progress = Callable[[KernelVerdict, int, int], None]


@dataclass(frozen=True)
class VerifyOptions:
    """driver: ``sim`` or ``cuda``. only: glob over kernel ids. seeds: how many scheduler seeds (on a GPU: repetitions)
    must give the same bits, default 3 quick and 8 full. quick: the short list of problems. proof: where proof.json
    goes, default into the bundle. jobs: processes, default one per core. time_limit_s: for each kernel on a GPU; the
    simulator has limits of its own."""

    driver: str = "sim"
    only: str | None = None
    seeds: int | None = None
    quick: bool = False
    proof: str | None = None
    jobs: int | None = None
    time_limit_s: float = TIME_LIMIT_S
    progress: Progress | None = None


@dataclass(frozen=True)
class Report:
    """The verdicts, in the manifest's order, and where the proof was written."""

    kernels: tuple[KernelVerdict, ...]
    proof_path: str
    driver: str
    quick: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Nothing failed, and something ran."""
        return any(k.passed for k in self.kernels) and not any(k.failed for k in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``fmha-gen verify --json``."""
        return {
            "passed": self.passed, "driver": self.driver, "quick": self.quick, "seconds": round(self.seconds, 3),
            "proof": self.proof_path,
            "kernels": [
                {
                    "id": k.id, "passed": k.passed, "skipped": k.skipped, "problems": list(k.problems),
                    "cases": k.num_problems,
                    "seeds": k.num_seeds, "worst_error": _finite(k.worst_error), "seconds": round(k.seconds, 3),
                }
                for k in self.kernels
            ],
        }  # fmt: skip


def verify_bundle(bundle: str | os.PathLike[str], options: VerifyOptions) -> Report:
    """Verify the kernels of a bundle and write the proof.

    A failing kernel is in the report, not an exception; so is one for another architecture, as skipped.

    Raises BundleError for a damaged bundle, SelectionError when `only` matches nothing, FileError when the proof
    cannot be written, VerifyError when a worker died, DriverError where `cuda` has no device.
    """
    start = time.perf_counter()
    if options.driver not in ("sim", "cuda"):
        raise ProblemError(f"driver: {options.driver!r}; verify runs on sim or cuda")
    manifest = read_manifest(bundle)
    entries = matching(manifest.kernels, options.only)
    if not entries:
        held = ", ".join(e.id for e in manifest.kernels) or "nothing"
        bundle_name = f"{manifest.name} {manifest.version}"
        if options.only is None:
            raise SelectionError(f"{bundle}: bundle {bundle_name} holds no kernel; there is nothing to verify")
        raise SelectionError(f"--only {options.only}: matches no kernel of {bundle_name}: {held}")
    target = Path(options.proof) if options.proof else Path(bundle) / PROOF_NAME
    _check_writable(target)
    tasks = [_task(bundle, entry, options) for entry in entries]
    done: dict[str, KernelVerdict] = {}
    for verdict in _run_all(tasks, options):
        done[verdict.id] = verdict
        if options.progress is not None:
            options.progress(verdict, len(done), len(tasks))
    verdicts = tuple(done[e.id] for e in entries)
    report = Report(verdicts, str(target), options.driver, options.quick, time.perf_counter() - start)
    write_proof(target, manifest, report)
    return report


def _task(bundle: str | os.PathLike[str], entry: KernelEntry, options: VerifyOptions) -> Task:
    """What a worker needs. A proof names the digests of files that were there: all are read and checked first."""
    record = read_record(bundle, entry)
    read_cubin(bundle, record)
    read_ptx(bundle, record)
    read_plan(bundle, record)
    read_line_map(bundle, record)
    digests = record.ptx.sha256, record.cubin.sha256
    return Task(str(bundle), entry.id, options.driver, options.quick, options.seeds, *digests)


def _run_all(tasks: list[Task], options: VerifyOptions) -> Iterator[KernelVerdict]:
    if options.driver == "cuda":
        return under_limit(verify_kernel, tasks, options.time_limit_s)
    return side_by_side(verify_kernel, tasks, options.jobs)


def verify_kernel(task: Task) -> KernelVerdict:
    """Verify one kernel in this process."""
    entry = _entry(read_manifest(task.bundle), task.kernel)
    bench = open_bench(task.driver, task.bundle)
    skipped = bench.refuses(entry)
    if skipped is not None:
        return KernelVerdict(entry.id, task.ptx_sha256, task.cubin_sha256, (), 0.0, skipped)
    count = task.seeds or (QUICK_SEEDS if task.quick else FULL_SEEDS)
    check = KernelCheck(bench, entry, range(count))
    cases = quick_cases() if task.quick else full_cases()
    return check.run(cases, task.ptx_sha256, task.cubin_sha256)


def _entry(manifest: Manifest, kernel: str) -> KernelEntry:
    return next(e for e in manifest.kernels if e.id == kernel)


def write_proof(target: Path, manifest: Manifest, report: Report) -> None:
    """Write proof.json whole. Earlier entries of kernels that were not verified now are kept, and a full one outlives a
    quick one of the same files that passed.

    Entries are keyed by kernel id and carry the digests of the PTX and cubin that they speak of: an entry whose digests
    are not those of the bundle's files proves nothing about it. Raises FileError.
    """
    kernels = _earlier(target)
    for k in report.kernels:
        if k.skipped is not None:
            continue
        entry = {
            "passed": k.passed, "driver": report.driver, "mode": "quick" if report.quick else "full",
            "ptx_sha256": k.ptx_sha256, "cubin_sha256": k.cubin_sha256, "cases": [_case(c) for c in k.cases],
        }  # fmt: skip
        if not (report.quick and k.passed and _is_full(kernels.get(k.id), entry)):
            kernels[k.id] = entry
    data = {
        "format_version": list(PROOF_FORMAT), "bundle": manifest.name, "bundle_version": manifest.version,
        "kernels": dict(sorted(kernels.items())),
    }  # fmt: skip
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_output(target, lambda file: file.write(text.encode()))
    except OSError as e:
        raise _not_writable(target, e) from None


def _is_full(earlier: Any, entry: dict[str, Any]) -> bool:
    """Whether the earlier entry shows more than the quick `entry`, of the same files on the same driver."""
    keys = ("passed", "driver", "ptx_sha256", "cubin_sha256")
    return isinstance(earlier, dict) and earlier.get("mode") == "full" and all(earlier.get(k) == entry[k] for k in keys)


def _earlier(target: Path) -> dict[str, Any]:
    if not target.is_file():  # none yet, or a pipe, which has nothing to read
        return {}
    try:
        data = json.loads(target.read_text())
        kernels = data["kernels"] if data["format_version"][0] == PROOF_FORMAT[0] else {}
        return dict(kernels)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}  # none, or none that this version understands: it is written anew


def _case(c: CaseVerdict) -> dict[str, Any]:
    return {
        "name": c.name, "seeds": list(c.seeds), "worst_error": _finite(c.worst_error), "problems": list(c.problems),
    }  # fmt: skip


def _finite(x: float) -> float | None:
    return round(x, 4) if x < float("inf") else None


def _check_writable(target: Path) -> None:
    """Fail before the work, not after it."""
    try:
        check_output(target)
    except OSError as e:
        raise _not_writable(target, e) from None


def _not_writable(target: Path, e: OSError) -> FileError:
    return FileError(f"{target}: cannot be written ({e.strerror}); name another place with --proof FILE")


__all__ = ["CaseVerdict", "KernelVerdict", "Report", "Task", "VerifyOptions", "verify_bundle", "verify_kernel"]
