"""``deepoffload.paged`` takes one unit's memory beyond the budget; all its state would take 80 MiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MATRIX_MIB = 4.0
"""Of one weight, or one array of its state."""


def test_one_units_memory_beyond_the_budget(run_program: Callable[..., Any]) -> None:
    # Large blocks go back to the system at once: what the C library keeps for later is not what the step takes.
    facts = run_program("foreign_memory_program", "NAdam", fresh=True, MALLOC_MMAP_THRESHOLD_="262144").said
    assert facts["above"] <= 6 * MATRIX_MIB, facts
    assert facts["stats"]["host_peak_bytes"] <= facts["stats"]["host_budget_bytes"]
    assert facts["stats"]["disk_bytes_written"] > 10 * 2 * MATRIX_MIB * 2**20
    assert facts["losses"][1] != facts["losses"][0]
