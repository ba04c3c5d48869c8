"""``deepspeed.runtime.zero.stage3``: DeepSpeed's own estimates. ``python -m deepoffload.estimate`` has ours."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules
from deepoffload.deepspeed.zero import GatheredParameters, Init, unwrap_model_for_generation
from deepoffload.estimate.deepspeed import estimate_zero3_model_states_mem_needs
from deepoffload.estimate.deepspeed_tables import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]

__getattr__ = submodules(__name__, (), "runtime.zero.stage3")
