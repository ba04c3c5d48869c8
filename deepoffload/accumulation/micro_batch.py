"""Where one of several micro-batches is that take turns."""

from __future__ import annotations

import math
import threading
from collections import Counter
from enum import IntEnum

from deepoffload.params.window import Window

Visit = tuple[Window, int]
"""A call of a module with a window, and how often the micro-batch had called it before."""


class TurnPhase(IntEnum):
    """Micro-batches in an earlier phase go first."""

    FORWARD = 0
    BACKWARD = 1
    OVER = 2


class MicroBatch:
    """One micro-batch on its way.

    Attributes:
        turn: locked while the micro-batch is not to run.
        place: in its phase; the least one goes first.
        path: its visits in the forward, in their order. indices: where in it each of them is.
        reached: the index of the visit that its backward has come to.
        latest: how often each window was visited before its latest visit.
        without_graph: its visits in the forward that autograd does not record.
        entered: those visits whose put out gradient its backward has come to.
        region: the reentrant checkpoint that its backward has come to last.
        changes_of_others: how often gradients have changed while it was parked.
        at: what it came to last, for people.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread: threading.Thread | None = None
        self.phase = TurnPhase.FORWARD
        self.place = -math.inf
        self.path: list[Visit] = []
        self.indices: dict[Visit, int] = {}
        self.reached = 0
        self.latest: dict[Window, int] = {}
        self.without_graph: set[Visit] = set()
        self.entered: set[Visit] = set()
        self.region: object = None
        self.changes_of_others = 0
        self.at = "its beginning"

    def begin_visit(self, visit: Visit) -> None:
        """In the forward."""
        self.indices[visit] = len(self.path)
        self.path.append(visit)

    def begin_backward(self) -> None:
        """The forward is over."""
        self.phase, self.place = TurnPhase.BACKWARD, -math.inf
        self.reached = len(self.path)
        self.at = "its loss"

    def may_land_twice(self) -> bool:
        """Whether one backward may make two gradients of a weight: a reentrant checkpoint, which records no graph in
        the forward, has a separate backward, and the weight is used elsewhere, too."""
        uses = Counter(handle for window, _ in self.path for handle in window.handles())
        hidden = {handle for window, _ in self.without_graph for handle in window.handles() if uses[handle] > 1}
        tensors = [handle.tensor for handle in hidden]
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)
