"""Train PyTorch models that do not fit: weights, gradients and optimizer states in host memory and on NVMe, just in
time.

Public names are loaded when first used, so that importing this package costs little compared with importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepoffload import errors as errors
    from deepoffload import schedules as schedules
    from deepoffload.accumulation.accumulate import accumulate as accumulate
    from deepoffload.checkpoint.pretrained import save_pretrained as save_pretrained
    from deepoffload.checkpoint.pretrained_loading import load_pretrained as load_pretrained
    from deepoffload.checkpoint.training_state import TrainingState as TrainingState
    from deepoffload.config import Config as Config
    from deepoffload.deepspeed.initialization import add_config_arguments as add_config_arguments
    from deepoffload.deepspeed.initialization import initialize as initialize
    from deepoffload.optim.adagrad import CPUAdagrad as CPUAdagrad
    from deepoffload.optim.adam import CPUAdam as CPUAdam
    from deepoffload.optim.adam import CPUAdamW as CPUAdamW
    from deepoffload.optim.foreign.muon import Muon as Muon
    from deepoffload.optim.foreign.paged_optimizer import paged as paged
    from deepoffload.optim.lion import CPULion as CPULion
    from deepoffload.optim.sgd import CPUSGD as CPUSGD
    from deepoffload.params.code_scan import careful as careful
    from deepoffload.runtime.context import last_micro_batch as last_micro_batch
    from deepoffload.runtime.context import offload_context as offload_context
    from deepoffload.runtime.context import stats as stats
    from deepoffload.runtime.joining import join as join
    from deepoffload.runtime.quantize import quantize_weights as quantize_weights
    from deepoffload.tiling.loss import tiled_loss as tiled_loss
    from deepoffload.tiling.tile_linear import tile_linear as tile_linear
    from deepoffload.tiling.tile_loss import tile_loss as tile_loss
    from deepoffload.tiling.tile_mlp import tile_mlp as tile_mlp
    from deepoffload.watching.monitor import Monitor as Monitor

__version__ = "0.1.0"

_MODULES = ("errors", "schedules")

_HOMES = {
    "Config": "deepoffload.config",
    "CPUAdagrad": "deepoffload.optim.adagrad",
    "CPUAdam": "deepoffload.optim.adam",
    "CPUAdamW": "deepoffload.optim.adam",
    "CPULion": "deepoffload.optim.lion",
    "CPUSGD": "deepoffload.optim.sgd",
    "Muon": "deepoffload.optim.foreign.muon",
    "Monitor": "deepoffload.watching.monitor",
    "accumulate": "deepoffload.accumulation.accumulate",
    "careful": "deepoffload.params.code_scan",
    "TrainingState": "deepoffload.checkpoint.training_state",
    "last_micro_batch": "deepoffload.runtime.context",
    "offload_context": "deepoffload.runtime.context",
    "stats": "deepoffload.runtime.context",
    "join": "deepoffload.runtime.joining",
    "add_config_arguments": "deepoffload.deepspeed.initialization",
    "paged": "deepoffload.optim.foreign.paged_optimizer",
    "quantize_weights": "deepoffload.runtime.quantize",
    "initialize": "deepoffload.deepspeed.initialization",
    "load_pretrained": "deepoffload.checkpoint.pretrained_loading",
    "save_pretrained": "deepoffload.checkpoint.pretrained",
    "tile_linear": "deepoffload.tiling.tile_linear",
    "tile_loss": "deepoffload.tiling.tile_loss",
    "tile_mlp": "deepoffload.tiling.tile_mlp",
    "tiled_loss": "deepoffload.tiling.loss",
}

__all__ = [
    "CPUAdagrad",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "CPUSGD",
    "Config",
    "Muon",
    "Monitor",
    "TrainingState",
    "accumulate",
    "add_config_arguments",
    "careful",
    "initialize",
    "join",
    "last_micro_batch",
    "load_pretrained",
    "offload_context",
    "paged",
    "quantize_weights",
    "save_pretrained",
    "stats",
    "tile_linear",
    "tile_loss",
    "tile_mlp",
    "tiled_loss",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"deepoffload.{name}")  # which sets the attribute
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'deepoffload' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
