"""``deepspeed.ops``: optimizers and file transfers by DeepSpeed's names."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__compatible_ops__ = dict.fromkeys(
    ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lion"), True
)
"""The operators of DeepSpeed's whose work is done here. Programs ask before they use one."""

__getattr__ = submodules(__name__, ("adagrad", "adam", "aio", "lamb", "lion", "op_builder"), "ops")
