"""NVIDIA's own tools, where they are installed: what our readers are compared with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def find_cuobjdump() -> str:
    """Path of cuobjdump; skips the test where there is none."""
    if found := shutil.which("cuobjdump"):
        return found
    nvidia = pytest.importorskip("nvidia", reason="cuobjdump is not installed (nvidia-cuda-cuobjdump)")
    for root in nvidia.__path__:
        for tool in Path(root).glob("*/bin/cuobjdump"):
            return str(tool)
    pytest.skip("cuobjdump is not installed (nvidia-cuda-cuobjdump)")
