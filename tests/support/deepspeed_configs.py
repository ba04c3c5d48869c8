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

STAGE2: dict[str, Any] = {
    "stage": 2,
    "offload_optimizer": HOST,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
"""The second one."""

AUTO_BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)

OF_TRAINER: dict[str, dict[str, Any]] = {
    name: {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        },
        "zero_optimization": stage,
        **AUTO_BATCH,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    for name, stage in (
        ("zero2.json", STAGE2),
        ("zero3.json", {**STAGE3, "offload_optimizer": HOST, "offload_param": HOST}),
    )
}
"""The files of transformers' own tests and of its documentation, as they are."""
