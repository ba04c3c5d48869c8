"""Weights that are tensors around other tensors (torchao's): what is inside becomes frozen parameters, which are paged.

A parametrization (``torch.nn.utils.parametrize``) puts the weight together again whenever its module asks for it, by
the two methods that ``torch.compile`` takes such tensors apart with: ``__tensor_flatten__`` and
``__tensor_unflatten__``. That copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepoffload.params.torch_private import is_wrapper


def page_wrapped_weights(roots: Iterable[nn.Module]) -> None:
    """Let the inner tensors of weights on the CPU be paged. Weights that several modules share stay as they are, and
    those whose inner tensors are such ones, too."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for root in roots:
        for module in root.modules():
            for name, param in module._parameters.items():
                if param is not None and _can_be_taken_apart(param):
                    users.setdefault(id(param), []).append((module, name))
    for places in users.values():
        if len(places) == 1:
            ((module, name),) = places
            weight = module._parameters[name]
            assert weight is not None
            weight.requires_grad_(False)
            parametrize.register_parametrization(module, name, _Wrapping(weight), unsafe=True)


def _can_be_taken_apart(param: Any) -> bool:
    if not is_wrapper(param) or param.device.type != "cpu":
        return False
    names, _ = param.__tensor_flatten__()
    return all(type(getattr(param, name)) is Tensor for name in names)


class _Wrapping(nn.Module):
    """Makes a weight like the one given of other inner tensors."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self._type = type(weight)
        self._names, self._context = weight.__tensor_flatten__()
        self._size, self._stride = weight.size(), weight.stride()

    def right_inverse(self, weight: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(weight, name) for name in self._names)

    def forward(self, *inner: Tensor) -> Tensor:
        # Aliases, which keep the memory for as long as the module computes with them.
        tensors = {name: tensor.detach() for name, tensor in zip(self._names, inner, strict=True)}
        made: Tensor = self._type.__tensor_unflatten__(tensors, self._context, self._size, self._stride)
        return made
