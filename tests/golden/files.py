"""Comparing with golden files: committed texts that a change of plan or template must be seen to change."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
UPDATE = "pytest tests/golden --update-golden"


def check_golden(root: Path, relative: str, text: str, update: bool) -> None:
    """Fails with the path and the command when the file is missing, with a diff when it differs."""
    path = root / relative
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return
    if not path.exists():
        pytest.fail(f"{path}: no such golden file; if the text is right, write it with: {UPDATE}", pytrace=False)
    if path.read_text() != text:
        assert text.splitlines() == path.read_text().splitlines(), f"{path} differs; if on purpose: {UPDATE}"
        pytest.fail(f"{path} differs in line ends; if on purpose: {UPDATE}", pytrace=False)


def orphans(root: Path, folders: dict[str, set[str]]) -> list[Path]:
    """Files under the golden folders that no test compares with."""
    return sorted(
        p
        for folder, expected in folders.items()
        for p in (root / folder).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and p.relative_to(root / folder).as_posix() not in expected
    )
