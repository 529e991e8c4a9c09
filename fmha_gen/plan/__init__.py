"""Spec -> plan: solves and checks every budget of one variant, and refuses what cannot fit with the arithmetic.

`make_plan` solves; `describe` turns a plan into tables; `model` has the bound that plan and analysis share.
"""

from __future__ import annotations

from .describe import Table, describe
from .solve import make_plan
from .types import KernelPlan

__all__ = ["KernelPlan", "Table", "describe", "make_plan"]
