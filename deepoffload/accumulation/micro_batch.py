"""Where one of several micro-batches is that take turns."""

from __future__ import annotations

import math
from collections import Counter
from enum import IntEnum
from typing import Any

from greenlet import greenlet
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deepoffload.accumulation.loss_graph import LossGraph
from deepoffload.params.window import Window

Visit = tuple[Window, int]
"""A call of a module with a window, and how often the micro-batch had called it before."""


class TurnPhase(IntEnum):
    """Of a micro-batch."""

    FORWARD = 0
    BACKWARD = 1
    OVER = 2


class MicroBatch:
    """One micro-batch on its way.

    Attributes:
        runs: its forward, which stops and goes on.
        place: in its forward; the least one goes first.
        path: its visits in the forward, in their order.
        latest: how often each window was visited before its latest visit.
        without_graph: its visits in the forward that autograd does not record.
        changes_of_others: how often gradients have changed while it was parked.
        graph: of its loss, when the forward is over.
        roots: what its backward begins with, and the gradients of that.
        entering: what stands inside its last unit for the tensors that enter it, with the nodes in between (the doors):
            a tensor that is edited in place gets another node. Empty where the unit is not known to be the last one.
        entering_from: the number that nodes of the last unit have at least.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.runs: greenlet | None = None
        self.phase = TurnPhase.FORWARD
        self.place = -math.inf
        self.path: list[Visit] = []
        self.latest: dict[Window, int] = {}
        self.without_graph: set[Visit] = set()
        self.changes_of_others = 0
        self.graph: LossGraph | None = None
        self.roots: list[tuple[Tensor | GradientEdge, Tensor | None]] = []
        self.entering: list[tuple[Tensor, Any]] = []
        self.entering_from = 0

    def forget_graph(self) -> None:
        """Its backward has begun: nothing of its graph is to live longer than it would by itself."""
        self.graph, self.roots, self.entering = None, [], []

    def hidden_uses(self) -> bool:
        """Whether a reentrant checkpoint, which records no graph in the forward, hides uses of trained weights."""
        handles = (handle for window, _ in self.without_graph for handle in window.handles())
        tensors = (handle.tensor for handle in handles)
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def may_land_twice(self) -> bool:
        """Whether one backward may make two gradients of a weight: a reentrant checkpoint has a separate backward, and
        the weight is used elsewhere, too."""
        uses = Counter(handle for window, _ in self.path for handle in window.handles())
        hidden = {handle for window, _ in self.without_graph for handle in window.handles() if uses[handle] > 1}
        tensors = [handle.tensor for handle in hidden]
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)
