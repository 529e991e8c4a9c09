"""The ``golden`` fixture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.golden.files import HERE, check_golden


@pytest.fixture
def golden(update_golden: bool) -> Callable[[str, str], None]:
    """``golden(relative_path, text)``: compare with the committed file, or rewrite it under --update-golden."""

    def compare(relative: str, text: str) -> None:
        check_golden(HERE, relative, text, update_golden)

    return compare
