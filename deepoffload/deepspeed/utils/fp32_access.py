"""DeepSpeed's ``safe_get_*`` and ``safe_set_*``: fp32 values, gradients and optimizer state of paged parameters.

Getters give copies, so nothing of the engine's memory is held. They give None for what has no such value: a parameter
that is not paged, one without a gradient, or a frozen one, which has no fp32 value next to its own.

With several ranks a full value is gathered by the rank that asks, and set by all ranks, to the same value. The *local*
part is what this rank owns, perhaps nothing: flat, in the order of the parameter's memory. Local parts are set by all
ranks, each its own. With one rank the local part is all of the parameter, in the order of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.optim.gradient_state import GradientSlot
from deepoffload.optim.handles import gradients_of, handle_of
from deepoffload.optim.one_param import (
    edited_in_parts,
    own_part,
    read_array,
    read_master,
    set_own_gradient,
    write_array,
    write_master,
)
from deepoffload.params.unit import ParamHandle


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The exact fp32 value of a weight that is trained, also of a 16-bit one. Raises RankError: another rank has
    gone."""
    handle = _handle(param)
    return None if handle is None or not param.requires_grad else read_master(param, handle)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Replace it. The weight shows ``value`` rounded to its type."""
    handle = _handle(param)
    if handle is not None:
        write_master(param, handle, value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The gradient so far, in the type in which it accumulates; in fp16 still times the loss scale."""
    handle = _handle(param)
    if handle is not None:
        gradients_of(handle.pager, handle.name)
    grad = param.grad
    return None if grad is None else grad.detach().clone()


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replace the gradient.

    Raises:
        UsageError: another shape, or a frozen parameter.
    """
    handle = _handle(param)
    if handle is not None:
        gradients_of(handle.pager, handle.name)
    name = "the parameter" if handle is None else handle.name
    if not isinstance(value, Tensor) or value.shape != param.shape:
        shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"a gradient of {name} has its shape {tuple(param.shape)}, not {shown}")
    if not param.requires_grad:
        raise UsageError(f"{name} is frozen, so no gradient of it is used; call requires_grad_() before")
    if param.grad is not None:
        with torch.no_grad():
            param.grad.copy_(value)
    else:
        param.grad = value.detach().to(param.device, param.dtype, copy=True)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """An array of optimizer state in fp32, such as ``"exp_avg"``; before the first step what it starts with."""
    handle = _handle(param)
    return None if handle is None or not param.requires_grad else read_array(handle, param, optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Replace it.

    Raises:
        UsageError: the optimizer has no such array, or of another shape.
    """
    handle = _handle(param)
    if handle is not None:
        write_array(handle, param, optim_state_key, value)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's part of the fp32 value."""
    return _part(safe_get_full_fp32_param(_paged(param)), param)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Replace it. Raises UsageError: another number of elements."""
    whole = _whole(param, value, lambda known: read_master(known, _slot(known)))
    with edited_in_parts(_slot(param)):
        safe_set_full_fp32_param(param, whole)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of the gradient."""
    return _part(safe_get_full_grad(_paged(param)), param)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Replace it.

    Raises:
        UsageError: another number of elements; or, with several ranks, there is no gradient, or it is a tensor that the
            program has assigned.
    """
    whole, handle = _whole(param, value, safe_get_full_grad), _slot(param)
    if handle.cut is None:
        safe_set_full_grad(param, whole)
        return
    grad = param.grad
    slot = None if grad is None else grad.__dict__.get("_slot")
    if not isinstance(slot, GradientSlot) or slot.cut is None:
        raise UsageError(f"{handle.name}.grad is a tensor that the program has assigned: set all of it on all ranks")
    set_own_gradient(slot, value.detach().to("cpu", torch.float32).reshape(-1).contiguous())


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's part of an array of optimizer state."""
    return _part(safe_get_full_optimizer_state(_paged(param), optim_state_key), param)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Replace it. Raises UsageError: the optimizer has no such array, or of another number of elements."""
    whole = _whole(param, value, lambda known: safe_get_full_optimizer_state(known, optim_state_key))
    safe_set_full_optimizer_state(_paged(param), whole, optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by ``update_func(gradient, parameter)``."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def _handle(param: Tensor) -> ParamHandle | None:
    if not isinstance(param, Tensor):
        raise UsageError(f"a parameter is wanted, not a {type(param).__name__}")
    return handle_of(param)


def _paged(param: Tensor) -> Tensor:
    if _handle(param) is None:
        raise UsageError("the local part is that of a paged parameter; this one belongs to no engine")
    return param


def _slot(param: Tensor) -> ParamHandle:
    handle = _handle(param)
    assert handle is not None, "it was looked at before"
    return handle


def _part(value: Tensor | None, param: Tensor) -> Tensor | None:
    """What this rank has of a whole value."""
    handle = _slot(param)
    if value is None or handle.cut is None:
        return None if value is None else value.reshape(-1)
    return _in_memory_order(value, handle)[own_part(handle)].clone()


def _whole(param: Tensor, value: Tensor, get: Callable[[Tensor], Tensor | None]) -> Tensor:
    """A whole value of which this rank's part is ``value``; ``get`` gives what the rest is now."""
    handle = _slot(_paged(param))
    part = own_part(handle)
    numel = part.stop - part.start
    if not isinstance(value, Tensor) or value.numel() != numel:
        shown = value.numel() if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"{handle.name}: the local part has {numel} elements here, not {shown}")
    if handle.cut is None:
        return value.reshape(param.shape)
    known = get(param)
    if known is None:
        raise UsageError(f"{handle.name} has no such value on any rank yet, so no part of it can be set")
    laid = _in_memory_order(known, handle)
    laid[part] = value.reshape(-1).to(laid.dtype)
    return laid.as_strided(handle.shape, handle.stride)


def _in_memory_order(value: Tensor, handle: ParamHandle) -> Tensor:
    """A copy of a value, flat, as the parameter's elements lie."""
    laid = torch.empty_strided(handle.shape, handle.stride, dtype=value.dtype, device=value.device).copy_(value)
    return laid.as_strided((handle.numel,), (1,))
