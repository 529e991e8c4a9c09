"""Where the templates and the default specs are: at the top of a checkout, inside the package of an installed wheel."""

from __future__ import annotations

from pathlib import Path

from .errors import ToolchainError

_PACKAGE = Path(__file__).resolve().parent


def checkout_root() -> Path | None:
    """The top of the checkout that this package is imported from, or None when it is an installed wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "specs").is_dir() else None


def data_dir(name: str) -> Path:
    """The folder ``templates`` or ``specs``. Raises ToolchainError when the installation lacks it."""
    root = checkout_root()
    path = root / name if root is not None else _PACKAGE / "_data" / name
    if not path.is_dir():
        raise ToolchainError(f"{path}: no such folder; this installation of fmha-gen is incomplete; reinstall it")
    return path
