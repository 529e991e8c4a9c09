"""Bundles of one kernel, whole or broken on purpose, made from the default one."""

from __future__ import annotations

import re
from pathlib import Path

from fmha_gen.bundle import KernelFiles, write_bundle
from fmha_gen.manifest_io import read_manifest, read_plan, read_record, read_verified_file


def one_kernel(core_bundle: Path, root: Path, kernel: str, edit: tuple[str, str] | None = None) -> Path:
    """A bundle with the kernel whose id starts with `kernel`; edit: (regex, replacement) over its PTX."""
    manifest = read_manifest(core_bundle)
    entry = next(e for e in manifest.kernels if e.id.startswith(kernel))
    record = read_record(core_bundle, entry)
    cubin, ptx = (read_verified_file(core_bundle, f) for f in (record.cubin, record.ptx))
    lines = record.line_map and read_verified_file(core_bundle, record.line_map)
    if edit is not None:
        text, count = re.subn(edit[0], edit[1], ptx.decode())
        assert count, f"{edit[0]} is not in the PTX"
        ptx = text.encode()
    files = KernelFiles(record, cubin, ptx, read_plan(core_bundle, record), lines)
    return write_bundle(root, "one", "1", manifest.generator, manifest.toolchain, 580, [files]).root
