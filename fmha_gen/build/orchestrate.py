"""The build: every stage for every kernel, in order, with the compilations side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle import KernelFiles, check_target, write_bundle
from ..compiler import DSL_VERSION, MIN_DRIVER, CompiledKernel, CompileJob, code_digest, compile_kernel, kill_running
from ..compiler.gates import Expected
from ..compiler.toolchain import python_version
from ..errors import CompileError, FmhaGenError, PlanError, SpecError
from ..launch_rules import default_scalar_rule
from ..manifest import FileRecord, KernelRecord, LaunchRecord, Toolchain, id_matches
from ..plan import KernelPlan, make_plan
from ..render import render
from ..spec import BundleHeader, KernelSpec, check_identities
from .cache import BuildCache, default_cache_dir
from .hints import spec_hint
from .identity import build_digest, generator
from .jobs import choose_jobs
from .keep import Dropped, keep

if TYPE_CHECKING:
    from ..render import Rendered

_NO_FILE = FileRecord("", "", 0)


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What became of one kernel. state: ``planned`` (dry run), ``cached``, ``compiled``, ``kept`` or ``failed``.

    ``kept``: not asked for now, and in the bundle from a build before. seconds: compile time, that of the first
    compilation for a cached kernel, 0 for one that was kept. cubin_bytes: 0 unless there is a cubin.
    """

    id: str
    arch: str
    state: str
    seconds: float = 0.0
    cubin_bytes: int = 0
    registers: int = 0
    problem: str = ""


