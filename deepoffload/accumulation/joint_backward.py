"""The backwards of several micro-batches, as one backward or one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from deepoffload.accumulation.gradient_streams import GradientStreams
from deepoffload.accumulation.joined_uses import give_hooks_back, join_uses
from deepoffload.accumulation.kept_apart import KeptApart
from deepoffload.accumulation.loss_graph import LeafUse, Legs, LossGraph, runs_backward
from deepoffload.accumulation.micro_batch import MicroBatch, Visit
from deepoffload.accumulation.several_gradients import wait_for_several
from deepoffload.params.own_hooks import OwnHooks
from deepoffload.params.ports import GradientDoor
from deepoffload.params.torch_private import autograd_backward, autograd_grad, graph_task, past_doors
from deepoffload.params.unit import ParamHandle
from deepoffload.schedule.visits import VisitOrder, places_of


def _count_hooks(leaf: Any) -> int:
    return len(leaf._backward_hooks or ()) + len(leaf._post_accumulate_grad_hooks or ())


def _behind(door: Any) -> GradientEdge:
    """Where the gradient goes on that comes to a door, which keeps what is there alive."""
    node, output = door.next_functions[0]
    return GradientEdge(node, output, door)


class JointBackward:
    """Of one call. See [Note: turns] in ``accumulation.turns``.

    Args:
        legs: in which the forwards have run.
        apart: keeps the gradients of micro-batches apart, where one backward makes those of all.
        gradients: which leaves have a hook of ours.
        streams: of the device, which have made gradients that are kept.
        own: counts our hooks.
        starts: called with a micro-batch whose backward goes on.
        order: of the visits, in earlier forwards.
    """

    def __init__(
        self,
        legs: Legs,
        apart: KeptApart,
        gradients: GradientDoor,
        streams: GradientStreams,
        own: OwnHooks,
        starts: Callable[[MicroBatch], None],
        order: VisitOrder,
    ) -> None:
        self._legs, self._apart, self._gradients, self._starts = legs, apart, gradients, starts
        self._streams, self._own, self._order = streams, own, order
        self._outside: set[int] = set()
        self._early = 0
        self._task = -1  # the backward of these micro-batches

    # -- the last unit and the loss, at the end of each forward ----------------------------------------------------

    def forward_ended(self, one: MicroBatch, loss: Tensor, *, goes_on: bool) -> None:
        """Make what is there of the backward of a micro-batch: the loss, and the last unit, if it is known to be that.

        What these two need, such as logits, is then that of one micro-batch at a time.

        Args:
            goes_on: the whole backward comes now.
        """
        graph = one.graph = LossGraph(loss)
        one.roots = [(loss, None)]
        self._apart.expect(one.number, graph)
        if goes_on:
            self._early += 1
            return
        give_hooks_back(one.entering)
        doors = {enters.door for enters in one.entering}
        begin = one.entering_from
        if graph.runs_in_several_threads() or wait_for_several():
            doors.clear()
        if doors and not graph.ends_at(doors, begin):
            join_uses(graph, begin, one.entering, self._streams)
            doors.clear()
        if self._early != one.number or not doors or graph.runs_backward_from(begin) or self._may_land_twice(one):
            self._outside.update(map(id, graph.leaves()))
            return
        self._outside.update(map(id, graph.leaves_before(begin)))
        uses = [use for use in graph.uses() if use.sequence >= begin]
        if any(self._is_watched(leaf) for use in uses for _, leaf in use.leaves):
            return
        waiting = [use for use in uses if any(id(leaf) in self._outside for _, leaf in use.leaves)]
        if any(use.leads_further() or isinstance(use.node, BackwardCFunction) for use in waiting):
            return
        self._early += 1
        graph.keep_before(begin, waiting)
        leaves = {id(leaf): leaf for use in uses for _, leaf in use.leaves if id(leaf) not in self._outside}
        del uses, doors
        self._run_early(one, loss, list(leaves.values()), waiting)

    def _run_early(self, one: MicroBatch, loss: Tensor, leaves: list[Tensor], waiting: list[LeafUse]) -> None:
        """Where older nodes use a leaf, too, its gradient waits in front of the nodes that make it (``waiting``):
        autograd stops at the inputs that it is given only where no older node leads to one of them."""
        self._starts(one)
        entering, one.entering = one.entering, []
        ends = [GradientEdge(use.node, 0) for use in waiting]
        inside = [GradientEdge(enters.door, 0) for enters in entering]
        found = autograd_grad((loss,), [*inside, *leaves, *ends], allow_unused=True)
        first, last = len(entering), len(entering) + len(leaves)
        roots = [*(_behind(enters.door) for enters in entering), *ends]
        made = [*found[:first], *found[last:]]
        one.roots = [(root, gradient) for root, gradient in zip(roots, made, strict=True) if gradient is not None]
        self._streams.note()
        self._apart.complete(one.number, zip(leaves, found[first:last], strict=True))

    # -- the rest --------------------------------------------------------------------------------------------------

    def run(self, every: Sequence[MicroBatch]) -> None:
        """All backwards, as far as they have not been made. The forwards are over."""
        self._legs.begin(-1, -1)
        if self._put_in_order(every):
            self._backward(every)
            self._apart.finish()
            return
        for one in every:
            self.run_alone(one)

    def _put_in_order(self, every: Sequence[MicroBatch]) -> bool:
        """Prepare one backward of all. False, with nothing done, where there cannot be one."""
        found, places = self._legs_of(every), self._places(every)
        if found is None or places is None or torch.is_anomaly_enabled():  # which looks at gradients as they are made
            return False
        if any(graph.runs_in_several_threads() for _, graph, _ in found):
            return False
        shifts, lasts = self._legs.shifts(places), dict[int, tuple[int, Any, MicroBatch]]()
        for one, graph, legs in found:
            for place in graph.programs:  # a reentrant checkpoint has no other begin
                self._own.put_before(graph.nodes[place], partial(self._comes_to, one))
            for node, sequence, leg in zip(graph.nodes, graph.sequences, legs, strict=True):
                node._set_sequence_nr(sequence + shifts[leg])
                last = lasts.get(leg)
                if last is None or sequence < last[0]:
                    lasts[leg] = sequence, node, one
            self._apart.hook(one.number, graph.uses())
        runs = [lasts[leg] for leg in sorted(lasts, key=lambda leg: lasts[leg][0] + shifts[leg], reverse=True)]
        if runs:
            self._starts(runs[0][2])
        for (_, node, one), (_, _, following) in pairwise(runs):
            if following is not one:  # hooks of the program may draw random numbers before the next node runs
                self._own.put_on(node, partial(self._goes_over, following))
        return True

    def _goes_over(self, following: MicroBatch, *_: Any) -> None:
        self._starts(following)

    def _comes_to(self, one: MicroBatch, _: Any) -> None:
        self._task = graph_task()
        self._starts(one)

    def is_nested(self) -> bool:
        """Whether the backward that runs now is one that a node calls, such as that of a reentrant checkpoint."""
        return graph_task() != self._task

    def _legs_of(self, every: Sequence[MicroBatch]) -> list[tuple[MicroBatch, LossGraph, list[int]]] | None:
        """Each micro-batch with its graph, and the leg that each node of it comes from. None where two graphs have
        a node in common, a loss is a weight itself, or the program wants to see each gradient of a weight."""
        found, looked_at = [], set()
        for one in every:
            graph = one.graph
            legs = self._legs.indices_of(graph.sequences, one.number)
            if legs is None or one.loss_is_leaf() or self._hides_uses(one, graph, legs):
                return None
            found.append((one, graph, legs))
            for leaf in graph.leaves():
                if id(leaf) not in looked_at:
                    looked_at.add(id(leaf))
                    if self._is_watched(leaf):
                        return None
        return found

    def _hides_uses(self, one: MicroBatch, graph: LossGraph, legs: list[int]) -> bool:
        """Whether there is a reentrant checkpoint around something else than units: nobody knows its weights. One
        around units is the last of such nodes before these are visited without a graph."""
        around = Counter(legs[place] for place in graph.programs if runs_backward(graph.nodes[place]))
        for leg, count in around.items():
            inside = self._legs.visit_of(leg) + 1
            if count > 1 or inside >= len(one.path) or one.path[inside] not in one.without_graph:
                return True
        return False

    def _is_watched(self, leaf: Tensor) -> bool:
        """Whether the program has put a hook on a leaf, to see its gradient when it is complete."""
        handle = leaf.__dict__.get("_slot")
        ours = isinstance(handle, ParamHandle) and self._gradients.is_tracked(handle)
        return past_doors(_count_hooks, (leaf,)) > int(ours)

    def _may_land_twice(self, one: MicroBatch) -> bool:
        """Whether one backward may make two gradients of a weight."""
        return one.may_land_twice() or bool(one.without_graph and self._order.hides_weights)

    def _places(self, every: Sequence[MicroBatch]) -> dict[tuple[int, int], int] | None:
        """Where each leg stands in the order of visits, by its micro-batch and its visit. None where gradients of
        weights would land mixed."""
        if any(map(self._may_land_twice, every)):
            return None
        differ = any(one.path != every[0].path for one in every)
        if differ and any(one.hidden_uses() for one in every):
            return None
        places: dict[Visit, int] | None = places_of([one.path for one in every])
        if places is None:
            return None
        found = {(one.number, -1): -1 for one in every}
        for one in every:
            found.update(((one.number, index), places[visit]) for index, visit in enumerate(one.path))
        return found

    def run_alone(self, one: MicroBatch) -> None:
        """The backward of one micro-batch, as the ordinary order has it, but for what it has made already."""
        self._starts(one)
        self._apart.leave_to_autograd(one.number, one.graph.leaves())
        self._backward([one])

    def _backward(self, every: Iterable[MicroBatch]) -> None:
        roots: list[tuple[Any, Tensor | None]] = []
        for one in every:
            for root, gradient in one.roots:
                node: Any = root.grad_fn if isinstance(root, Tensor) else root.node
                if node is not None:
                    self._own.put_before(node, partial(self._comes_to, one))
                roots.append((root, gradient))
            one.forget_graph()
        if roots:
            self._streams.come_after(gradient for _, gradient in roots)
            autograd_backward([root for root, _ in roots], [gradient for _, gradient in roots])
