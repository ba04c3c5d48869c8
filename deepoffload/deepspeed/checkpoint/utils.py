"""``deepspeed.checkpoint.utils``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of a tensor, or of lists, tuples and dicts with tensors, whose tensors share no memory with others.

    ``torch.save(engine.module.state_dict())`` needs no such copy: values of paged weights are read when they are
    written.

    Args:
        device: of the copies.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item
