"""What a training state is made of: checked when it is made, and before each save and load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepoffload.errors import UsageError


def check_objects(module: nn.Module, optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any]) -> None:
    """Raise UsageError where something has no state, is there twice, or belongs to another model."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"TrainingState(optimizer=...) takes a torch optimizer, not {type(optimizer).__name__}")
    for name, other in others.items():
        if isinstance(other, type):
            raise UsageError(f"TrainingState({name}=...): {other.__name__} is a class; give an object of it")
        if not callable(getattr(other, "state_dict", None)) or not callable(getattr(other, "load_state_dict", None)):
            raise UsageError(
                f"TrainingState({name}=...): {type(other).__name__} has no state_dict() and load_state_dict(), so "
                "there is nothing to save; leave it out, or give it these"
            )
    _check_once(module, optimizer, others)
    check_params(module, optimizer)


def _check_once(module: nn.Module, optimizer: torch.optim.Optimizer | None, others: Mapping[str, Any]) -> None:
    """Two states of one object would be saved, and loaded one after the other."""
    known = {id(part): "a part of the model" for part in module.modules()}
    known.update({id(module): "the model", id(optimizer): "the optimizer"})
    for name, other in others.items():
        itself = f"the same object as {name}"
        what = known.setdefault(id(getattr(other, "_orig_mod", other)), itself)
        if what != itself:
            raise UsageError(f"TrainingState({name}=...) is {what}, which is saved already; leave {name} out")


def check_params(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise UsageError where the optimizer has a parameter that is none of the model's."""
    if optimizer is None:
        return
    known = {id(param) for param in module.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for number, param in enumerate(group["params"]):
            if id(param) not in known:
                raise UsageError(
                    f"the optimizer's group {index} has a parameter (number {number}, shape {tuple(param.shape)}) "
                    "that is none of the model's, so it has no name; make the optimizer of model.parameters()"
                )
