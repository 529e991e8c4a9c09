"""Reading a bundle from disk: the only code that opens a bundle's files.

Standard library and modules that need no more, so that the run time can use it as it is:

    manifest = read_manifest(root)               # index; format, integrity and safety checked
    record = read_record(root, manifest.kernels[i])   # one kernel's record, verified and checked against the index
    cubin = read_cubin(root, record)                  # the very bytes that were checked against digest and record
    ptx = read_ptx(root, record)                      # likewise
    plan = read_plan(root, record)                    # likewise, decoded
    lines = read_line_map(root, record)               # likewise; None where the kernel has none
    source = read_verified_file(root, record.source)  # any other file: size and SHA-256 checked

Everything that is wrong raises BundleError naming the file, what was expected and what was found.

Integrity: `manifest.json` carries the SHA-256 of its own text (with the digest itself written as 64 zeros), every
index entry carries size and SHA-256 of its record, and every record those of its cubin, PTX, plan, line map and source.
That finds damage and edits; it is no signature, and does not stop someone who recomputes the digests. What he may
still not write is in `record_checks`: values out of range, and what the cubin or another part of the record
contradicts.

Safety: paths are relative, normalised and stay inside the bundle after symlinks are followed; files must be regular
and not world-writable, nor may the folder be (unless the file system is mounted read-only).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from typing import Any

from . import elf
from .errors import BundleError
from .manifest import FORMAT_VERSION, FileRecord, KernelEntry, KernelRecord, Manifest, from_dict, json_text, to_json
from .record_checks import (
    check_line_map,
    check_manifest,
    check_plan,
    check_ptx,
    check_record,
    check_resources,
    check_text,
)

MANIFEST_NAME = "manifest.json"
MAX_FILE_BYTES = 1 << 28  # nothing in a bundle comes near; stops a damaged size from exhausting memory
_DIGEST_KEY = b'\n "sha256": "'  # one space of indent: a key of the outermost object
_ZEROS = b"0" * 64
_MINE = ".".join(map(str, FORMAT_VERSION))
hashlib.sha256()  # a process's first one looks the algorithm up, which takes longer than to hash an index
_REBUILD = "rebuild the bundle, or copy it again from its source"


def read_manifest(root: str | os.PathLike[str]) -> Manifest:
    """Read and check the index of the bundle in folder `root`.

    Raises BundleError: no bundle there, unsafe mode, not JSON, another format major, edited, or a damaged field.
    """
    folder = os.fspath(root)
    where = f"{folder}/{MANIFEST_NAME}"
    try:
        info = os.stat(folder)
    except (OSError, ValueError):  # ValueError: a null character
        info = None
    if info is None or not stat.S_ISDIR(info.st_mode):
        raise BundleError(f"{folder}: not a folder; a bundle is the folder that `fmha-gen build` printed")
    refuse_world_writable(info, folder)
    raw = _read_regular(folder, MANIFEST_NAME, where)
    data = _decode(raw, where)
    _check_format(data, where)
    _check_self_digest(raw, where)
    check_text(data, raw, where)
    manifest: Manifest = from_dict(Manifest, data, where)
    check_manifest(manifest, where)
    return manifest


def read_record(root: str | os.PathLike[str], entry: KernelEntry) -> KernelRecord:
    """Read, verify and check the record of `entry` against its index entry. Raises BundleError."""
    file = entry.record
    raw = read_verified_file(root, file)
    where = f"{os.fspath(root)}/{file.path}"
    data = _decode(raw, where)
    check_text(data, raw, where)
    record: KernelRecord = from_dict(KernelRecord, data, where)
    for name in ("id", "family", "arch", "serves", "rank"):
        indexed, recorded = getattr(entry, name), getattr(record, name)
        if indexed != recorded:
            raise BundleError(f"{where}: {name} is {recorded!r}, the manifest says {indexed!r}; {_REBUILD}")
    check_record(record, where)
    return record


def read_verified_file(root: str | os.PathLike[str], file: FileRecord) -> bytes:
    """The bytes of one file of the bundle, after its size and SHA-256 were checked. Raises BundleError."""
    folder = os.fspath(root)
    check_relative_path(file.path, folder)
    where = f"{folder}/{file.path}"
    data = _read_regular(folder, file.path, where, file.size_bytes)
    actual = hashlib.sha256(data).hexdigest()
    if actual != file.sha256:
        raise BundleError(f"{where}: sha256 is {actual}, expected {file.sha256}; the file is damaged: {_REBUILD}")
    return data


def read_cubin(root: str | os.PathLike[str], record: KernelRecord) -> bytes:
    """The verified bytes of a kernel's cubin, after its ELF was checked against the record. Raises BundleError."""
    data = read_verified_file(root, record.cubin)
    check_cubin(data, record, os.path.join(root, record.cubin.path))
    return data


