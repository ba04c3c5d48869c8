"""``deepspeed.runtime.zero.config``."""

from __future__ import annotations

import enum

from deepoffload.deepspeed.names import submodules


class ZeroStageEnum(int, enum.Enum):
    """The stages of ZeRO; ``engine.zero_optimization_stage()`` is one of these numbers."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = weights


__getattr__ = submodules(__name__, (), "runtime.zero.config")
