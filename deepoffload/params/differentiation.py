"""``torch.autograd.grad`` and ``backward`` with paged tensors among their arguments.

They need no bytes of what they differentiate by. The program's code runs inside them (custom functions, hooks, what a
checkpoint runs again) and may use any weight: every door stays open, and nothing is pinned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepoffload.params.torch_private import (
    VMAP_SIZES,
    autograd_backward,
    autograd_grad,
    door_frame,
    make_grads,
    past_doors,
)


def grad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``, called as its own check for ``__torch_function__`` passes the arguments on."""
    return autograd_grad(*args, **{**kwargs, "grad_outputs": given_as_views(kwargs.get("grad_outputs"))})


def backward(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """``torch.autograd.backward``, and ``Tensor.backward`` of a paged tensor, which calls its gradient otherwise."""
    rest = dict(kwargs)
    gradients = rest.pop("gradient" if func is Tensor.backward else "grad_tensors", None)
    autograd_backward(*args, grad_tensors=given_as_views(gradients), **rest)


def given_as_views(gradients: Any) -> Any:
    """torch reads the gradients that a backward starts with, and may save them, where no door sees it, and so it does
    with tangents: give it views."""
    if isinstance(gradients, Tensor):
        return gradients.view_as(gradients) if hasattr(gradients, "_slot") else gradients
    return None if gradients is None else tuple(given_as_views(gradient) for gradient in gradients)


def size(func: Any, args: Any, kwargs: Any) -> Any:
    """``tensor.size()``. ``torch.vmap`` asks this of a tensor that it maps over, right before native code takes the
    tensor apart where no door sees it."""
    if door_frame().f_code in VMAP_SIZES:
        slot = args[0]._slot
        slot.pager.hold_until_step(slot)
    return past_doors(func, args, kwargs)


def dtype(func: Any, args: Any, kwargs: Any) -> torch.dtype:
    """``tensor.dtype``. torch asks this of each gradient that a backward starts with, right before the engine reads it
    where no door sees it; :func:`grad` and :func:`backward` are not called when nothing else is paged."""
    tensor: Any = args[0]
    slot = tensor._slot
    caller = door_frame()
    if caller.f_code is make_grads.__code__ and caller.f_locals.get("grad") is tensor:
        slot.pager.hold_until_step(slot)
    return past_doors(func, (tensor,))
