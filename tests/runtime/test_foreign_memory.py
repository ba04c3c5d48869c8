"""``deepoffload.paged`` takes one unit's memory beyond the budget; its state would take 128 MiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MATRIX_MIB = 4.0
"""Of one weight, or one array of its state."""


@pytest.mark.parametrize("name", ["NAdam", "Adafactor"])
def test_one_units_memory_beyond_the_budget(run_program: Callable[..., Any], name: str) -> None:
    # Large blocks go back to the system at once: what the C library keeps for later is not what the step takes.
    facts = run_program("foreign_memory_program", name, fresh=True, MALLOC_MMAP_THRESHOLD_="262144").said
    assert facts["above"] <= 6 * MATRIX_MIB, facts
    assert facts["stats"]["host_peak_bytes"] <= facts["stats"]["host_budget_bytes"]
    assert facts["stats"]["disk_bytes_written"] > 3 * 16 * 4 * MATRIX_MIB if name == "NAdam" else True
    assert facts["losses"][2] < facts["losses"][0]
