"""``deepspeed.runtime.zero.stage_1_and_2``: DeepSpeed's own estimates. ``python -m deepoffload.estimate`` has ours."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules
from deepoffload.estimate.deepspeed import estimate_zero2_model_states_mem_needs
from deepoffload.estimate.deepspeed_tables import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

__getattr__ = submodules(__name__, (), "runtime.zero.stage_1_and_2")
