"""The bundle whose kernels are mutated, and the table of what became of the mutants."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.shared_build import shared_build

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def mutants_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of kernels.yaml, compiled once for all test processes; kernels come from the user's build cache."""
    return shared_build(tmp_path_factory, HERE / "kernels.yaml", "mutants bundle")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests recorded as "mutants": rows of (kernel, family, how it ended), as a Markdown table."""
    rows: Counter[tuple[str, str, str]] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "mutants":
                    rows.update(tuple(row) for row in value)
    if not rows:
        return
    kernels = sorted({kernel for kernel, _, _ in rows})
    terminalreporter.write_sep("=", "mutants: caught / run (equivalent)")
    terminalreporter.write_line("| fault | " + " | ".join(kernels) + " |")
    terminalreporter.write_line("|---|" + "---|" * len(kernels))
    for family in [*sorted({family for _, family, _ in rows}), ""]:
        cells = [_cell(rows, kernel, family) for kernel in kernels]
        terminalreporter.write_line(f"| {family or '**all**'} | " + " | ".join(cells) + " |")


def _cell(rows: Counter[tuple[str, str, str]], kernel: str, family: str) -> str:
    found: Counter[str] = Counter()
    for (k, f, end), n in rows.items():
        if k == kernel and family in ("", f):
            found[end] += n
    if not found:
        return "-"
    same = f" ({found['equivalent']})" if found["equivalent"] else ""
    return f"{found['caught']} / {sum(found.values())}{same}"
