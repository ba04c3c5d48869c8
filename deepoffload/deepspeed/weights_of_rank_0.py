"""What ``deepspeed.initialize`` does with a model that each rank has built for itself: all get the values of rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.deepspeed import comm
from deepoffload.optim.handles import handle_of

_OF_CPU = ("gloo", "mpi")
"""Backends for tensors in host memory."""


def take_weights_of_rank_0(model: Any) -> None:
    """Give the parameters and buffers of an ordinary model the values that they have on rank 0 of the default group.

    Does nothing where the ranks' models differ in more than values, which ``initialize`` then names, nor for a model
    that is paged already: its ranks have compared their values when they built it.
    """
    if not comm.is_initialized() or comm.get_world_size() == 1:
        return
    group = None if comm.get_backend() in _OF_CPU else comm.new_group(backend="gloo")
    try:
        looks: list[Any] = [None] * comm.get_world_size()
        comm.all_gather_object(looks, _look(model), group=group)
        if looks[0] is not None and all(look == looks[0] for look in looks):
            for _, tensor in _values(model):
                _broadcast(tensor, group)
    finally:
        if group is not None:
            comm.destroy_process_group(group)


def _values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Ordinary tensors of the model; those of other packages have other forms."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in (nn.Parameter, Tensor) and type(tensor.data) is Tensor and not tensor.is_sparse:
            yield name, tensor


def _look(model: Any) -> str | None:
    """What has to be equal before values can be sent; None where nothing is sent."""
    if not isinstance(model, nn.Module):
        return None
    params = list(model.parameters())
    if any(param.is_meta or handle_of(param) is not None for param in params):
        return None
    seen = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _values(model)]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


@torch.no_grad()
def _broadcast(tensor: Tensor, group: Any) -> None:
    values = tensor.detach().contiguous().reshape(-1)
    comm.broadcast(values.view(torch.uint8), 0, group=group)  # as bytes: gloo does not know all types
    if comm.get_rank() and values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values.view(tensor.shape))
