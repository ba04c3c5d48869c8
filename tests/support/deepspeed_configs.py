"""Sections of configurations as people write them for DeepSpeed."""

from __future__ import annotations

from typing import Any

HOST = {"device": "cpu", "pin_memory": True}

STAGE3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
"""ZeRO's third stage in the documentation of Hugging Face, which most copy."""
