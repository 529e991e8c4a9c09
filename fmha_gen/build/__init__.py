"""Specs -> bundle: plan, render, compile side by side, write.

A kernel that fails fails the build, by name; the others stay in the build cache for the next try, and no manifest is
written. With nothing changed, every kernel comes from the cache and no file of the bundle is touched.
"""

from __future__ import annotations

from .cache import BuildCache, default_cache_dir
from .executors import open_executor
from .identity import build_digest, generator
from .jobs import choose_jobs
from .keep import Dropped
from .orchestrate import BuildOptions, BuildResult, KernelResult, build_bundle

__all__ = [
    "BuildCache",
    "BuildOptions",
    "BuildResult",
    "Dropped",
    "KernelResult",
    "build_bundle",
    "build_digest",
    "choose_jobs",
    "default_cache_dir",
    "generator",
    "open_executor",
]
