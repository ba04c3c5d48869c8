"""DeepSpeed's surface: ``import deepoffload.deepspeed as deepspeed`` in the place of ``import deepspeed``.

Names are loaded when first used. ``package_table`` lists those of DeepSpeed, and what becomes of each here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepoffload.deepspeed import accelerator as accelerator
    from deepoffload.deepspeed import checkpoint as checkpoint
    from deepoffload.deepspeed import checkpointing as checkpointing
    from deepoffload.deepspeed import comm as comm
    from deepoffload.deepspeed import moe as moe
    from deepoffload.deepspeed import ops as ops
    from deepoffload.deepspeed import pipe as pipe
    from deepoffload.deepspeed import runtime as runtime
    from deepoffload.deepspeed import utils as utils
    from deepoffload.deepspeed import zero as zero
    from deepoffload.deepspeed.accelerator import get_accelerator as get_accelerator
    from deepoffload.deepspeed.comm import init_distributed as init_distributed
    from deepoffload.deepspeed.entry import initialize as initialize
    from deepoffload.deepspeed.initialization import add_config_arguments as add_config_arguments
    from deepoffload.deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedConfig
    from deepoffload.deepspeed.runtime.config import DeepSpeedConfigError as DeepSpeedConfigError
    from deepoffload.deepspeed.runtime.engine import DeepSpeedEngine as DeepSpeedEngine
    from deepoffload.deepspeed.utils import OnDevice as OnDevice
    from deepoffload.deepspeed.utils.logging import log_dist as log_dist
    from deepoffload.deepspeed.utils.logging import logger as logger

__version__ = "0.19.8"
"""The DeepSpeed whose names these are; ``deepoffload.__version__`` is our own."""

__version_major__, __version_minor__, __version_patch__ = map(int, __version__.split("."))
__git_hash__ = __git_branch__ = "unknown"
"""What DeepSpeed has in them when it was not built from a repository."""

_HOMES = {
    "DeepSpeedConfig": "deepoffload.deepspeed.runtime.config:DeepSpeedConfig",
    "DeepSpeedConfigError": "deepoffload.errors:ConfigError",
    "DeepSpeedEngine": "deepoffload.deepspeed.engine:TrainingEngine",
    "OnDevice": "deepoffload.deepspeed.utils:OnDevice",
    "add_config_arguments": "deepoffload.deepspeed.initialization:add_config_arguments",
    "get_accelerator": "deepoffload.deepspeed.accelerator:get_accelerator",
    "init_distributed": "deepoffload.deepspeed.comm:init_distributed",
    "initialize": "deepoffload.deepspeed.entry:initialize",
    "log_dist": "deepoffload.deepspeed.utils.logging:log_dist",
    "logger": "deepoffload.deepspeed.utils.logging:logger",
}

_MODULES = (
    *("accelerator", "checkpoint", "checkpointing", "comm", "inference", "linear", "moe", "monitor", "ops", "pipe"),
    *("profiling", "runtime", "sequence", "utils", "zero"),
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")  # which sets the attribute
    if name == "dist":
        return importlib.import_module(f"{__name__}.comm")
    home = _HOMES.get(name)
    if home is not None:
        module, _, attribute = home.partition(":")
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepoffload.deepspeed.names import look_up
    from deepoffload.deepspeed.package_table import PACKAGE_NAMES

    return look_up(PACKAGE_NAMES, name, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES, "dist"})
