"""Writing and checking bundles. `fmha_gen.manifest_io` has the reading side, which the run time shares.

A bundle is a folder: ``manifest.json`` (the index), ``records/`` and ``plans/`` (one JSON file per kernel each),
``cubin/``, ``ptx/``, ``lines/`` (PTX line -> source line) and optionally ``source/``. Every file but the manifest is
named after its content, so none is ever rewritten with other bytes; the manifest is replaced atomically, last. Somebody
who opened the bundle before a rebuild keeps finding the files of his index: those of the manifest that was replaced
stay until the next rebuild that changes something.

What is written depends on the kernels and the toolchain alone: no dates, no absolute paths, modes without group or
world write, sorted keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import BundleError
from .manifest import (
    FileRecord,
    Generator,
    KernelEntry,
    KernelRecord,
    Manifest,
    Toolchain,
    content_path,
    json_text,
    to_json,
)
from .manifest_io import (
    MANIFEST_NAME,
    check_cubin,
    check_relative_path,
    manifest_text,
    read_cubin,
    read_line_map,
    read_manifest,
    read_plan,
    read_ptx,
    read_record,
    read_verified_file,
    refuse_world_writable,
)

FOLDERS = ("records", "plans", "cubin", "ptx", "lines", "source")


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """A kernel to be written: its record, whose FileRecords `write_bundle` fills in, its plan and its files' bytes."""

    record: KernelRecord
    cubin: bytes
    ptx: bytes
    plan: dict[str, Any]
    line_map: bytes | None = None
    source: bytes | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_bundle` did: the bundle's folder, its index, and how many files it had to write or could remove."""

    root: Path
    manifest: Manifest
    files_written: int
    files_removed: int


@dataclass(frozen=True, slots=True)
class CheckedBundle:
    """A bundle in which every file was read and verified. unreferenced: files that the index does not lead to.

    records, plans: of the index's kernels, in its order.
    """

    root: Path
    manifest: Manifest
    records: tuple[KernelRecord, ...]
    plans: tuple[dict[str, Any], ...]
    unreferenced: tuple[str, ...] = field(default=())


def write_bundle(
    root: Path,
    name: str,
    version: str,
    generator: Generator,
    toolchain: Toolchain,
    min_driver: int,
    kernels: Sequence[KernelFiles],
) -> Written:
    """Write or update the bundle in folder `root`.

    Files that are there with the right bytes are left alone, damaged ones are replaced. Every cubin is checked against
    its record first. Raises BundleError for a contradiction, two kernels with one id, a folder that holds something
    else, or one that cannot be written.
    """
    check_target(root)
    _check_kernels(kernels)
    files: dict[str, bytes] = {}
    entries = tuple(_add_kernel(files, k) for k in sorted(kernels, key=lambda k: k.record.id))
    manifest = Manifest(name, version, generator, toolchain, min_driver, entries)
    try:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _locked(root):
            before = _previous(root)
            written = sum(write_file(root / path, data) for path, data in sorted(files.items()))
            if write_file(root / MANIFEST_NAME, manifest_text(manifest).encode()):
                written += 1
            removed = _remove_others(root, set(files) | before)
    except OSError as e:
        raise _not_writable(root, e) from None
    return Written(root, manifest, written, removed)


def check_bundle(root: str | os.PathLike[str]) -> CheckedBundle:
    """Read and verify every file of the bundle. Raises BundleError for the first thing that is wrong, by name."""
    folder = Path(root)
    manifest = read_manifest(folder)
    records = tuple(read_record(folder, entry) for entry in manifest.kernels)
    plans = tuple(read_plan(folder, record) for record in records)
    for record in records:
        read_cubin(folder, record)
        read_ptx(folder, record)
        read_line_map(folder, record)
        if record.source is not None:
            read_verified_file(folder, record.source)
    known = {k.record.path for k in manifest.kernels}.union(*(_paths(r) for r in records))
    return CheckedBundle(folder, manifest, records, plans, tuple(sorted(_files(folder) - known)))


def write_file(path: Path, data: bytes) -> bool:
    """Make `path` hold `data`, atomically and durably; False if it already did (then it is not touched).

    Raises OSError naming `path` or the folder that cannot be made.
    """
    with contextlib.suppress(OSError):
        if not path.is_symlink() and path.read_bytes() == data and not path.stat().st_mode & 0o022:
            return False
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(e, OSError):
            raise OSError(e.errno, e.strerror, str(path)) from e
        raise
    return True


def check_target(root: Path) -> None:
    """Raise BundleError, before any work, unless a bundle can be written to `root`.

    A folder that exists must be empty or a bundle, of a mode that readers take: its unreferenced files will be removed.
    """
    try:
        if root.exists() and not root.is_dir():
            raise BundleError(f"{root}: is a file, a bundle is a folder; choose another output folder")
        strange = sorted(p.name for p in root.iterdir()) if root.exists() else []
        absolute = root.absolute()
    except FileNotFoundError as e:  # of the folder that we are in
        raise BundleError(
            f"{root}: cannot be written ({e.strerror}: the working folder was deleted); change to one that exists, or "
            f"name the output folder by its full path"
        ) from None
    except OSError as e:
        raise _not_writable(root, e) from None
    strange = [n for n in strange if n not in (*FOLDERS, MANIFEST_NAME, "proof.json") and not n.endswith(".tmp")]
    if strange:
        raise BundleError(f"{root}: holds {strange[0]!r}, which is no part of a bundle; choose another output folder")
    there = next(p for p in (root, *absolute.parents) if p.exists())
    code = errno.ENOTDIR if not there.is_dir() else 0 if os.access(there, os.W_OK | os.X_OK) else errno.EACCES
    if code:
        raise _not_writable(root, OSError(code, os.strerror(code), str(there)))
    _check_folders(root)


def _check_folders(root: Path) -> None:
    """Refuse links, through which files outside the bundle would be removed, and modes that every reader refuses."""
    if root.exists():
        refuse_world_writable(root.stat(), str(root))
    for folder in (root / name for name in FOLDERS):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            what = "a link" if folder.is_symlink() else "no folder"
            raise BundleError(
                f"{folder}: is {what}; a build writes and removes files in a folder of the bundle's own: remove it, or "
                f"choose another output folder"
            )
        if folder.exists():
            refuse_world_writable(folder.stat(), str(folder))


def _not_writable(root: Path, e: OSError) -> BundleError:
    what = e.strerror or str(e)
    where = f": {e.filename}" if e.filename and str(e.filename) != str(root) else ""
    return BundleError(f"{root}: cannot be written ({what}{where}); choose another output folder, or free some space")


def _check_kernels(kernels: Sequence[KernelFiles]) -> None:
    seen: set[str] = set()
    for k in kernels:
        if k.record.id in seen:
            raise BundleError(f"{k.record.id}: two kernels with this id; exclude one of the spec entries that make it")
        seen.add(k.record.id)
        check_relative_path(k.record.id, "kernel id")
        check_cubin(k.cubin, k.record, f"{k.record.id}.cubin")


def _add_kernel(files: dict[str, bytes], k: KernelFiles) -> KernelEntry:
    """Put a kernel's files into `files` (path -> bytes) and return its index entry."""
    kid = k.record.id
    record = dataclasses.replace(
        k.record,
        cubin=_add(files, "cubin", kid, ".cubin", k.cubin),
        ptx=_add(files, "ptx", kid, ".ptx", k.ptx),
        plan=_add(files, "plans", kid, ".json", json_text(k.plan).encode()),
        line_map=None if k.line_map is None else _add(files, "lines", kid, ".json", k.line_map),
        source=None if k.source is None else _add(files, "source", kid, ".py", k.source),
    )
    file = _add(files, "records", kid, ".json", to_json(record).encode())
    return KernelEntry(kid, record.family, record.arch, record.serves, record.rank, file.sha256, file.size_bytes)


def _add(files: dict[str, bytes], folder: str, kid: str, suffix: str, data: bytes) -> FileRecord:
    digest = hashlib.sha256(data).hexdigest()
    path = content_path(folder, kid, digest, suffix)
    if files.setdefault(path, data) != data:
        raise BundleError(f"{path}: two files want this name; report it")
    return FileRecord(path, digest, len(data))


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One writer at a time; the folder itself is the lock, so that no lock file can be left or deleted."""
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _previous(root: Path) -> set[str]:
    """Files that the manifest which is about to be replaced leads to; nothing if it is damaged or none is there."""
    try:
        manifest = read_manifest(root)
    except BundleError:
        return set()
    paths = {k.record.path for k in manifest.kernels}
    for entry in manifest.kernels:
        with contextlib.suppress(BundleError):
            paths |= _paths(read_record(root, entry))
    return paths


def _paths(record: KernelRecord) -> set[str]:
    return {f.path for f in (record.cubin, record.ptx, record.plan, record.line_map, record.source) if f is not None}


def _files(root: Path) -> set[str]:
    own = (root / name for name in FOLDERS if not (root / name).is_symlink())
    found = (p for folder in own for p in folder.rglob("*") if not p.is_dir() or p.is_symlink())
    return {p.relative_to(root).as_posix() for p in found}


def _remove_others(root: Path, keep: set[str]) -> int:
    gone = _files(root) - keep
    for path in gone:
        os.unlink(root / path)
    return len(gone)
