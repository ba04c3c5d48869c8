"""The optimizer that a configuration's ``optimizer`` section names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepoffload.config import OptimizerConfig
from deepoffload.errors import ConfigError, DeepOffloadError, UsageError
from deepoffload.optim.adagrad import CPUAdagrad
from deepoffload.optim.adam import CPUAdam
from deepoffload.optim.foreign.muon import Muon, split_groups
from deepoffload.optim.foreign.paged_optimizer import paged
from deepoffload.optim.handles import handle_of
from deepoffload.optim.lion import CPULion
from deepoffload.optim.sgd import CPUSGD

_OURS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": CPUAdam,
    "adamw": CPUAdam,
    "lion": CPULion,
    "adagrad": CPUAdagrad,
    "sgd": CPUSGD,
}
_TORCHS: Mapping[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
}


def listed_parameters(parameters: Any) -> list[Any]:
    """Parameters or groups that were passed in. Raises UsageError: there are none, or it is no iterable."""
    if isinstance(parameters, (torch.Tensor, str)) or not isinstance(parameters, Iterable):
        raise UsageError(
            f"initialize(model_parameters=...) takes parameters or groups of them, not {type(parameters).__name__}"
        )
    found = [parameters] if isinstance(parameters, Mapping) else list(parameters)
    if not found:
        raise UsageError(
            "initialize(model_parameters=...) is empty (what model.parameters() gives can be read once); leave it out "
            "to train all parameters that require gradients"
        )
    return found


def deepspeeds_name(said: OptimizerConfig) -> str:
    """What DeepSpeed calls the optimizer of a configuration: its own in small letters, torch's by their class."""
    torchs = torch.optim.SGD if said.type == "sgd" else _TORCHS.get(said.type)
    return said.type if torchs is None else torchs.__name__


def make_optimizer(said: OptimizerConfig, params: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that a configuration's ``optimizer`` section names, over parameters or groups.

    One of torch's gets its state paged; with several ranks, which cut parameters, it keeps its state in memory.

    Args:
        model: tells Muon which parameters are embeddings and the head.

    Raises:
        ConfigError: a parameter is out of range.
    """
    params = list(params)
    settings: dict[str, Any] = dict(said.params)
    try:
        if said.type == "muon":
            return Muon(split_groups(model, params), **{"ns_method": "gram", **settings})
        if said.type in _OURS:
            return _OURS[said.type](params, **settings)
        if _are_cut(model):
            return _TORCHS[said.type](params, **settings)
        return paged(_TORCHS[said.type], params, **settings)
    except DeepOffloadError:
        raise
    except ValueError as error:
        raise ConfigError(f"optimizer.params: {error}") from error


def _are_cut(model: nn.Module) -> bool:
    """Whether several ranks share the model's parameters."""
    return any(handle is not None and handle.pager.link is not None for handle in map(handle_of, model.parameters()))
