"""Late transfers, pauses, other orders, evaluations in between: nothing hangs, nothing grows, the bits stay the same.

``SOAK_STEPS=1000 pytest tests/runtime/test_soak.py`` is the long version (some minutes).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from deepoffload.config import StepOverlap
from tests.runtime.conftest import Outcome

STEPS = int(os.environ.get("SOAK_STEPS", "40"))
SECONDS_PER_STEP_MAX = 1.5
GROWTH_KIB_MAX = 4 << 10


@pytest.mark.timeout(120 + STEPS * SECONDS_PER_STEP_MAX)
@pytest.mark.parametrize("overlap", StepOverlap, ids=lambda overlap: overlap.value)
def test_soak(run_program: Callable[..., Outcome], overlap: StepOverlap) -> None:
    limit_s = 60 + STEPS * SECONDS_PER_STEP_MAX
    said = run_program("soak_program", STEPS, overlap.value, limit_s=limit_s).said
    assert said["first_different"] is None and said["seen"] > STEPS
    assert said["grown_kib"] <= GROWTH_KIB_MAX
    assert said["threads"] == 1
    stats = said["stats"]
    assert stats["evictions"] > STEPS and stats["disk_bytes_read"] > 0, "nothing moved: this tested nothing"
    assert stats["host_peak_bytes"] <= stats["host_budget_bytes"]
