"""Plain PyTorch's side of two ranks that do the same: every gradient comes twice, each time half of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Halved:
    """Until :meth:`end`, the gradients of ``model`` are accumulated as those of two equal ranks are: half and half.

    The first gradient is then what autograd found, bit for bit. A sum of several is rounded after each half. What
    ``torch.autograd.grad`` returns is not touched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._nodes = []  # autograd forgets the hooks of a node that nobody holds
        for param in model.parameters():
            if param.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(param).node
                node.register_prehook(_Half(param))
                self._nodes.append(node)

    def end(self) -> None:
        """Gradients are accumulated as ever."""
        self._nodes.clear()


class _Half:
    def __init__(self, param: Tensor) -> None:
        self._param = param

    def __call__(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        grad, before = grads[0], self._param.grad
        if before is None:
            return None
        with torch.no_grad():
            before.add_(grad / 2)
        return (grad / 2,)
