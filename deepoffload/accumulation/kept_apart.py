"""What each micro-batch adds to the gradient of each leaf, where one backward goes through the graphs of several.

All uses of a leaf, such as a weight, lead to one node that accumulates its gradient. In one backward of several graphs
it would add up the gradients of all micro-batches and come once, with other roundings. So a hook on each node that
makes gradients of leaves takes them away before they get there. Those of one micro-batch are added up in the order in
which they come, which is what autograd does. When the last one has come, the sum lands; in the order of the
micro-batches.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from deepoffload.accumulation.gradient_streams import GradientStreams
from deepoffload.accumulation.loss_graph import LeafUse, LossGraph

Land = Callable[[int, Tensor, Tensor], None]
"""Takes the number of a micro-batch, a leaf, and the gradient that it gets."""


def added(before: Tensor | None, gradient: Tensor) -> Tensor:
    """As autograd adds up the gradients of one tensor."""
    if before is None:
        return gradient
    return gradient + before if before.is_sparse else before + gradient


class _LeafSum:
    """Of one micro-batch and leaf. left: gradients that are still to come."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self.left = 0
        self.total: Tensor | None = None


class KeptApart:
    """Of one call. Leaves are known by their ids: they live as long as the graphs."""

    def __init__(self, land: Land, streams: GradientStreams) -> None:
        self._land = land
        self._streams = streams
        self._sums: dict[tuple[int, int], _LeafSum] = {}
        self._due: dict[int, list[int]] = {}

    def expect(self, number: int, graph: LossGraph) -> None:
        """A micro-batch has this graph."""
        for leaf in graph.leaves():
            found = self._sums.get((number, id(leaf)))
            if found is None:
                found = self._sums[number, id(leaf)] = _LeafSum(leaf)
                insort(self._due.setdefault(id(leaf), []), number)
            found.left += 1

    def leave_to_autograd(self, number: int, leaves: Iterable[Tensor]) -> None:
        """These gradients of a micro-batch are not gathered, and it is their turn."""
        for leaf in leaves:
            if self._sums.pop((number, id(leaf)), None) is not None:
                self._due[id(leaf)].remove(number)

    def complete(self, number: int, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """All of these gradients of a micro-batch have come, and it is their turn."""
        self._streams.note()
        for leaf, gradient in gradients:
            self.leave_to_autograd(number, (leaf,))
            if gradient is not None:
                self._land(number, leaf, gradient)

    def finish(self) -> None:
        """The backward is over, and no more gradients come: not all nodes got one."""
        for due in self._due.values():
            due.clear()
        for (number, _), found in sorted(self._sums.items(), key=lambda item: item[0][0]):
            self._land_sum(number, found)
        self._sums.clear()
        self._streams.come_after()

    def hook(self, number: int, uses: Iterable[LeafUse]) -> None:
        """Take gradients away where they are made."""
        for use in uses:
            taken = tuple((output, id(leaf)) for output, leaf in use.leaves)
            use.node.register_hook(partial(self._take, number, taken))

    def _take(self, number: int, taken: tuple[tuple[int, int], ...], made: Any, _: Any) -> Any:
        rest = list(made)
        for output, leaf in taken:
            gradient, rest[output] = rest[output], None
            self._came(number, leaf, gradient)
        return tuple(rest)

    def _came(self, number: int, leaf: int, gradient: Tensor | None) -> None:
        found = self._sums[number, leaf]
        found.left -= 1
        if gradient is not None:
            if found.total is not None:
                self._streams.come_after((found.total,))
            found.total = added(found.total, gradient)
            self._streams.note()
        due = self._due[leaf]
        while due and not self._sums[due[0], leaf].left:
            number = due.pop(0)
            self._land_sum(number, self._sums.pop((number, leaf)))

    def _land_sum(self, number: int, found: _LeafSum) -> None:
        if found.total is not None:
            self._streams.come_after((found.total,))
            self._land(number, found.leaf, found.total)
