"""Which kernel of a bundle serves a problem on a device. Pure: no driver, no files, no state.

`explain` gives every kernel with the reasons why it does not serve; `select` the best one that does, or SelectionError
with the whole trace and the spec line that would add the kernel, if one can; `covers` only whether there is one, and
why not.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..built import BUILT, built_archs, show_dims
from ..errors import SelectionError
from ..manifest import KernelEntry, Manifest, Serves, id_matches
from . import arguments
from .driver import ARCH_CAPABILITY, Device
from .problem import Problem


def reasons(entry: KernelEntry, problem: Problem, device: Device) -> tuple[str, ...]:
    """Why `entry` does not serve `problem` on `device`; empty when it does.

    Bounds on query rows are no reason: they say where a kernel is the better choice, not what it can do.
    """
    serves = entry.serves
    found: list[str] = []
    if entry.family != "fmha_fwd":
        found.append(f"family {entry.family}, wanted fmha_fwd")
    if not runs_on(entry, device):
        wanted = ARCH_CAPABILITY.get(entry.arch)
        which = f"runs on compute capability {wanted[0]}.{wanted[1]} only" if wanted else "unknown to this fmha-gen"
        found.append(f"arch {entry.arch} {which}")
    if serves.dtype != problem.dtype:
        found.append(f"dtype {serves.dtype}, wanted {problem.dtype}")
    if (serves.head_dim_qk, serves.head_dim_v) != (problem.head_dim_qk, problem.head_dim_v):
        wanted_dims = (problem.head_dim_qk, problem.head_dim_v)
        found.append(f"head_dim ({serves.head_dim_qk}, {serves.head_dim_v}), wanted {wanted_dims}")
    if problem.mask not in serves.masks:
        found.append(f"mask {' or '.join(serves.masks)}, wanted {problem.mask}")
    if missing := sorted(set(problem.features) - set(serves.features)):
        found.append(f"built without {', '.join(missing)}")
    if extra := sorted(set(serves.features) - set(problem.features)):
        found.append(f"built for {', '.join(extra)}")
    if problem.lse and not serves.lse:
        found.append("built without lse")
    return tuple(found)


def preferred(entry: KernelEntry, problem: Problem) -> bool:
    """Whether the problem's query rows lie where the kernel is the better choice (q_stage 2 beyond one tile of 128)."""
    return prefers(entry.serves, problem.packed_rows)


def prefers(serves: Serves, rows: int) -> bool:
    """Whether so many query rows lie where a kernel is the better choice."""
    return serves.min_rows <= rows and (serves.max_rows is None or rows <= serves.max_rows)


def runs_on(entry: KernelEntry, device: Device) -> bool:
    """Whether the device can run the kernel's architecture."""
    return ARCH_CAPABILITY.get(entry.arch) == device.compute_capability


def explain(manifest: Manifest, problem: Problem, device: Device) -> list[tuple[KernelEntry, tuple[str, ...]]]:
    """Every kernel of the bundle, in manifest order, with its `reasons`."""
    _check_types(problem, device)
    return [(entry, reasons(entry, problem, device)) for entry in manifest.kernels]


def covers(manifest: Manifest, problem: Problem, device: Device) -> tuple[str, ...]:
    """Why no kernel of the bundle serves `problem` on `device`; empty when one does.

    One line for each way in which the closest kernels, those with the fewest reasons, miss the problem.
    """
    trace = explain(manifest, problem, device)
    if not trace:
        return (f"bundle {manifest.name} {manifest.version} holds no kernel",)
    fewest = min(len(why) for _, why in trace)
    return tuple(dict.fromkeys("; ".join(why) for _, why in trace if len(why) == fewest)) if fewest else ()


def select(manifest: Manifest, problem: Problem, device: Device, pattern: str | None = None) -> KernelEntry:
    """The kernel that serves `problem` on `device`: `preferred` ones first, then by rank, then by id.

    As `candidates` otherwise.
    """
    served = candidates(manifest, problem, device, pattern)
    return next((entry for entry in served if preferred(entry, problem)), served[0])


