"""Tests that need a device: the simulated one, in processes of its own."""

from __future__ import annotations

from tests.support.simulated_gpu.isolation import (
    pytest_collection_finish,
    pytest_runtest_protocol,
    pytest_runtestloop,
    simulated_gpu,
)

__all__ = ["pytest_collection_finish", "pytest_runtest_protocol", "pytest_runtestloop", "simulated_gpu"]
