"""``deepspeed.runtime.zero.offload_config``: what ``engine.offload_states`` takes."""

from __future__ import annotations

import enum


class OffloadDeviceEnum(str, enum.Enum):
    """Where states can go."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Kinds of states."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
