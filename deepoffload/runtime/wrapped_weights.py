"""Weights that are tensors around other tensors (torchao's, bitsandbytes'; torch's DTensors around this rank's shard):
what is inside becomes frozen parameters, which are paged.

A parametrization (``torch.nn.utils.parametrize``) puts the weight together again whenever its module asks for it. For
torchao's it does so by the two methods that ``torch.compile`` takes such tensors apart with: ``__tensor_flatten__`` and
``__tensor_unflatten__``. That copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepoffload.params.torch_private import is_wrapper
from deepoffload.runtime import bitsandbytes_weights
from deepoffload.runtime.rank_facts import is_distributed


class _Kind(Protocol):
    """How a weight is put together."""

    def together(self, inner: Sequence[Tensor]) -> Tensor: ...

    def inner_of(self, weight: Any) -> tuple[Tensor, ...]:
        """The tensors inside another weight, which the program assigns."""

    def prepare(self, layer: Any) -> None:
        """Its weight is about to leave the layer."""


def page_wrapped_weights(roots: Iterable[nn.Module], adopt: Callable[[nn.Parameter, str], Any], *, alone: bool) -> None:
    """Let the inner tensors of weights on the CPU be paged. Weights that several modules share stay as they are, and
    those whose inner tensors are such ones, too.

    Args:
        adopt: pages a parameter, of which it gets the name. It is called at once: what was laid out again for it is
            not there twice.
        alone: this process has the model for itself. Else DTensors stay as they are: what is inside differs between
            ranks, which partition the same values.
    """
    users: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for root in roots:
        for path, module in root.named_modules():
            for name, param in module._parameters.items():
                if param is not None and type(param) is not nn.Parameter and (alone or not is_distributed(param)):
                    users.setdefault(id(param), []).append((module, name, path))
    for places in users.values():
        if len(places) == 1:
            _page(*places[0], adopt)


def _page(module: nn.Module, name: str, path: str, adopt: Callable[[nn.Parameter, str], Any]) -> None:
    weight: Any = module._parameters[name]
    apart = _take_apart(weight) or bitsandbytes_weights.take_apart(module, weight)
    if apart is None:
        return
    kind, inner = apart
    kind.prepare(module)
    weight.requires_grad_(False)
    wrapping = _Wrapping(kind, inner)
    parametrize.register_parametrization(module, name, wrapping, unsafe=True)
    wrapping.inner = ()
    for number, param in enumerate(module.parametrizations[name].parameters()):  # type: ignore[index, union-attr]
        adopt(param, f"{path}.parametrizations.{name}.original{number}".lstrip("."))


class _Flattened:
    """A wrapper as ``torch.compile`` knows them."""

    def __init__(self, weight: Any) -> None:
        self._type = type(weight)
        names, self._context = weight.__tensor_flatten__()
        found = {name: getattr(weight, name) for name in names}
        self._names = [name for name, value in found.items() if isinstance(value, Tensor)]
        self._others = {name: value for name, value in found.items() if name not in self._names}  # a DTensor's mesh
        self._size, self._stride = weight.size(), weight.stride()

    def together(self, inner: Sequence[Tensor]) -> Tensor:
        parts = {**self._others, **dict(zip(self._names, inner, strict=True))}
        made: Tensor = self._type.__tensor_unflatten__(parts, self._context, self._size, self._stride)
        return made

    def inner_of(self, weight: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(weight, name) for name in self._names)

    def prepare(self, layer: Any) -> None:
        """Nothing else knows of the weight."""


def _take_apart(weight: Any) -> tuple[_Kind, tuple[Tensor, ...]] | None:
    if not is_wrapper(weight) or weight.device.type != "cpu":
        return None
    kind = _Flattened(weight)
    inner = kind.inner_of(weight)
    return (kind, inner) if all(type(tensor) is Tensor for tensor in inner) else None


class _Wrapping(nn.Module):
    """Puts a weight together of other inner tensors.

    Attributes:
        inner: tensors of the weight that is there, while the parametrization begins.
    """

    def __init__(self, kind: _Kind, inner: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._kind = kind
        self.inner = inner

    def right_inverse(self, weight: Any) -> tuple[Tensor, ...]:
        return self.inner or self._kind.inner_of(weight)

    def forward(self, *inner: Tensor) -> Tensor:
        # Aliases, which keep the memory for as long as the module computes with them.
        return self._kind.together([tensor.detach() for tensor in inner])