Progress = Callable[[KernelResult, int, int], None]  # (kernel, kernels done, kernels in all)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build; nothing here changes what a kernel is.

    jobs: kernels compiled side by side; None: one per processor. Memory limits either. only: glob on kernel ids. arch:
    one architecture of the spec. What the two leave out stays in the bundle if it is of this build: see `keep`.
    dry_run: plan and render only. source: ship rendered sources. executor: runs the compilations elsewhere (any
    `concurrent.futures` executor; the task is picklable and pure); the caller owns it.
    """

    jobs: int | None = None
    only: str | None = None
    arch: str | None = None
    dry_run: bool = False
    source: bool = False
    time_limit_s: float = 600.0
    cache_dir: Path | None = None
    executor: Executor | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class BuildResult:
    """root: the bundle's folder (of a dry run: where it would be). files_written counts files that changed.

    dropped: what the bundle held before and does not hold now.
    """

    root: Path
    kernels: tuple[KernelResult, ...]
    jobs: int
    files_written: int = 0
    dropped: tuple[Dropped, ...] = ()

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(sorted({k.arch for k in self.kernels}))

    @property
    def cubin_bytes(self) -> int:
        return sum(k.cubin_bytes for k in self.kernels)

    def count(self, state: str) -> int:
        return sum(k.state == state for k in self.kernels)


@dataclass(frozen=True, slots=True)
class BuildItem:
    """One kernel on its way. key: its build digest."""

    plan: KernelPlan
    rendered: Rendered
    job: CompileJob
    key: str

    @property
    def id(self) -> str:
        return self.job.id


def build_bundle(
    header: BundleHeader, specs: Sequence[KernelSpec], out_dir: Path, options: BuildOptions | None = None
) -> BuildResult:
    """Build ``out_dir/<name>-<version>/`` from `specs`, all that the bundle may hold.

    Raises SpecError (nothing to build, clashing ids), PlanError (every variant that does not fit), ToolchainError,
    CompileError (every kernel that failed; nothing is written), BundleError (the folder holds something else or cannot
    be written; said before anything is compiled).
    """
    options = options or BuildOptions()
    root = out_dir / f"{header.name}-{header.version}"
    chosen, others = _plan(specs, options)
    sources = [(plan, render(plan)) for plan in chosen]
    if options.dry_run:
        return BuildResult(root, tuple(KernelResult(p.spec.id, p.spec.arch, "planned") for p, _ in sources), 0)
    check_target(root)
    cache, code = BuildCache(options.cache_dir or default_cache_dir()), code_digest()

    def make(plan: KernelPlan, rendered: Rendered | None = None) -> BuildItem:
        return make_item(plan, rendered or render(plan), code, str(cache.log_dir), options.time_limit_s)

    items = [make(plan, rendered) for plan, rendered in sources]
    jobs = choose_jobs(options.jobs, len(items))
    compiled, results = _compile_all(items, cache, jobs, options)
    failures = [r for r in results if r.state == "failed"]
    if failures:
        saved = f"{len(results) - len(failures)} of {len(results)} kernels compiled"
        if len(results) > len(failures):
            saved += " and are kept for the next try"
        raise CompileError("\n".join([*(r.problem for r in failures), f"{saved}; {root} was not written"]))
    kept = keep(root, [i.id for i in items], others, make)
    done = [(i, c) for i, c in zip(items, compiled, strict=True) if c is not None] + list(kept.kernels)
    kernels = [_kernel_files(item, kernel, options.source) for item, kernel in done]
    written = write_bundle(
        root, header.name, header.version, generator(), _toolchain([c for _, c in done]), MIN_DRIVER, kernels
    )
    results += [_result(item, kernel, "kept") for item, kernel in kept.kernels]
    return BuildResult(root, tuple(results), jobs, written.files_written, kept.dropped)


def _plan(specs: Sequence[KernelSpec], options: BuildOptions) -> tuple[list[KernelPlan], list[KernelPlan]]:
    """Plans of the specs that the options select, and of the others; every problem of every spec in one error.

    What another architecture than the one asked for cannot fit is no problem of this build.
    """
    only, arch = options.only, options.arch
    plans: list[KernelPlan] = []
    elsewhere: list[KernelPlan] = []
    problems = []
    for spec in specs:
        here = arch is None or spec.arch == arch
        try:
            (plans if here else elsewhere).append(make_plan(spec))
        except PlanError as e:
            if here:
                problems.append(str(e))
    if problems:
        raise PlanError("\n".join(problems))
    check_identities(p.spec for p in plans)
    if not plans:
        raise SpecError(["no kernel to build: the spec files expand to nothing; check archs, include and exclude"])
    chosen = [p for p in plans if only is None or id_matches(p.spec.id, only)]
    if not chosen:
        ids = "\n  ".join(p.spec.id for p in plans)
        raise SpecError([f"--only {only}: matches none of the {len(plans)} kernels:\n  {ids}"])
    taken = {p.spec.id for p in chosen}
    return chosen, [p for p in plans if p.spec.id not in taken] + elsewhere


def make_item(plan: KernelPlan, rendered: Rendered, code: str, log_dir: str, time_limit_s: float) -> BuildItem:
    """The compilation of one planned and rendered kernel, with its build digest. code: see `code_digest`."""
    expected = Expected(
        arch=plan.spec.arch,
        symbol=f"{rendered.kernel_name}_0",
        params=tuple((p.name, p.offset, p.size) for p in plan.params),
        threads=plan.num_threads,
        registers=plan.launch_regs,
    )
    job = CompileJob(plan.spec.id, rendered.text, expected, plan.tmem_alloc_cols, log_dir, code, time_limit_s)
    return BuildItem(plan, rendered, job, build_digest(job))


class _Tally:
    """Outcomes in the order of the items, told to `progress` as they come."""

    def __init__(self, items: list[BuildItem], progress: Progress | None) -> None:
        self.items, self.progress, self.done = items, progress, 0
        self.compiled: list[CompiledKernel | None] = [None] * len(items)
        self.results: list[KernelResult | None] = [None] * len(items)

    def add(self, n: int, state: str, kernel: CompiledKernel | None = None, problem: str = "") -> None:
        self.done += 1
        self.compiled[n] = kernel
        self.results[n] = result = _result(self.items[n], kernel, state, problem)
        if self.progress is not None:
            self.progress(result, self.done, len(self.items))


def _compile_all(
    items: list[BuildItem], cache: BuildCache, jobs: int, options: BuildOptions
) -> tuple[list[CompiledKernel | None], list[KernelResult]]:
    """Every kernel from the cache or the compiler, in the order of `items`; failures as results, not exceptions."""
    tally = _Tally(items, options.progress)
    for n, item in enumerate(items):
        if (kernel := cache.load(item.key)) is not None:
            tally.add(n, "cached", kernel)
    # Each task is a child process that a thread waits for, so that threads are all the pool that is needed.
    executor = options.executor or ThreadPoolExecutor(max_workers=jobs)
    futures: dict[Future[CompiledKernel], int] = {}
    try:
        missing = [n for n, kernel in enumerate(tally.compiled) if kernel is None]
        futures = {executor.submit(compile_kernel, items[n].job): n for n in missing}
        for future in as_completed(futures):
            n = futures[future]
            kernel, problem = _outcome(future, items[n].id, local=options.executor is None)
            if kernel is not None:
                cache.store(items[n].key, kernel)
            problem = spec_hint(items[n].plan, problem)
            tally.add(n, "failed" if kernel is None else "compiled", kernel, problem)
    except BaseException:
        _stop(futures, local=options.executor is None)
        raise
    finally:
        if options.executor is None:
            executor.shutdown()
    return tally.compiled, [r for r in tally.results if r is not None]


def _stop(futures: Iterable[Future[CompiledKernel]], local: bool) -> None:
    """End what was submitted: nothing starts any more, and compilers that run here are killed, with their folders gone.

    Again and again, as a task that has just begun may not have started its process yet.
    """
    for future in futures:
        future.cancel()
    while local and any(future.running() for future in futures):
        kill_running()
        time.sleep(0.02)


def _outcome(future: Future[CompiledKernel], kid: str, local: bool) -> tuple[CompiledKernel | None, str]:
    """(kernel, "") or (None, why). What is no fault of one kernel is raised: a toolchain, a defect of this program."""
    try:
        return future.result(), ""
    except CompileError as e:
        return None, str(e)
    except FmhaGenError:
        raise
    except Exception as e:
        if local:
            raise
        return None, f"{kid}: its worker failed: {type(e).__name__}: {e}"  # lost, or killed


def _result(item: BuildItem, kernel: CompiledKernel | None, state: str, problem: str = "") -> KernelResult:
    arch = item.plan.spec.arch
    if kernel is None:
        return KernelResult(item.id, arch, state, problem=problem)
    return KernelResult(item.id, arch, state, kernel.seconds, len(kernel.cubin), kernel.resources.registers)


def _kernel_files(item: BuildItem, kernel: CompiledKernel, with_source: bool) -> KernelFiles:
    plan, spec = item.plan, item.plan.spec
    record = KernelRecord(
        id=item.id,
        family=spec.family,
        arch=spec.arch,
        build_digest=item.key,
        symbol=item.job.expected.symbol,
        spec=spec.canonical(),
        serves=plan.serves,
        rank=plan.rank,
        params=plan.params,
        launch=LaunchRecord(
            threads=plan.num_threads,
            cluster=(spec.num_ctas or 1, 1, 1),
            dynamic_smem_bytes=plan.smem_bytes,
            grid=plan.grid,
            scalars={p.name: r for p in plan.params if (r := default_scalar_rule(p.name)) is not None},
        ),
        resources=kernel.resources,
        cubin=_NO_FILE,
        ptx=_NO_FILE,
        plan=_NO_FILE,
    )
    source = item.rendered.text.encode() if with_source else None
    return KernelFiles(record, kernel.cubin, kernel.ptx, plan.to_dict(), kernel.line_map, source)


def _toolchain(kernels: list[CompiledKernel]) -> Toolchain:
    """The one toolchain of all kernels: the cache's keys let no other in."""
    versions = {(c.cuda, c.ptxas) for c in kernels}
    if len(versions) != 1:
        raise CompileError(f"kernels of {len(versions)} toolchains in one bundle: {sorted(versions)}; empty the cache")
    cuda, ptxas = versions.pop()
    return Toolchain(dsl=DSL_VERSION, cuda=cuda, ptxas=ptxas, python=python_version())