def read_ptx(root: str | os.PathLike[str], record: KernelRecord) -> bytes:
    """The verified bytes of a kernel's PTX, after its target and entry were checked. Raises BundleError."""
    data = read_verified_file(root, record.ptx)
    check_ptx(data, record, os.path.join(root, record.ptx.path))
    return data


def read_plan(root: str | os.PathLike[str], record: KernelRecord) -> dict[str, Any]:
    """A kernel's verified plan, after it was checked against the record. Raises BundleError."""
    where = os.path.join(root, record.plan.path)
    raw = read_verified_file(root, record.plan)
    plan = _decode(raw, where)
    check_text(plan, raw, where)
    check_plan(plan, record, where)
    found: dict[str, Any] = plan
    return found


def read_line_map(root: str | os.PathLike[str], record: KernelRecord) -> dict[str, Any] | None:
    """A kernel's verified line map, decoded, after its form was checked; None without one. Raises BundleError."""
    if record.line_map is None:
        return None
    where = os.path.join(root, record.line_map.path)
    line_map = _decode(read_verified_file(root, record.line_map), where)
    check_line_map(line_map, where)
    found: dict[str, Any] = line_map
    return found


def check_cubin(data: bytes, record: KernelRecord, where: str) -> None:
    """Refuse a cubin whose own tables contradict `record`: architecture, symbol, parameters, block size or resources.

    Raises BundleError naming `where`, the record's value and the cubin's.
    """
    cubin = elf.read_cubin(data, where, tools=False)
    if cubin.arch != record.arch:
        raise BundleError(f"{where}: is a cubin for {cubin.arch}, the record says {record.arch}; {_REBUILD}")
    kernel = cubin.kernel(record.symbol, where)
    recorded = tuple((p.offset, p.size) for p in record.params)
    found = tuple((p.offset, p.size) for p in kernel.params)
    if found != recorded:
        i = next(
            (i for i, (a, b) in enumerate(zip(found, recorded, strict=False)) if a != b), min(len(found), len(recorded))
        )
        name = record.params[i].name if i < len(recorded) else "none"
        raise BundleError(
            f"{where}: parameter {i} ({name}) has (offset, size) {found[i : i + 1]}, "
            f"the record says {recorded[i : i + 1]}; {_REBUILD}"
        )
    if kernel.block is not None and kernel.block != (record.launch.threads, 1, 1):
        raise BundleError(
            f"{where}: requires blocks of {kernel.block}, the record launches ({record.launch.threads}, 1, 1); "
            f"{_REBUILD}"
        )
    check_resources(kernel, record, where)


def check_relative_path(path: str, where: str) -> None:
    """Refuse a path that is not a plain relative POSIX path inside the bundle. Raises BundleError."""
    parts = path.split("/")
    if not path or "\\" in path or "\0" in path or ":" in path or not {"", ".", ".."}.isdisjoint(parts):
        raise BundleError(f"{where}: path {path!r} leaves the bundle or is not a plain relative path; {_REBUILD}")


def refuse_world_writable(info: os.stat_result, where: str) -> None:
    """Raises BundleError for what is world-writable: anyone could replace it, unless it is mounted read-only."""
    if not info.st_mode & stat.S_IWOTH or os.name != "posix":
        return
    if os.path.exists(where) and os.statvfs(where).f_flag & os.ST_RDONLY:
        return
    raise BundleError(f"{where}: mode {stat.S_IMODE(info.st_mode):04o} lets everybody write; `chmod o-w {where}`")


