"""The tensors that enter the last unit, at which an early backward stops.

Inside the unit another tensor stands for each, with a node of ours between the two (the door). Where such a tensor is
used after the unit, too, all uses inside would be added up at the door first, and then to those outside:
``outside + (first + second)``. Without the door autograd makes ``(outside + first) + second``, with other roundings.
So hooks take the gradients of the uses outside away where they are made, and add up all of them one by one. The door,
which comes last of all, hands on the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from deepoffload.accumulation.gradient_streams import GradientStreams
from deepoffload.accumulation.kept_apart import added
from deepoffload.accumulation.loss_graph import LossGraph
from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import tree_leaves


class Entering(NamedTuple):
    """A tensor that enters the last unit. ``inside`` stands for it there, and ``door`` is the node in between. One that
    is edited in place gets another node."""

    tensor: Tensor
    inside: Tensor
    door: Any


def may_stand_for(value: Any) -> bool:
    """Whether another tensor may enter in the place of an argument. Those with attributes or a class of the program's
    are its own."""
    return type(value) is Tensor and value.grad_fn is not None and value.layout is torch.strided and not vars(value)


def stand_for(known: dict[int, Tensor], entering: list[Entering], value: Any) -> Any:
    """What enters in the place of an argument. Lists and the like are the program's: a unit may put something into
    them."""
    if type(value) is tuple:
        return tuple(stand_for(known, entering, part) for part in value)
    if not may_stand_for(value):
        return value
    if id(value) not in known:
        inside = known[id(value)] = torch.ops.aten.alias.default(value)
        entering.append(Entering(value, inside, inside.grad_fn))
    return known[id(value)]


def in_containers(args: Any, kwargs: Any) -> dict[int, Tensor]:
    """The tensors that are in lists and the like, by their ids: nothing stands for them, also not where they are
    arguments by themselves, since a unit may look whether two are one."""
    arguments = [*args, *kwargs.values()]
    for value in arguments:  # grows
        if type(value) is tuple:
            arguments += value
    there = tree_leaves([value for value in arguments if type(value) is not tuple and not isinstance(value, Tensor)])
    return {id(value): value for value in there if isinstance(value, Tensor)}


class UnitArguments:
    """The tensors that a unit is called with, and what has made them."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._makers = [(value, value.grad_fn) for value in tree_leaves((args, kwargs)) if may_stand_for(value)]

    def needs_no_view(self) -> bool:
        """After the call: whether it has done to one of them what torch refuses for a view, such as what stands for a
        tensor: ``detach_()``, or an edit by a function with several outputs."""
        edited: list[Any] = [tensor.grad_fn for tensor, maker in self._makers if tensor.grad_fn is not maker]
        several = (len(node._input_metadata) > 1 for node in edited if _is_programs(node))
        return None in edited or any(several)


def _is_programs(node: Any) -> bool:
    """Whether a node is that of a function of the program's."""
    return isinstance(node, BackwardCFunction)


def give_hooks_back(entering: Iterable[Entering]) -> None:
    """Hooks that the unit has put on what stands for a tensor belong to the tensor: its other uses count, too."""
    for tensor, inside, _ in entering:
        hooks: Any = inside._backward_hooks
        if hooks:
            for hook in hooks.values():
                tensor.register_hook(hook)
            hooks.clear()


def join_uses(graph: LossGraph, begin: int, entering: Iterable[Entering], streams: GradientStreams) -> None:
    """Put hooks on the nodes that were made from number ``begin`` on."""
    newer = list(graph.made_from(begin))
    for _, inside, door in entering:
        for each in {door, inside.grad_fn}:
            if each in newer:
                _JoinedUses(each, newer, streams)


class _JoinedUses:
    """Of one tensor. ``door``: the node of what stands for it."""

    def __init__(self, door: Any, newer: list[Any], streams: GradientStreams) -> None:
        self._streams = streams
        self._total: Tensor | None = None
        self._is_over = False
        door.register_hook(self._hand_on)
        inside, outside = (door, 0), door.next_functions[0]
        for node in newer:
            if node is not door:
                uses = [(i, end == outside) for i, end in enumerate(node.next_functions) if end in (inside, outside)]
                if uses:
                    node.register_hook(partial(self._take, uses))

    def _take(self, uses: list[tuple[int, bool]], made: Any, _: Any) -> Any:
        """``uses``: the numbers of outputs, and whether each is one of the uses outside."""
        if self._is_over:
            return None
        rest = list(made)
        for output, is_outside in uses:
            gradient = rest[output]
            if gradient is not None:
                self._streams.come_after((self._total,))
                self._total = added(self._total, gradient)
                self._streams.note()
                if is_outside:
                    rest[output] = None
        return tuple(rest)

    def _hand_on(self, made: Any, _: Any) -> Any:
        self._is_over = True
        total, self._total = self._total, None
        if total is None:
            return None
        self._streams.come_after((total,))
        if made[0] is None:  # torch lets no hook put a gradient where there is none
            raise UnsupportedError(
                "accumulate: the last unit gives no gradient to a tensor that is used after it, too; "
                'use order="horizontal"'
            )
        return (total, *made[1:])
