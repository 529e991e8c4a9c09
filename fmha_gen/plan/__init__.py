"""Spec -> plan: solves and checks every budget of one variant, and refuses what cannot fit with the arithmetic."""

from __future__ import annotations

from .solve import make_plan
from .types import KernelPlan

__all__ = ["KernelPlan", "make_plan"]
