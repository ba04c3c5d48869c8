"""``deepspeed.runtime.config``: a configuration with the attributes of DeepSpeed's ``DeepSpeedConfig``."""

from __future__ import annotations

from typing import Any

from deepoffload.config import Config, Precision, parse_config
from deepoffload.config.source import read_source
from deepoffload.deepspeed.initialization import DEFAULT_GRADIENT_CLIPPING
from deepoffload.deepspeed.names import AbsentNameError
from deepoffload.deepspeed.optimizer_section import deepspeeds_name
from deepoffload.device import Tier
from deepoffload.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "ZeroConfig"]

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUON_OPTIMIZER = "muon"
MUSGD_OPTIMIZER = "musgd"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
"""What ``engine.optimizer_name()`` is compared with; the last three are those of older versions."""

_DEEPSPEED_NAMES = {Tier.HOST: "cpu", Tier.NVME: "nvme"}


class ZeroConfig:
    """``DeepSpeedConfig.zero_config``.

    Attributes:
        stage: of ZeRO, as the configuration says; 0 where it says none.
        offload_param, offload_optimizer: ``"cpu"``, ``"nvme"``, or None where nothing is offloaded or nothing said.
    """

    def __init__(self, config: Config) -> None:
        self.stage = config.zero_stage or 0
        self.offload_param = None if config.offload_param is None else _DEEPSPEED_NAMES.get(config.offload_param)
        self.offload_optimizer = (
            None if config.offload_optimizer is None else _DEEPSPEED_NAMES.get(config.offload_optimizer)
        )


class DeepSpeedConfig:
    """A configuration that was read and checked.

    Args:
        config: a file, a mapping, or a :class:`~deepoffload.config.Config`.
        mpu, mesh_device: accepted; all ranks are data-parallel.

    Attributes:
        config: the :class:`~deepoffload.config.Config`; all there is to ask.

    Raises:
        ConfigError: it is wrong.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = read_source(config)[0]
        self.config = said = parse_config(config)
        self.train_batch_size = said.train_batch_size
        self.train_micro_batch_size_per_gpu = said.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps = said.gradient_accumulation_steps
        clipping = said.gradient_clipping
        self.gradient_clipping = DEFAULT_GRADIENT_CLIPPING if clipping is None else clipping
        self.steps_per_print = said.steps_per_print
        self.wall_clock_breakdown = said.wall_clock_breakdown
        self.zero_config = ZeroConfig(said)
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_config.stage > 0
        self.fp16_enabled = self.float16_enabled = said.precision is Precision.FP16
        self.bfloat16_enabled = said.precision is Precision.BF16
        self.optimizer_name = None if said.optimizer is None else deepspeeds_name(said.optimizer)
        self.optimizer_params = None if said.optimizer is None else dict(said.optimizer.params)
        self.scheduler_name = None if said.scheduler is None else said.scheduler.type
        self.scheduler_params = None if said.scheduler is None else dict(said.scheduler.params)

    def print_user_config(self) -> str:
        """What was given, as text."""
        return str(self._param_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":
            raise AttributeError(name)
        raise AbsentNameError(f"DeepSpeedConfig has no {name!r} here; its attribute config has every setting")
