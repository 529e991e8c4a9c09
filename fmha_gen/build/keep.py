"""What a build of part of a spec does with the bundle that is there.

``--only`` and ``--arch`` narrow what is built, not what the bundle is: a kernel of the bundle stays if the whole spec
still asks for it and this very build would make it (the same build digest: spec, templates, helpers and toolchain). Every
other kernel that was there is left out, by name and reason, as two builds never mix in one bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..compiler import CompiledKernel
from ..errors import BundleError
from ..manifest import KernelEntry, Manifest
from ..manifest_io import MANIFEST_NAME, read_cubin, read_manifest, read_record, read_verified_file
from ..plan import KernelPlan

if TYPE_CHECKING:
    from .orchestrate import BuildItem


@dataclass(frozen=True, slots=True)
class Dropped:
    """A kernel that the bundle held and no longer holds (or, with an empty id, a bundle that could not be read)."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Kernels of the bundle that stay, with their files, and those that do not."""

    kernels: tuple[tuple[BuildItem, CompiledKernel], ...] = ()
    dropped: tuple[Dropped, ...] = ()


def keep(
    root: Path, chosen: Iterable[str], others: Iterable[KernelPlan], make: Callable[[KernelPlan], BuildItem]
) -> Kept:
    """What of the bundle in `root` stays beside the kernels with ids `chosen`.

    others: plans of the spec's other kernels. make: the compilation of one plan, for its build digest.
    """
    if not (root / MANIFEST_NAME).exists():
        return Kept()
    try:
        manifest = read_manifest(root)
    except BundleError as e:
        return Kept(dropped=(Dropped("", f"the bundle that was there cannot be read: {e}"),))
    taken, plans = set(chosen), {plan.spec.id: plan for plan in others}
    kernels, dropped = [], []
    for entry in manifest.kernels:
        if entry.id in taken:
            continue
        plan = plans.get(entry.id)
        if plan is None:
            dropped.append(Dropped(entry.id, "the spec does not ask for it"))
            continue
        item = make(plan)
        try:
            kernel = _read(root, manifest, entry, item)
        except BundleError as e:
            dropped.append(Dropped(entry.id, str(e)))
            continue
        if kernel is None:
            dropped.append(Dropped(entry.id, "it is of another build: its templates or the toolchain changed"))
        else:
            kernels.append((item, kernel))
    return Kept(tuple(kernels), tuple(dropped))


def _read(root: Path, manifest: Manifest, entry: KernelEntry, item: BuildItem) -> CompiledKernel | None:
    """The kernel's verified files, or None if this build would not make them. Raises BundleError for damage."""
    record = read_record(root, entry)
    if record.build_digest != item.key or record.line_map is None:
        return None
    cubin = read_cubin(root, record)
    ptx, line_map = read_verified_file(root, record.ptx), read_verified_file(root, record.line_map)
    t = manifest.toolchain
    return CompiledKernel(cubin, ptx, line_map, record.resources, cuda=t.cuda, ptxas=t.ptxas, seconds=0.0)
