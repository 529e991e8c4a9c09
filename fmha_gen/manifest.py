"""The bundle manifest: frozen dataclasses and their JSON form.

The manifest is an index. It names every kernel with what a launcher needs to choose one, and the file that holds the
kernel's record; a record is read when its kernel is loaded, so that opening a bundle stays cheap.

Format rule: `FORMAT_VERSION` is ``(major, minor)``. A reader accepts any minor of its own major, ignores keys that it
does not know in a newer minor, and refuses another major by name.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from .errors import BundleError

FORMAT_VERSION = (2, 0)

_DIGEST_CHARS = 16  # of a file's SHA-256 in its name

# Order of parameters in every kernel: tensor maps, pointers, 64-bit integers, then 32-bit values.
PARAM_SIZES = {"tensor_map": 128, "pointer": 8, "i64": 8, "i32": 4, "f32": 4}


@dataclass(frozen=True, slots=True)
class MapAxis:
    """One dimension of a tensor map, innermost first.

    axis: which axis of the tensor it walks: ``d s h b`` (later ``ratio page``).
    extent: name of the problem quantity that bounds it, e.g. ``seqlen_k``.
    box: elements of this axis that one copy moves.
    """

    axis: str
    extent: str
    box: int


@dataclass(frozen=True, slots=True)
class TensorMapRecord:
    """How to encode one CUtensorMap. The stride of each axis is that of the same axis of `tensor` at run time."""

    tensor: str
    element: str
    axes: tuple[MapAxis, ...]
    swizzle: str  # "none", "32B", "64B", "128B"
    fill: str = "zero"
    l2_promotion: str = "256B"


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter. Offsets are relative to the first parameter, as in the cubin's parameter table."""

    name: str
    kind: str  # a key of PARAM_SIZES
    offset: int
    size: int
    tensor_map: TensorMapRecord | None = None
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the bundle: path relative to the bundle's root, SHA-256 and size in bytes."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule of `launch_rules` with its constants."""

    name: str
    constants: dict[str, int]


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """Launch geometry that does not depend on the problem, and the rules that give the grid and computed scalars.

    scalars: parameter name -> rule, for 32-bit parameters that the launcher computes (``heads_per_section``).
    """

    threads: int
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int
    grid: Rule
    scalars: dict[str, Rule] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resources:
    """What the cubin uses, read from its ELF."""

    registers: int
    stack_bytes: int
    spill_ops: int
    static_smem_bytes: int
    tmem_cols: int
    code_bytes: int


@dataclass(frozen=True, slots=True)
class Serves:
    """Problems that a kernel serves. An empty tuple or None bound means no restriction on that quantity.

    masks: of ``full causal``. min_rows, max_rows: the query rows of one head (times the ratio, under GQA packing) for
    which the kernel is the better choice; it is right for any number.
    lse: the kernel can write the log-sum-exp.
    """

    dtype: str
    head_dim_qk: int
    head_dim_v: int
    masks: tuple[str, ...]
    features: tuple[str, ...] = ()
    min_rows: int = 0
    max_rows: int | None = None
    lse: bool = True


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """The index entry of a kernel. record_sha256, record_bytes: of the file that holds its `KernelRecord`."""

    id: str
    family: str
    arch: str
    serves: Serves
    rank: int  # among kernels that serve the same problem the lowest rank is chosen
    record_sha256: str
    record_bytes: int

    @property
    def record(self) -> FileRecord:
        path = content_path("records", self.id, self.record_sha256, ".json")
        return FileRecord(path, self.record_sha256, self.record_bytes)


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """What a launcher needs of one kernel, and the files that hold the rest.

    spec: canonical. plan: JSON of the kernel's plan, which no launch reads.
    """

    id: str
    family: str
    arch: str
    build_digest: str
    symbol: str
    spec: dict[str, Any]
    serves: Serves
    rank: int
    params: tuple[Param, ...]
    launch: LaunchRecord
    resources: Resources
    cubin: FileRecord
    ptx: FileRecord
    plan: FileRecord
    line_map: FileRecord | None = None
    source: FileRecord | None = None


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Exact versions that made the bundle."""

    dsl: str
    cuda: str
    ptxas: str
    python: str


@dataclass(frozen=True, slots=True)
class Generator:
    """Which fmha_gen made the bundle. commit is None outside a checkout."""

    version: str
    commit: str | None
    dirty: bool


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole index, ``manifest.json``."""

    name: str
    version: str
    generator: Generator
    toolchain: Toolchain
    min_driver: int  # CUDA driver branch, e.g. 580
    kernels: tuple[KernelEntry, ...]
    lse_base: str = "e"
    format_version: tuple[int, int] = field(default=FORMAT_VERSION)


def content_path(folder: str, kernel_id: str, sha256: str, suffix: str) -> str:
    """Where a bundle keeps a file of a kernel: named after its content, so that none is rewritten with other bytes."""
    return f"{folder}/{kernel_id}.{sha256[:_DIGEST_CHARS]}{suffix}"


