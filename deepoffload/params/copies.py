"""Copies of paged parameters: ordinary ones, unless they are made while a model is built under a budget."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import get_data, outside_user_modes, parameter_registration_hooks

_NEAR = 32
"""How far back in ``copy.deepcopy``'s memo the module is looked for whose parameter is copied."""


def plain_copy(param: Any) -> nn.Parameter:
    """An ordinary parameter with the same values in its own memory."""
    slot = param._slot
    with outside_user_modes():
        slot.pager.pin(slot)
        try:
            return nn.Parameter(get_data(param).clone(memory_format=torch.preserve_format), param.requires_grad)
        finally:
            slot.pager.unpin(slot)


def page_in_context(copy: nn.Parameter, name: str, memo: dict[int, Any]) -> nn.Parameter:
    """``copy.deepcopy`` of a paged model while an ``offload_context`` is open: the copy is paged, too (a teacher, the
    clones that ``nn.TransformerEncoder`` makes of its layer). Registration hooks or their owners are asked, by the
    method ``take_copy``: torch calls the hooks for no copy. Outside of a context one of them mentions a large copy.

    Args:
        memo: that of ``deepcopy``. It knows the modules of the copy, whose registration torch does not tell.

    Returns:
        ``copy``, or what stands for it in a model that is only counted.
    """
    for hook in list(parameter_registration_hooks.values()):
        taker = getattr(getattr(hook, "__self__", hook), "take_copy", None)
        if taker is not None:
            whole = next((made for made in memo.values() if isinstance(made, nn.Module)), None)
            near = (made for made in islice(reversed(memo.values()), _NEAR) if isinstance(made, nn.Module))
            modules = [module for module in (whole, next(near, None)) if module is not None]
            stand_in = taker(copy, name, modules)
            copy = copy if stand_in is None else stand_in
    return copy


def ordinary_parameter(data: Tensor | None, requires_grad: bool, *, with_attributes: bool) -> nn.Parameter:
    """What a program gets that calls the class of a paged parameter.

    Args:
        with_attributes: it has passed those of a paged one on, as accelerate's ``init_empty_weights`` does.

    Raises:
        UnsupportedError: it has not, and the new one has no bytes: so accelerate takes a weight out of a model whose
            offloading it wants to do itself.
    """
    if data is not None and data.is_meta and not with_attributes:
        raise UnsupportedError(
            "this model is paged already, so no other offloading can be put on it (accelerate's cpu_offload, "
            "disk_offload, dispatch_model, transformers' device_map): load it in offload_context without device_map"
        )
    return nn.Parameter(torch.empty(0) if data is None else data, requires_grad)
