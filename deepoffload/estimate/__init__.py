"""Will it fit, and how fast will it be: memory by tier and the time of a step, predicted with what the engine decides
with.

``python -m deepoffload.estimate --help`` is the command; these are its parts.
"""

from __future__ import annotations

from deepoffload.estimate.deepspeed import (
    estimate_zero1_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs,
)
from deepoffload.estimate.deepspeed_tables import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from deepoffload.estimate.machine import MachineSpec, read_machine
from deepoffload.estimate.questions import Estimate, estimate, largest_model
from deepoffload.estimate.states import (
    estimate_model_states_mem_needs_all_cold,
    estimate_model_states_mem_needs_all_live,
)
from deepoffload.estimate.subject import Batch, Subject, from_config, from_counts, from_module

__all__ = [
    "Batch",
    "Estimate",
    "MachineSpec",
    "Subject",
    "estimate",
    "estimate_model_states_mem_needs_all_cold",
    "estimate_model_states_mem_needs_all_live",
    "estimate_zero1_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "from_config",
    "from_counts",
    "from_module",
    "largest_model",
    "read_machine",
]
