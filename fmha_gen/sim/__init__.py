"""A simulator of sm_100a PTX: runs real kernels warp by warp under seeded schedules, and checks their synchronisation.

Imports nothing of the generator; `driver` (not imported here) connects it to bundles.
"""

from .counters import Counters, LoopCount
from .findings import Finding, Result
from .launch import Launch, prepare, run
from .memory import GlobalMemory
from .ptx import Unsupported
from .tensormap import TensorMap, TensorMapError

__all__ = ["Counters", "Finding", "GlobalMemory", "Launch", "LoopCount", "Result", "TensorMap", "TensorMapError",
           "Unsupported", "prepare", "run"]  # fmt: skip
