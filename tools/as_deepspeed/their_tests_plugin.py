"""What pytest needs for DeepSpeed's own tests in addition to their conftest.py."""

from __future__ import annotations

import multiprocessing

import pytest

multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "deepspeed", "pytest"])


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("world_size(number): of ranks", "sequential: not next to others"):
        config.addinivalue_line("markers", marker)


@pytest.fixture
def compile_mode() -> bool:
    """Of some of their tests: with ``engine.compile()`` or without."""
    return False
