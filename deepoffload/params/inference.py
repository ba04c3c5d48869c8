"""With ``inference = true`` nothing is trained: all that asks for a gradient gets an error that names the key."""

from __future__ import annotations

from inspect import unwrap
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.params.torch_private import door_caller, get_data, in_functorch, past_doors, requires_grad_of
from deepoffload.params.unit import ParamHandle

_ADD_PARAM_GROUP: CodeType = unwrap(torch.optim.Optimizer.add_param_group).__code__


def refuse_training(what: str) -> None:
    """Raise the error of ``what``, which trains."""
    raise UsageError(
        f"{what}: the configuration says inference = true, so every parameter is frozen and no memory is planned for "
        "gradients and optimizer state; leave inference out to train"
    )


def unfrozen(handle: ParamHandle) -> None:
    """The program has set ``requires_grad`` of a parameter.

    Raises:
        UsageError: nothing is trained. While a model is built it is frozen again instead: that is how models are made.
    """
    pager, param = handle.pager, handle.tensor
    if pager.inference and param is not None:
        past_doors(Tensor.requires_grad_, (param, False))
        if pager.gradients is not None:
            refuse_training(f"{handle.name}.requires_grad_(True)")
    elif pager.gradients is not None:
        pager.gradients.track(handle)


def requires_grad(func: Any, args: Any, kwargs: Any) -> Any:
    """``tensor.requires_grad_()``, and the assignment."""
    result = past_doors(func, args, kwargs)
    if requires_grad_of(args[0]) and isinstance(args[0]._slot, ParamHandle):
        unfrozen(args[0]._slot)
    return result


def is_leaf(func: Any, args: Any, kwargs: Any) -> bool:
    """``tensor.is_leaf``, which every optimizer of torch's asks of the parameters that it gets."""
    slot = args[0]._slot
    if slot.pager.inference and door_caller() is _ADD_PARAM_GROUP:
        refuse_training(f"an optimizer for {slot.name}")
    return bool(past_doors(func, args))


class _NoBackward(torch.autograd.Function):
    """The same values, at the end of a graph that nobody can go back through."""

    @staticmethod
    def forward(ctx: Any, asked: Tensor, output: Tensor) -> Tensor:
        return get_data(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_training("backward")


def without_backward(output: Any) -> Any:
    """What a model returns, with an error for a backward that would find no graph. Tensors that have one, because the
    inputs require gradients, keep it."""
    if not torch.is_grad_enabled() or in_functorch():
        return output
    if isinstance(output, dict):  # and what transformers returns
        for key, value in list(output.items()):
            if _is_bare(value):
                output[key] = _marked(value)
        return output
    if type(output) is tuple:
        return tuple(_marked(value) if _is_bare(value) else value for value in output)
    return _marked(output) if _is_bare(output) else output


def _is_bare(value: Any) -> bool:
    """Whether it is a tensor that a loss could be made of, without a graph."""
    return type(value) is Tensor and value.is_floating_point() and not (value.requires_grad or value.is_inference())


def _marked(value: Tensor) -> Tensor:
    asked = torch.empty(0, device=value.device, requires_grad=True)
    marked: Tensor = _NoBackward.apply(asked, value)
    return marked
