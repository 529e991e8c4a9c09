"""How many kernels to compile side by side."""

from __future__ import annotations

import os
from pathlib import Path

MEMORY_PER_JOB_BYTES = 3 << 28  # 768 MiB; the compiler peaks at 303 MiB on a (192, 128) causal kernel

_CGROUP_FILES = (  # of versions 2 and 1, as a container sees its own group
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def choose_jobs(asked: int | None, num_kernels: int) -> int:
    """At least 1, at most what processors (unless `asked` says otherwise), memory and the number of kernels allow."""
    wanted = asked if asked is not None else len(os.sched_getaffinity(0))
    return max(1, min(wanted, num_kernels, available_memory_bytes() // MEMORY_PER_JOB_BYTES))


def available_memory_bytes() -> int:
    """What the machine, and the control group that this process lives in, still have."""
    free = [_meminfo_available()]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            root = Path("/sys/fs/cgroup")
            free.append(int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return max(0, min(free))


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62  # not Linux: nothing known, nothing limited
