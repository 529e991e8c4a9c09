"""Compile segment functions with LLVM; cached in the process by the text of the segment."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable

import llvmlite.binding as llvm

from . import mathlib
from .builder import Fn
from .object_cache import ObjectCache

NativeFn = Callable[[int, int], int]
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32)
_BATCH = 400  # segments per LLVM module
OPT_LEVEL = 1

_cache: dict[str, NativeFn] = {}
_engines: list[object] = []


def _target_machine() -> object:
    """A fresh one per module: the engine takes it over."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=OPT_LEVEL,
        codemodel="jitdefault",
        jit=True,
    )


_ATTRIBUTES = """
attributes #0 = { nounwind "min-legal-vector-width"="512" "prefer-vector-width"="512" }
attributes #1 = { nounwind alwaysinline "min-legal-vector-width"="512" "prefer-vector-width"="512" }
attributes #2 = { nounwind noinline "min-legal-vector-width"="512" "prefer-vector-width"="512" }
"""


class Batch:
    """Segments to be compiled together. `add` returns a key; after `compile`, `get` gives the native function."""

    def __init__(self) -> None:
        self.pending: dict[str, str] = {}
        self.helpers: dict[str, set[str]] = {}

    def add(self, fn: Fn, live_out: int) -> str:
        body = fn.finish("SEGMENT", live_out)
        key = hashlib.sha256(body.encode()).hexdigest()[:24]
        if key not in _cache and key not in self.pending:
            self.pending[key] = body.replace("@SEGMENT(", f"@s{key}(", 1)
            self.helpers[key] = fn.helpers
        return key

    def compile(self) -> None:
        keys = list(self.pending)
        for start in range(0, len(keys), _BATCH):
            self._compile(keys[start : start + _BATCH])
        self.pending.clear()

    def _compile(self, keys: list[str]) -> None:
        wanted = sorted(set().union(*(self.helpers[k] for k in keys)))
        text = [mathlib.DECLARATIONS]
        text += [h for h in wanted if not h.startswith("@")]
        text += [mathlib.build(h[1:]) for h in wanted if h.startswith("@")]
        text += [self.pending[k] for k in keys]
        text.append(_ATTRIBUTES)
        source = "\n".join(text)
        module = llvm.parse_assembly(source)
        version = ".".join(map(str, llvm.llvm_version_info))
        salt = f"{version} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {OPT_LEVEL}"
        module.name = hashlib.sha256(f"{salt}\n{source}".encode()).hexdigest()
        machine = _target_machine()
        cache = ObjectCache()
        options = llvm.create_pipeline_tuning_options(speed_level=0)
        builder = llvm.create_pass_builder(machine, options)
        passes = llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        if cache.load(module) is None:
            passes.run(module, builder)
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.set_object_cache(cache.store, cache.load)
        engine.finalize_object()
        _engines.append(engine)
        for key in keys:
            _cache[key] = _PROTOTYPE(engine.get_function_address(f"s{key}"))


def get(key: str) -> NativeFn:
    return _cache[key]
