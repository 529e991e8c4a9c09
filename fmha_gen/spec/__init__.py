"""YAML specs and what they become: frozen `KernelSpec`s."""

from __future__ import annotations

from .model import AUTO_FIELDS, FEATURE_FIELDS, KernelSpec, Registers

__all__ = ["AUTO_FIELDS", "FEATURE_FIELDS", "KernelSpec", "Registers"]
