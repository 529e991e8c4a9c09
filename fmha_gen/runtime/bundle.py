"""`Bundle`: open a bundle, choose its kernels, launch them.

    bundle = Bundle.open("out/core-0.1.0")
    bundle.attention(q, k, v, out, lse=lse, causal=True, stream=stream)

Opening reads the index only and does not touch CUDA. A kernel's files are read, verified and loaded at its first use,
or all at once by `preload`; after `freeze`, a launch that would have to load anything is an error.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from ..errors import BundleError, DriverError, ProblemError
from ..manifest import KernelEntry, KernelRecord, Manifest
from ..manifest_io import read_line_map, read_manifest, read_plan, read_record, read_verified_file
from . import arguments
from . import select as selection
from .bound import PreparedLaunch
from .cache import MAX_RECIPES, LaunchCache
from .cuda import CudaDriver
from .driver import Device, Driver
from .pack import Packer
from .problem import ELEMENTS, MAX_EXTENT, Launch, Problem, describe_launch
from .recipe import Choice, Recipe
from .streams import stream_handle
from .tensors import HOST, MAX_ORDINAL


class Bundle:
    """An opened bundle. Thread-safe; build it with `Bundle.open`."""

    def __init__(self, path: str, manifest: Manifest, driver: Driver) -> None:
        self._folder, self.manifest, self.driver = path, manifest, driver
        self._lock = threading.RLock()
        self._records: dict[str, KernelRecord] = {}
        self._loaded: dict[tuple[str, int], Any] = {}
        self._packers: dict[str, Packer] = {}
        self._recipes: dict[Any, Recipe] = {}
        self._cache = LaunchCache()
        self._frozen = False
        self._version_checked = False
        self._dtypes = tuple(d for d in ELEMENTS if any(e.serves.dtype == d for e in manifest.kernels)) or ELEMENTS

    @classmethod
    def open(cls, path: str | os.PathLike[str], driver: Driver | None = None) -> Bundle:
        """Read the index of the bundle in folder `path`.

        driver: what executes its kernels; CUDA by default, `fmha_gen.sim.driver.SimDriver` without a GPU.
        Raises BundleError: no bundle, another format, damaged or edited; ProblemError for arguments of a wrong type.
        """
        folder = arguments.path("bundle", path)
        if driver is not None and not hasattr(driver, "image"):
            raise arguments.wrong("driver", driver, "a driver, e.g. fmha_gen.sim.driver.SimDriver(), or None for CUDA")
        return cls(folder, read_manifest(folder), driver if driver is not None else CudaDriver())

    @property
    def path(self) -> Path:
        """The bundle's folder."""
        return Path(self._folder)

    @property
    def kernels(self) -> tuple[KernelEntry, ...]:
        """Index entries of all kernels."""
        return self.manifest.kernels

    @property
    def frozen(self) -> bool:
        return self._frozen

    def record(self, entry: KernelEntry) -> KernelRecord:
        """The kernel's record, read and verified once. Raises BundleError."""
        if not isinstance(entry, KernelEntry):
            raise arguments.wrong("entry", entry, "an index entry of this bundle, one of bundle.kernels")
        record = self._records.get(entry.id)
        if record is None:
            record = self._records.setdefault(entry.id, read_record(self._folder, entry))
        return record

    def select(self, problem: Problem, device: Device | int = 0, variant: str | None = None) -> KernelEntry:
        """The kernel that serves `problem` on `device` (an ordinal, or a `Device` that need not exist).

        Raises SelectionError with every kernel's reasons and the spec lines that would add one.
        """
        target = self._device(device)
        return selection.select(self.manifest, problem, target, variant)

    def covers(self, problem: Problem, device: Device | int = 0) -> tuple[str, ...]:
        """Why no kernel serves `problem` on `device`; empty when one does. What `select` decides, without raising."""
        target = self._device(device)
        return selection.covers(self.manifest, problem, target)

    def _device(self, device: Any) -> Device:
        if isinstance(device, Device):
            return device
        wanted = "a CUDA ordinal, or a fmha_gen.runtime.Device"
        return self.driver.device(arguments.integer("device", device, wanted, HOST, MAX_ORDINAL))

    # ---- loading

    def preload(self, pattern: str | None = None, device: int = 0, freeze: bool = False) -> tuple[str, ...]:
        """Load the kernels whose ids match the glob `pattern` (all that run on the device by default).

        Loads into the current context when it is on `device`, else into the device's primary context. Returns their
        ids. freeze: also `freeze`. Raises BundleError for a damaged kernel, DriverError.
        """
        target = self._device(device)
        arguments.glob("pattern", pattern)
        entries = [
            e for e in selection.matching(self.kernels, pattern) if selection.runs_on(e, target) or pattern is not None
        ]
        if not entries:
            archs = ", ".join(sorted({e.arch for e in self.kernels})) or "none"
            raise BundleError(
                f"{self._folder}: no kernel matches {pattern or '*'!r} on {target.describe()}; it holds archs {archs}"
            )
        for entry in entries:
            self._load(entry, target)
        if freeze:
            self.freeze()
        return tuple(e.id for e in entries)

    def freeze(self) -> None:
        """From now on a launch that would have to load a kernel is an error (for graph capture and serving)."""
        with self._lock:
            self._frozen = True
            for kernel in self._loaded.values():
                if hasattr(kernel, "frozen"):
                    kernel.frozen = True

    def _load(self, entry: KernelEntry, device: Device) -> Any:
        key = (entry.id, device.ordinal)
        with self._lock:
            if self._frozen and key not in self._loaded:
                raise DriverError(
                    f"{entry.id}: not loaded on {device.describe()}, and the bundle is frozen; preload() it first"
                )
            if not self._version_checked:
                self.driver.check_version(self.manifest.min_driver, self._folder)
                self._version_checked = True
            record = self.record(entry)
            if key not in self._loaded:
                self._loaded[key] = self._load_files(record, device)
            return self._loaded[key]

    def _load_files(self, record: KernelRecord, device: Device) -> Any:
        file, lines, plan = record.cubin, None, None
        if self.driver.image == "ptx":
            file, lines, plan = record.ptx, read_line_map(self._folder, record), read_plan(self._folder, record)
        image = read_verified_file(self._folder, file)
        return self.driver.load(record, image, device, f"{self._folder}/{file.path}", lines, plan)

    # ---- launching

    def prepare(
        self, q: Any, k: Any, v: Any, out: Any, *, lse: Any = None, causal: bool = False, window: Any = None,
        softmax_scale: float | None = None, softcap: float | None = None, sink: Any = None,
        dtype: str | None = None, variant: str | None = None, num_sms: int | None = None,
    ) -> PreparedLaunch:  # fmt: skip
        """Check, select, load and bind a launch; calling the result is one trip to the driver.

        The arguments are those of `attention`. The result refers to the tensors' memory, not to the objects: keep them
        alive, and make a new one when an address changes. It may be called from any thread, any number of times, also
        during graph capture.
        """
        key = None
        if sink is None:
            key = self._cache.key(q, k, v, out, lse, (causal, window, softmax_scale, softcap, dtype, variant, num_sms))
            if key is not None and (known := self._cache.prepare(key)) is not None:
                return known
        arguments.glob("variant", variant)
        if dtype is not None and dtype not in ELEMENTS:
            raise arguments.wrong("dtype", dtype, f"one of {', '.join(ELEMENTS)}, or None")
        if num_sms is not None:
            num_sms = arguments.integer("num_sms", num_sms, "a number of multiprocessors, or None", 1, MAX_EXTENT)
        launch = describe_launch(
            q, k, v, out, lse, causal=causal, window=window, softmax_scale=softmax_scale,
            features=_features(softcap, sink), dtype=dtype, served=self._dtypes,
        )  # fmt: skip
        recipe = self._recipe(launch, variant, num_sms)
        prepared = recipe.bind(launch.sizes, launch.memory)
        if key is not None:
            self._cache.learn(key, recipe)
        return prepared

    def _recipe(self, launch: Launch, variant: str | None, num_sms: int | None) -> Recipe:
        """What the launch shares with others of its kind. Raises SelectionError, BundleError."""
        problem, device = launch.problem, self.driver.device_of(launch.tensors)
        key = (
            problem.dtype, problem.head_dim_qk, problem.head_dim_v, problem.mask, problem.window, problem.features,
            problem.softmax_scale, problem.lse, device.ordinal, variant, num_sms,
        )  # fmt: skip
        recipe = self._recipes.get(key)
        if recipe is None:
            entries = selection.candidates(self.manifest, problem, device, variant)
            choices = tuple(Choice(e, self._packer) for e in entries)
            recipe = Recipe(problem, choices, device, self.driver, self._load, num_sms)
            if len(self._recipes) >= MAX_RECIPES:
                self._recipes = {}
            self._recipes[key] = recipe
        return recipe

    def _packer(self, entry: KernelEntry) -> Packer:
        packer = self._packers.get(entry.id)
        if packer is None:
            packer = self._packers.setdefault(entry.id, Packer(self.record(entry)))
        return packer

    def attention(
        self, q: Any, k: Any, v: Any, out: Any, *, lse: Any = None, causal: bool = False, window: Any = None,
        softmax_scale: float | None = None, softcap: float | None = None, sink: Any = None, stream: Any = None,
        dtype: str | None = None, variant: str | None = None, num_sms: int | None = None,
    ) -> Any:  # fmt: skip
        """out = softmax(softmax_scale * q k^T) v, launched on `stream`; returns `out`.

        q (batch, seqlen_q, num_heads_q, head_dim_qk); k (batch, seqlen_k, num_heads_kv, head_dim_qk);
        v (batch, seqlen_k, num_heads_kv, head_dim_v); out (batch, seqlen_q, num_heads_q, head_dim_v), all bf16 or all
        fp16, any strides with a unit last one. num_heads_q is a multiple of num_heads_kv: q head h reads KV head
        ``h // (num_heads_q // num_heads_kv)``.
        lse: float32 (batch, num_heads_q, seqlen_q), natural log, any strides; None: not wanted. out and lse share no
        element with another tensor; slices of one buffer may interleave.
        causal: key j is seen by query i iff ``j <= i + seqlen_k - seqlen_q``. A query without keys: out 0, lse -inf.
        window: (left, right), inclusive around that diagonal, None unbounded; (None, 0) is causal.
        softmax_scale: default 1 / sqrt(head_dim_qk); 0 weighs all keys alike.
        softcap, sink: need kernels built with them.
        stream: raw handle (0: legacy default stream), an object with ``__cuda_stream__`` or ``cuda_stream``; None:
        torch's current stream when q is a torch tensor, otherwise an error.
        dtype: element type of tensors that hold bit patterns (numpy uint16); another than other tensors have is
        refused. variant: a glob over kernel ids.
        num_sms: use at most this many CTAs, as on a device of that many multiprocessors (default: the device's own);
        the result does not depend on it.

        Raises ProblemError, SelectionError, BundleError, DriverError.
        """
        handle = stream if type(stream) is int else stream_handle(stream, q, self.driver.image == "cubin")
        self.attend(q, k, v, out, lse, (causal, window, softmax_scale, softcap, dtype, variant, num_sms), handle, sink)
        return out

    def attend(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, options: tuple[Any, ...], handle: int, sink: Any = None
    ) -> None:
        """`attention` for callers that count microseconds.

        options: (causal, window, softmax_scale, softcap, dtype, variant, num_sms). handle: of the stream.
        """
        key = None if sink is not None else self._cache.key(q, k, v, out, lse, options)
        if key is not None and self._cache.launch(key, handle):
            return
        launch = None if key is None else self._cache.prepare(key)
        if launch is None:
            causal, window, softmax_scale, softcap, dtype, variant, num_sms = options
            launch = self.prepare(
                q, k, v, out, lse=lse, causal=causal, window=window, softmax_scale=softmax_scale, softcap=softcap,
                sink=sink, dtype=dtype, variant=variant, num_sms=num_sms,
            )  # fmt: skip
        if key is not None:
            self._cache.store(key, launch)
        launch(handle)


def _features(softcap: float | None, sink: Any) -> tuple[str, ...]:
    """Features that a launch asks for. softcap None or 0 means none; a bad value is refused by name."""
    features = []
    if softcap is not None:
        value = arguments.number("softcap", softcap, "a float >= 0; 0 or None means no softcap")
        if not 0 <= value < float("inf"):
            raise ProblemError(f"softcap: {value}; it must be finite and >= 0; 0 or None means no softcap")
        if value > 0:
            features.append("softcap")
    if sink is not None:
        features.append("sink")
    return tuple(features)
