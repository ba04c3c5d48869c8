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
from operator import itemgetter
from typing import Any

from torch import Tensor

from deepoffload.accumulation.gradient_streams import GradientStreams
from deepoffload.accumulation.loss_graph import LeafUse, LossGraph
from deepoffload.params.own_hooks import OwnHooks

Land = Callable[[int, Tensor, Tensor], None]
"""Takes the number of a micro-batch, a leaf, and the gradient that it gets."""


def added(before: Tensor | None, gradient: Tensor) -> Tensor:
    """As autograd adds up the gradients of one tensor."""
    if before is None:
        return gradient
    return gradient + before if before.is_sparse else before + gradient


class _LeafSums:
    """Of one leaf.

    Attributes:
        due: the micro-batches whose gradient has not landed, the first one first.
        left: by micro-batch, how many gradients of it are still to come.
        totals: by micro-batch, the sum of those that have come.
    """

    __slots__ = ("leaf", "due", "left", "totals")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self.due: list[int] = []
        self.left: dict[int, int] = {}
        self.totals: dict[int, Tensor] = {}


class KeptApart:
    """Of one call. Leaves are known by their ids: they live as long as the graphs."""

    def __init__(self, land: Land, streams: GradientStreams, own: OwnHooks) -> None:
        self._land = land
        self._streams = streams
        self._own = own
        self._sums: dict[int, _LeafSums] = {}

    def expect(self, number: int, graph: LossGraph) -> None:
        """A micro-batch has this graph."""
        for leaf in graph.leaves():
            found = self._sums.get(id(leaf))
            if found is None:
                found = self._sums[id(leaf)] = _LeafSums(leaf)
            left = found.left.get(number, 0)
            if not left:
                insort(found.due, number)
            found.left[number] = left + 1

    def leave_to_autograd(self, number: int, leaves: Iterable[Tensor]) -> None:
        """These gradients of a micro-batch are not gathered, and it is their turn."""
        for leaf in leaves:
            found = self._sums.get(id(leaf))
            if found is not None and found.left.pop(number, None) is not None:
                found.due.remove(number)

    def complete(self, number: int, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """All of these gradients of a micro-batch have come, and it is their turn."""
        self._streams.note()
        for leaf, gradient in gradients:
            self.leave_to_autograd(number, (leaf,))
            if gradient is not None:
                self._land(number, leaf, gradient)

    def finish(self) -> None:
        """The backward is over, and no more gradients come: not all nodes got one."""
        waiting = [(number, found) for found in self._sums.values() for number in found.due]
        for found in self._sums.values():
            found.due.clear()
        for number, found in sorted(waiting, key=itemgetter(0)):
            self._land_total(number, found)
        self._sums.clear()
        self._streams.come_after()

    def hook(self, number: int, uses: Iterable[LeafUse]) -> None:
        """Take gradients away where they are made."""
        for use in uses:
            taken = tuple((output, self._sums[id(leaf)]) for output, leaf in use.leaves)
            if len(taken) == 1:
                self._own.put_on(use.node, partial(self._take_one, number, *taken[0]))
            else:
                self._own.put_on(use.node, partial(self._take, number, taken))

    def _take_one(self, number: int, output: int, of_leaf: _LeafSums, made: Any, _: Any) -> Any:
        self._came(number, of_leaf, made[output])
        return (*made[:output], None, *made[output + 1 :])

    def _take(self, number: int, taken: tuple[tuple[int, _LeafSums], ...], made: Any, _: Any) -> Any:
        rest = list(made)
        for output, of_leaf in taken:
            gradient, rest[output] = rest[output], None
            self._came(number, of_leaf, gradient)
        return tuple(rest)

    def _came(self, number: int, found: _LeafSums, gradient: Tensor | None) -> None:
        found.left[number] -= 1
        if gradient is not None:
            before = found.totals.get(number)
            if before is not None:
                self._streams.come_after((before,))
            found.totals[number] = added(before, gradient)
            self._streams.note()
        due = found.due
        while due and not found.left[due[0]]:
            self._land_total(due.pop(0), found)

    def _land_total(self, number: int, found: _LeafSums) -> None:
        del found.left[number]
        total = found.totals.pop(number, None)
        if total is not None:
            self._streams.come_after((total,))
            self._land(number, found.leaf, total)
