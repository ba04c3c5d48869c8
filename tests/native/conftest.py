"""Every test here may use two of torch's threads."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def team(two_threads: None) -> None:
    """For all tests of this folder."""
