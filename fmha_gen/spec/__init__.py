"""YAML specs and what they become: frozen `KernelSpec`s.

`read_specs` reads files; `read_text` reads text; `schema` gives a JSON schema for editors. All problems of all files
are reported at once, as one SpecError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import SpecError
from .built import accepted_archs, built_archs, parse_arch
from .model import AUTO_FIELDS, FEATURE_FIELDS, KernelSpec, Registers
from .reader import BundleHeader, SpecFile, read_text
from .schema import schema

__all__ = [
    "AUTO_FIELDS",
    "FEATURE_FIELDS",
    "BundleHeader",
    "KernelSpec",
    "Registers",
    "SpecFile",
    "check_identities",
    "only_arch",
    "read_specs",
    "read_text",
    "schema",
]


MAX_SPEC_BYTES = 1 << 24


def read_specs(paths: Sequence[str | Path], arch: str | None = None) -> SpecFile:
    """Read one or more spec files into one bundle's worth of variants.

    arch: keep only this architecture (any accepted spelling). Raises SpecError with the problems of all files; also
    when the files name different bundles, when two files make the same kernel, or when no file lists `arch`.
    """
    if not paths:
        raise SpecError(["no spec file given; name at least one, e.g. specs/core.yaml"])
    files: list[tuple[str, SpecFile]] = []
    problems: list[str] = []
    for path in paths:
        try:
            files.append((str(path), read_text(_text_of(Path(path)), str(path))))
        except SpecError as e:
            problems.extend(e.problems)
    if problems:
        raise SpecError(problems)
    merged = _merge(files)
    return only_arch(merged, arch) if arch is not None else merged


def _text_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SPEC_BYTES + 1)
        if len(data) > MAX_SPEC_BYTES:
            raise SpecError([f"{path}: more than {MAX_SPEC_BYTES} bytes; no spec is that long; check the path"])
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as e:
        raise SpecError([f"{path}: cannot be read: {e.strerror}; check the path"]) from e
    except UnicodeDecodeError as e:
        raise SpecError([f"{path}: byte {e.start} is not UTF-8; save the file as UTF-8 text"]) from e


def _merge(files: list[tuple[str, SpecFile]]) -> SpecFile:
    first_path, first = files[0]
    problems: list[str] = []
    seen: dict[KernelSpec, str] = {}
    for path, file in files:
        if file.bundle != first.bundle:
            problems.append(
                f"{path}: bundle: {file.bundle.name} {file.bundle.version}; {first_path} makes {first.bundle.name} "
                f"{first.bundle.version}, and one build makes one bundle; build them apart or give both the same header"
            )
        for spec in file.specs:
            if spec in seen:
                problems.append(f"{spec.source}: makes {spec.name} again, first made at {seen[spec]}; exclude one")
            seen.setdefault(spec, spec.source)
    if problems:
        raise SpecError(problems)
    archs = tuple(dict.fromkeys(arch for _, file in files for arch in file.archs))
    return SpecFile(first.bundle, archs, tuple(seen))


def only_arch(file: SpecFile, arch: str) -> SpecFile:
    """The variants of one architecture (any accepted spelling). Raises SpecError if it is none that the file lists."""
    name = parse_arch(arch)
    if name is None:
        raise SpecError([f"--arch {arch}: no known architecture; accepted are {accepted_archs()}"])
    if name not in built_archs():
        raise SpecError([f"--arch {name}: not built yet; accepted are {accepted_archs()}; leave --arch out"])
    if name not in file.archs:
        raise SpecError([f"--arch {name}: the spec lists {', '.join(file.archs)}; add it to archs or leave --arch out"])
    return replace(file, archs=(name,), specs=tuple(s for s in file.specs if s.arch == name))


def check_identities(specs: Iterable[KernelSpec]) -> None:
    """Refuse two *resolved* specs with one id: an ``auto`` that became what another entry spells out, or a collision.

    Raises SpecError with every pair.
    """
    first: dict[str, KernelSpec] = {}
    problems = []
    for spec in specs:
        other = first.setdefault(spec.id, spec)
        if other is spec:
            continue
        if other.canonical() == spec.canonical():
            problems.append(
                f"{spec.source}: plans to {spec.id}, as {other.source} does; exclude it from one of the two"
            )
        else:
            problems.append(f"{spec.source}: {spec.id}: its short digest collides with {other.source}; change a field")
    if problems:
        raise SpecError(problems)
