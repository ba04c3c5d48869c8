"""Every test here runs on one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_models(one_thread: None) -> None:
    """For all tests of this folder."""
