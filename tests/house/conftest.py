"""What rules about source files share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.house.trees import forget


@pytest.fixture(scope="package", autouse=True)
def trees_are_forgotten() -> Iterator[None]:
    """They are a million objects, which no collection of garbage has to look at: not later, and not while they are
    made."""
    gc.disable()
    yield
    forget()
    gc.enable()
