"""The launcher: open a bundle, choose a kernel, pack its arguments, launch it. Importing it does not initialise CUDA.

Needs the standard library, and cuda.bindings at the first launch on a GPU. It never compiles.
"""

from __future__ import annotations

from .bound import PreparedLaunch
from .bundle import Bundle
from .driver import Device, Driver
from .problem import Problem
from .select import covers, explain, select
from .tensors import TensorArg

__all__ = ["Bundle", "Device", "Driver", "PreparedLaunch", "Problem", "TensorArg", "covers", "explain", "select"]