def id_matches(kernel_id: str, pattern: str) -> bool:
    """Whether a kernel id, or its readable part without the digest, matches a glob: what ``--only`` means."""
    return fnmatchcase(kernel_id, pattern) or fnmatchcase(kernel_id, f"{pattern}-????????")


def to_json(obj: Any) -> str:
    """`json_text` of a manifest dataclass."""
    return json_text(dataclasses.asdict(obj))


def json_text(data: Any) -> str:
    """Deterministic JSON text, with a final newline."""
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def from_dict(cls: type, data: Any, where: str) -> Any:
    """Build dataclass `cls` from decoded JSON.

    Unknown keys are ignored (a newer minor format may add some). Raises BundleError naming `where` and the field for a
    missing key or a value of the wrong type.
    """
    try:
        return _converter(cls)(data)
    except _Mismatch:
        return _convert(cls, data, where)  # the slow way, which names what is wrong


class _Mismatch(Exception):
    pass


@functools.cache
def _converter(tp: Any) -> Callable[[Any], Any]:
    """A fast converter to `tp`, accepting what `_convert` accepts: a bundle of 100 kernels must open within 2 ms."""
    if dataclasses.is_dataclass(tp):
        return _dataclass_converter(tp)
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin is tuple and args[-1] is Ellipsis:
        if args[0] in _PLAIN:
            fine = frozenset(args[:1]).issuperset
            return lambda v: tuple(v) if type(v) is list and fine(map(type, v)) else _mismatch()
        item = _converter(args[0])
        return lambda v: tuple([item(x) for x in v]) if type(v) is list else _mismatch()
    if origin is tuple:
        items = [_converter(a) for a in args]
        return lambda v: (
            tuple([c(x) for c, x in zip(items, v, strict=True)])
            if type(v) is list and len(v) == len(items)
            else _mismatch()
        )
    if origin is dict:
        entry = _converter(args[1])
        return lambda v: {k: entry(x) for k, x in v.items()} if type(v) is dict else _mismatch()
    if origin is not None:  # a union with None
        some = _converter(_without_none(tp))
        return lambda v: None if v is None else some(v)
    if tp is Any:
        return lambda v: v
    return lambda v: v if type(v) is tp else _mismatch()


_PLAIN = (str, int, bool, float)


def _without_none(tp: Any) -> Any:
    """`X` of ``X | None``; other types as they are."""
    args = typing.get_args(tp)
    return next(a for a in args if a is not type(None)) if type(None) in args else tp


def _mismatch() -> typing.NoReturn:
    raise _Mismatch


def _dataclass_converter(cls: Any) -> Callable[[Any], Any]:
    """Fills slots directly: a frozen dataclass's own __init__ takes twice as long."""
    hints = typing.get_type_hints(cls)
    fields = []
    for f in dataclasses.fields(cls):
        plain = _without_none(hints[f.name])  # values of this type need no conversion
        fields.append(
            (f.name, getattr(cls, f.name).__set__, plain if plain in _PLAIN else None, _converter(hints[f.name]))
        )
    assert "__slots__" in vars(cls) and not hasattr(cls, "__post_init__")

    def convert(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch
        made = object.__new__(cls)
        try:
            for name, put, plain, to in fields:
                found = value[name]
                put(made, found if type(found) is plain else to(found))
        except KeyError:
            raise _Mismatch from None  # a missing key may have a default: the slow way knows
        return made

    return convert


def _convert(tp: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(tp):
        return _convert_dataclass(tp, value, where)
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin is tuple:
        if not isinstance(value, list):
            raise BundleError(f"{where}: {value!r} is not a list; the manifest is damaged or was edited")
        if args[-1] is Ellipsis:
            return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        if len(value) != len(args):
            raise BundleError(
                f"{where}: {len(value)} values, expected {len(args)}; the manifest is damaged or was edited"
            )
        return tuple(_convert(t, v, f"{where}[{i}]") for i, (t, v) in enumerate(zip(args, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise BundleError(f"{where}: {value!r} is not an object; the manifest is damaged or was edited")
        return {k: _convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is not None:  # a union with None
        if value is None:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if tp is Any:
        return value
    if type(value) is not tp:
        raise BundleError(f"{where}: {value!r} is not of type {tp.__name__}; the manifest is damaged or was edited")
    return value


_HINTS: dict[type, dict[str, Any]] = {}


def _convert_dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise BundleError(f"{where}: {value!r} is not an object; the manifest is damaged or was edited")
    hints = _HINTS.get(cls)
    if hints is None:
        hints = _HINTS[cls] = typing.get_type_hints(cls)
    kwargs = {}
    for f in dataclasses.fields(cls):
        if f.name in value:
            kwargs[f.name] = _convert(hints[f.name], value[f.name], f"{where}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise BundleError(f"{where}: key {f.name!r} is missing; the manifest is damaged or was edited")
    return cls(**kwargs)


# Made at import, so that opening a bundle and reading its first record do not pay for them.
for _cls in (Manifest, KernelRecord):
    _converter(_cls)