def candidates(
    manifest: Manifest, problem: Problem, device: Device, pattern: str | None = None
) -> tuple[KernelEntry, ...]:
    """The kernels that serve `problem` on `device`, by rank, then by id. Lengths, heads and scale do not change them.

    pattern: a glob over kernel ids (or an id without its digest); only these are considered.
    Raises SelectionError listing every kernel with its reasons, and the spec lines that would add one, or why none
    can.
    """
    _check_types(problem, device)
    entries = matching(manifest.kernels, arguments.glob("variant", pattern))
    if not manifest.kernels:
        raise SelectionError(
            f"bundle {manifest.name} {manifest.version} holds no kernels; build a spec that makes some, or open another"
        )
    if not entries:
        listed = "".join(f"\n  {e.id}" for e in manifest.kernels)
        raise SelectionError(
            f"variant {pattern!r}: matches no kernel of bundle {manifest.name} {manifest.version}; it holds:{listed}"
        )
    served = [e for e in entries if _alike(e.serves, problem) and not reasons(e, problem, device)]
    if served:
        return tuple(sorted(served, key=lambda e: (e.rank, e.id)))
    trace = [(entry, reasons(entry, problem, device)) for entry in entries]
    raise SelectionError(_miss(manifest, problem, device, trace, pattern))


def _check_types(problem: Problem, device: Device) -> None:
    if not isinstance(problem, Problem):
        raise arguments.wrong("problem", problem, "a fmha_gen.runtime.Problem")
    if not isinstance(device, Device):
        raise arguments.wrong("device", device, "a CUDA ordinal, or a fmha_gen.runtime.Device")


def _alike(serves: Serves, problem: Problem) -> bool:
    """Whether the first things that `reasons` looks at fit: spares most kernels of a bundle the rest."""
    return (
        serves.dtype == problem.dtype
        and serves.head_dim_qk == problem.head_dim_qk
        and serves.head_dim_v == problem.head_dim_v
        and problem.mask in serves.masks
    )


def matching(entries: Iterable[KernelEntry], pattern: str | None) -> tuple[KernelEntry, ...]:
    """Entries whose id matches the glob; an id's readable part without the digest matches as a whole too."""
    if pattern is None:
        return tuple(entries)
    return tuple(e for e in entries if id_matches(e.id, pattern))


def _miss(
    manifest: Manifest,
    problem: Problem,
    device: Device,
    trace: list[tuple[KernelEntry, tuple[str, ...]]],
    pattern: str | None,
) -> str:
    lines = [
        f"bundle {manifest.name} {manifest.version}: no kernel serves {problem.describe()} on {device.describe()}; "
        f"the bundle holds archs {_listed(e.arch for e in manifest.kernels)}:"
    ]
    for entry, why in sorted(trace, key=lambda item: (len(item[1]), item[0].id)):
        lines.append(f"  {entry.id}: {'; '.join(why)}")
    served = [e for e in manifest.kernels if pattern is not None and not reasons(e, problem, device)]
    if served:
        lines.append(f"without variant {pattern!r}, {served[0].id} serves it")
    elif missing := not_built(problem, device):
        lines.append("no spec adds one:")
        lines.extend(f"  {line}" for line in missing)
    else:
        lines.append("to add one, put this into the spec and build again:")
        lines.extend(f"  {line}" for line in spec_lines(problem, device))
    return "\n".join(lines)


def _arch_of(device: Device) -> str | None:
    """The architecture that fmha-gen builds for `device`."""
    return next((a for a in built_archs() if ARCH_CAPABILITY[a] == device.compute_capability), None)


def not_built(problem: Problem, device: Device) -> tuple[str, ...]:
    """Why no spec of this fmha-gen makes a kernel for `problem` on `device`; empty when one does."""
    arch = _arch_of(device)
    if arch is None:
        known = ", ".join("{} ({}.{})".format(a, *ARCH_CAPABILITY[a]) for a in built_archs())
        major, minor = device.compute_capability
        return (f"this fmha-gen builds for {known}, not for compute capability {major}.{minor}",)
    built = BUILT["fmha_fwd", arch]
    dims = (problem.head_dim_qk, problem.head_dim_v)
    found = []
    for name, value, values in (
        ("dtype", problem.dtype, built.dtypes),
        ("head_dim", show_dims(dims), tuple(show_dims(d) for d in built.head_dims)),
        ("mask", problem.mask, built.masks),
    ):
        if value not in values:
            found.append(f"{name} {value} is not built for {arch}; built are {', '.join(values)}")
    found += [f"{f} is not built yet for {arch}" for f in problem.features if f not in built.features]
    return tuple(found)


def spec_lines(problem: Problem, device: Device) -> tuple[str, ...]:
    """What a spec has to say to get a kernel for `problem` on `device`; empty where no spec can: see `not_built`."""
    if not_built(problem, device):
        return ()
    flags = "".join(f", {feature}: true" for feature in problem.features)
    head_dim = show_dims((problem.head_dim_qk, problem.head_dim_v))
    kernel = f"{{family: fmha_fwd, dtype: {problem.dtype}, head_dim: {head_dim}, mask: {problem.mask}{flags}}}"
    return (f"archs: [{_arch_of(device)}]", "kernels:", f"  - {kernel}")


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values))) or "none"