def manifest_text(manifest: Manifest) -> str:
    """The text of manifest.json: deterministic JSON that carries its own SHA-256 under the key ``sha256``."""
    body = json.loads(to_json(manifest))
    body["sha256"] = _ZEROS.decode()
    text = json_text(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    key = _DIGEST_KEY.decode()
    return text.replace(key + _ZEROS.decode(), key + digest, 1)


def _check_self_digest(raw: bytes, where: str) -> None:
    at = raw.find(_DIGEST_KEY) + len(_DIGEST_KEY)
    found = raw[at : at + 64]
    if at < len(_DIGEST_KEY) or raw.find(_DIGEST_KEY, at) >= 0 or len(found) != 64:
        count = raw.count(_DIGEST_KEY)
        raise BundleError(f"{where}: {count} keys sha256 of its own, expected 1; the manifest was edited: {_REBUILD}")
    actual = hashlib.sha256(raw[:at] + _ZEROS + raw[at + 64 :]).hexdigest()
    if actual.encode() != found:
        raise BundleError(
            f"{where}: sha256 of its text is {actual}, it says {found.decode('ascii', 'replace')}; "
            f"the manifest was edited: {_REBUILD}"
        )


def _check_format(data: Any, where: str) -> None:
    """Same major or nothing: minors add keys only."""
    version = data.get("format_version") if isinstance(data, dict) else None
    if not (isinstance(version, list) and len(version) == 2 and all(type(v) is int for v in version)):
        raise BundleError(
            f"{where}: format_version is {version!r}, this fmha_gen reads {_MINE}: [major, minor] with the same major; "
            f"this is no fmha_gen manifest, or it was damaged: {_REBUILD}"
        )
    if version[0] != FORMAT_VERSION[0]:
        fix = "install a newer fmha_gen" if version[0] > FORMAT_VERSION[0] else "rebuild the bundle with this fmha_gen"
        raise BundleError(
            f"{where}: format_version {version[0]}.{version[1]}, this fmha_gen reads {_MINE}: "
            f"the major must be the same; {fix}"
        )


def _finite(text: str) -> float:
    """A number of JSON, which has no NaN and no infinity. Raises ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


_parse = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).decode


def _decode(raw: bytes, where: str) -> Any:
    try:
        return _parse(raw.decode())
    except (ValueError, RecursionError) as e:
        raise BundleError(
            f"{where}: {len(raw)} bytes that are not JSON ({e}); the file is damaged: {_REBUILD}"
        ) from None


def _read_regular(folder: str, path: str, where: str, size_bytes: int | None = None) -> bytes:
    """Bytes of a regular file inside `folder`; refuses links out of it, world-writable files and wrong sizes."""
    try:
        fd = _open(folder, path, where)
    except FileNotFoundError:
        raise BundleError(f"{where}: no such file; the bundle is incomplete: {_REBUILD}") from None
    except OSError as e:
        raise BundleError(f"{where}: cannot be read ({e.strerror}); check its permissions") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise BundleError(f"{where}: not a regular file; {_REBUILD}")
        refuse_world_writable(info, where)
        if size_bytes is not None and info.st_size != size_bytes:
            raise BundleError(f"{where}: {info.st_size} bytes, expected {size_bytes}; the file is damaged: {_REBUILD}")
        if info.st_size > MAX_FILE_BYTES:
            raise BundleError(f"{where}: {info.st_size} bytes, more than {MAX_FILE_BYTES}; {_REBUILD}")
        return _read_all(fd, info.st_size)
    finally:
        os.close(fd)


_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


def _read_all(fd: int, size_bytes: int) -> bytes:
    """What a file of that size holds, also if it grows or shrinks meanwhile."""
    data = os.read(fd, size_bytes + 1)
    if len(data) == size_bytes:  # one byte more was asked for: this is the end
        return data
    while part := os.read(fd, size_bytes + 1):
        data += part
    return data


def _open(folder: str, path: str, where: str) -> int:
    """A descriptor of the file `path`, which is relative and may lead through links that stay inside `folder`."""
    real, at = f"{folder}/{path}", path.find("/")
    linked = os.name != "posix"  # without O_NOFOLLOW, anything may be one
    while at >= 0 and not linked:
        parent = f"{folder}/{path[:at]}"
        info = os.lstat(parent)
        linked = stat.S_ISLNK(info.st_mode)
        if not linked:
            refuse_world_writable(info, parent)
        at = path.find("/", at + 1)
    if not linked:
        try:
            return os.open(real, _OPEN_FLAGS)
        except OSError as e:
            if e.errno != errno.ELOOP:
                raise
    real, base = os.path.realpath(real, strict=True), os.path.realpath(folder, strict=True)
    if os.path.commonpath((real, base)) != base:
        raise BundleError(f"{where}: links to {real}, outside the bundle {base}; {_REBUILD}")
    parent = os.path.dirname(real)
    refuse_world_writable(os.stat(parent), parent)
    return os.open(real, _OPEN_FLAGS)
