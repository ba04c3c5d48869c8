"""What rules about source files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.house.trees import forget


@pytest.fixture(scope="package", autouse=True)
def trees_are_forgotten() -> Iterator[None]:
    """They are a million objects, which later tests need not have in their collections of garbage."""
    yield
    forget()
