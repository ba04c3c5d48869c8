"""``deepspeed.runtime.zero.partition_parameters``."""

from __future__ import annotations

from deepoffload.deepspeed.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    is_zero_param,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
]
