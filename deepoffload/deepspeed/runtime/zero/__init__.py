"""``deepspeed.runtime.zero``."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules
from deepoffload.deepspeed.zero import GatheredParameters as GatheredParameters
from deepoffload.deepspeed.zero import Init as Init
from deepoffload.deepspeed.zero import ZeroParamStatus as ZeroParamStatus
from deepoffload.deepspeed.zero import register_external_parameter as register_external_parameter
from deepoffload.deepspeed.zero import unregister_external_parameter as unregister_external_parameter

_MODULES = ("config", "offload_config", "partition_parameters", "stage3", "stage_1_and_2", "tiling", "utils")

__getattr__ = submodules(__name__, _MODULES, "zero")
