"""Where one of several micro-batches is that take turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from greenlet import greenlet
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deepoffload.accumulation.joined_uses import Entering, UnitArguments
from deepoffload.accumulation.loss_graph import LossGraph
from deepoffload.params.unit import ParamHandle
from deepoffload.params.window import Window

Visit = tuple[Window, int]
"""A call of a module with a window, and how often the micro-batch had called it before."""


class MicroBatch:
    """One micro-batch on its way.

    Attributes:
        runs: its forward, which stops and goes on.
        came_back: what is called when backward comes to what it has got from a unit.
        place: in its forward; the least one goes first.
        path: its visits in the forward, in their order.
        latest: how often each window was visited before its latest visit.
        without_graph: its visits in the forward that autograd does not record.
        changes_of_others: how often gradients have changed while it was parked.
        graph: of its loss, from the end of the forward to the begin of the backward.
        roots: what its backward begins with, and the gradients of that; as long as the graph.
        entering: what stands inside its last unit for the tensors that enter it. Empty where no unit is known to be the
            last one.
        given: what units were called with that run now; of the first micro-batch of the first call alone.
        entering_from: the number that nodes of the last unit have at least.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.runs: greenlet | None = None
        self.came_back: Callable[[Tensor], None] | None = None
        self.forward_is_over = False
        self.place = -math.inf
        self.path: list[Visit] = []
        self.latest: dict[Window, int] = {}
        self.without_graph: set[Visit] = set()
        self.changes_of_others = 0
        self.graph = LossGraph()
        self.roots: list[tuple[Tensor | GradientEdge, Tensor | None]] = []
        self.entering: list[Entering] = []
        self.given: dict[Visit, UnitArguments] = {}
        self.entering_from = 0
        self._shown: set[ParamHandle] | None = None

    def forget_graph(self) -> None:
        """Its backward has begun: nothing of its graph is to live longer than it would by itself."""
        self.graph, self.roots, self.entering = LossGraph(), [], []

    def loss_is_leaf(self) -> bool:
        """Whether the loss is a weight itself."""
        return any(isinstance(root, Tensor) and root.grad_fn is None for root, _ in self.roots)

    def shows(self, handle: ParamHandle) -> bool:
        """Whether one of its visits has this weight. To be asked when its forward is over."""
        if self._shown is None:
            self._shown = {shown for window, _ in self.path for shown in window.handles()}
        return handle in self._shown

    def hidden_uses(self) -> bool:
        """Whether a reentrant checkpoint, which records no graph in the forward, hides uses of trained weights."""
        handles = (handle for window, _ in self.without_graph for handle in window.handles())
        tensors = (handle.tensor for handle in handles)
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def may_land_twice(self) -> bool:
        """Whether one backward may make two gradients of a weight: a reentrant checkpoint has a separate backward, and
        the weight is used elsewhere, too."""
        if not self.without_graph:
            return False
        uses = Counter(handle for window, _ in self.path for handle in window.handles())
        hidden = {handle for window, _ in self.without_graph for handle in window.handles() if uses[handle] > 1}
        tensors = [handle.tensor for handle in hidden]
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)
