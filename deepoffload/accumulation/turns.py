"""Micro-batches take turns: one runs at a time, and each stops before it comes to the next unit.

[Note: turns] With three micro-batches and a model of an embedding, two layers and a head, the order of work is::

    forward                embedding 0 1 2   layer A 0 1 2   layer B 0 1 2
    forward and backward   head and loss 0 0 1 1 2 2
    backward               layer B 0 1 2   layer A 0 1 2   embedding 0 1 2

All of it runs in the thread that has called ``accumulate``. Each forward is a *greenlet*: a call with its own stack,
which can stop in the middle and go on. It *parks* before a unit's window opens. What torch keeps for the thread is set
aside then (see ``params.torch_thread``). With a thread for each micro-batch nothing would have to be set aside. But
each thread has its own team of OpenMP, and where the teams have more threads than the machine has cores, libgomp lets
them sleep between operations instead of spin: everything takes a third longer. Nothing refers to a greenlet when the
call is over: where its thread has ended and a garbage collection comes to it, the process crashes (greenlet 3.5).

Who goes next is decided from where all of them stand: the least place in the order of visits (see ``schedule.visits``),
then the least number. Nobody ever waits for a particular other one, so a micro-batch that skips a layer, or ends early,
only changes who is next. While no order is known, the first micro-batch goes ahead to the end of its backward. It shows
the order, which weights are used twice, and how large its activations are.

There is one backward, from all losses. Autograd takes the node first, of those that may run, that was made last: each
node has a number for that. Within one graph this is the order of the ordinary backward. Before it begins, the numbers
of all nodes are moved, those of a micro-batch in a unit together (``Legs.shifts``). So the graphs are gone through
unit by unit, and within a unit micro-batch by micro-batch; the order within each graph stays, and with it all bits. The
gradients of a weight are kept apart by micro-batch, see ``accumulation.kept_apart``.

The head and the loss come first, at the end of each forward: what these two need, such as logits, is that of one
micro-batch at a time. For that, what enters the last unit is put into a node of ours there, at which a backward can
stop. Where it is not certain that all this changes no number, backwards run one after the other
(``JointBackward.run``).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from deepoffload.accumulation.activations import Activations
from deepoffload.accumulation.gradient_streams import GradientStreams
from deepoffload.accumulation.joined_uses import UnitArguments, give_hooks_back, in_containers, stand_for
from deepoffload.accumulation.joint_backward import JointBackward
from deepoffload.accumulation.kept_apart import KeptApart
from deepoffload.accumulation.loss_graph import Legs
from deepoffload.accumulation.micro_batch import MicroBatch
from deepoffload.accumulation.random_streams import RandomStreams
from deepoffload.machine import FreedMemory
from deepoffload.memory.lock import SHIELD
from deepoffload.params.pager import Pager
from deepoffload.params.ports import ActivationRegion, GradientDoor
from deepoffload.params.torch_private import (
    autograd_backward,
    get_grad,
    in_backward,
    modes_active,
    past_doors,
    sequence_number,
    set_grad,
    tensor_use_count,
    tree_leaves,
)
from deepoffload.params.torch_thread import TorchThread
from deepoffload.params.unit import ParamHandle
from deepoffload.params.window import Window

_USERS_LONE = 2
"""Of a gradient that autograd gives to a hook and to nothing else: autograd, and the object in Python."""


_REFUSES_VIEWS = ("detach views in-place", "is a view and is being modified", "that is a view of another Tensor")
"""How torch says that it cannot do something to a tensor, since it is a view."""


class Ended(BaseException):
    """Unwinds a micro-batch that is not to go on."""


class Turns:
    """Runs the micro-batches of one step in vertical order. See [Note: turns] at the top of this file.

    It has more attributes than other classes, because everything that one call knows is one: it is made for each.

    Args:
        pager: its windows ask who takes turns.
        gradients: where gradients land.
        forward: of the micro-batch with a number; returns what is differentiated.
        resumed: called with the number before a gradient of a micro-batch lands.
        changes: how often gradients have changed so far.
        first_alone: whether the first micro-batch goes to the end of its backward before the others begin. It is called
            after its forward, and says whether they only begin when those before them are over.

    Attributes:
        failed_at: the micro-batch that has raised.
        advice: what the program is told about that, if anything.
    """

    def __init__(
        self,
        pager: Pager,
        gradients: GradientDoor,
        streams: RandomStreams,
        activations: Activations,
        count: int,
        *,
        forward: Callable[[int], Tensor],
        resumed: Callable[[int], None],
        changes: Callable[[], int],
        first_alone: Callable[[], bool] | None,
    ) -> None:
        self._hooks, self._casts = pager.hooks, pager.casts
        self._order = pager.order.visits
        self._gradients = gradients
        self._streams = streams
        self._activations = activations
        self._forward, self._resumed = forward, resumed
        self._changes = changes
        self._all = [MicroBatch(number) for number in range(count)]
        self._first_alone = first_alone
        self._leader = None if self._order.is_learned and first_alone is None else self._all[0]
        self._one_by_one = False
        self._running = self._all[0]
        device = pager.memory.device
        self._thread = TorchThread(device)
        self._copies_leave = device.type != "cpu"
        self._freed = None if self._copies_leave else FreedMemory()
        self._legs, self._streams_used = Legs(), GradientStreams(device)
        self._own_hooks = own = pager.hooks.own
        apart = KeptApart(self._land_apart, self._streams_used, own)
        self._backwards = JointBackward(
            self._legs, apart, gradients, self._streams_used, own, self._run_as, self._order
        )
        self._stopping = False
        self.failed_at: int | None = None
        self.advice = ""

    # -- who runs --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All forwards, then all backwards.

        Raises:
            Exception: what a micro-batch has raised.
        """
        with SHIELD:  # a Ctrl-C arrives where micro-batches run, as in every loop
            self._hooks.turns = self
            try:
                following = self._next()
                while following is not None:
                    self._let_run(following)
                    following = self._next()
                if not self._one_by_one:
                    SHIELD.let_through(self._backwards.run, (self._all,))
            except BaseException as error:
                self.failed_at = self._running.number
                self._learn_from(error)
                raise
            finally:
                self._stop()
                self._hooks.turns = None
                self._activations.end()
                self._streams.switch(None)
        self._order.learn([one.path for one in self._all])
        del self._backwards, self._forward, self._resumed, self._changes  # cycles: nothing waits for a collection

    def _learn_from(self, error: BaseException) -> None:
        """What torch refuses for a view is given to the last unit itself from now on."""
        one = self._running
        if one.entering and isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSES_VIEWS):
            self._order.taken_as_given.add(one.path[-1])
            self.advice = f"{one.path[-1][0].name} gets its arguments themselves, not views of them, in the next call"

    def _let_run(self, one: MicroBatch) -> None:
        """Until it parks, or its forward is over."""
        self._run_as(one)
        if one.runs is None:
            one.runs = greenlet(self._live)
            one.runs.gr_context = contextvars.copy_context()
        SHIELD.let_through(_switch_to, (one,))

    def _run_as(self, one: MicroBatch) -> None:
        self._running = one
        self._streams.switch(one.number)

    def _stop(self) -> None:
        """End the micro-batches that are not over."""
        self._stopping = True
        for one in self._all:
            if one.runs is not None and not one.runs.dead:
                self._running = one
                while not one.runs.dead:
                    with suppress(BaseException):  # the first one is raised
                        SHIELD.leaving(partial(_end, one))
            one.runs = one.came_back = None
            one.forget_graph()

    def _next(self) -> MicroBatch | None:
        if self._leader is not None:
            return self._leader
        left = [one for one in self._all if not one.forward_is_over]
        if self._one_by_one:
            return next(iter(left), None)
        return min(left, key=lambda one: (one.place, one.number), default=None)

    # -- forwards --------------------------------------------------------------------------------------------------

    def _live(self, one: MicroBatch) -> None:
        self._legs.begin(one.number, -1)
        try:
            loss = self._forward(one.number)
            leads = one is self._leader
            if leads:
                self._leader = None
                self._order.learn([one.path])
                self._one_by_one = self._first_alone is not None and self._first_alone()
            self._activations.forward_ended(one.number)
            one.forward_is_over = True
            self._backwards.forward_ended(one, loss, goes_on=leads or self._one_by_one)
            del loss
            if leads or self._one_by_one:
                self._backwards.run_alone(one)
        finally:
            one.forward_is_over = True
            self._hooks.close_leaked()
            self._hooks.stand_back()

    def _pass(self, one: MicroBatch, place: float) -> None:
        """Come to a place, let those go first that stand before it, and go on."""
        one.place = place
        if self._stopping:
            raise Ended
        if self._next() is one:
            return
        if self._freed is not None and not self._activations.are_kept:
            self._freed.look()
        with SHIELD:
            back = self._thread.set_aside()
            if back is None:
                return
            with back:
                if self._casts.held_by is not None:
                    self._casts.drop()  # they have the graph of this micro-batch
                aside, before = self._hooks.stand_back(), self._changes()
                try:
                    SHIELD.leaving(_park)
                finally:
                    self._hooks.go_on(aside)
                one.changes_of_others += self._changes() - before

    def changes_of_others(self, number: int) -> int:
        """How often gradients have changed while a micro-batch was parked."""
        return self._all[number].changes_of_others

    # -- what windows tell -----------------------------------------------------------------------------------------

    def _here(self) -> MicroBatch | None:
        """The micro-batch whose forward has called this; None for other threads, and in backward."""
        return self._running if getcurrent() is self._running.runs else None

    def number(self) -> int | None:
        """Which micro-batch runs here while others are on their way, too."""
        one = self._here()
        return None if one is None or one is self._leader else one.number

    def enter(self, window: Window, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A module is called whose window is about to open. Returns other arguments for it, where it gets such."""
        one = None if in_backward() else self._here()
        if one is None or one.forward_is_over:
            return None
        count = one.latest[window] = one.latest.get(window, -1) + 1
        visit = window, count
        if not torch.is_grad_enabled():
            one.without_graph.add(visit)
        self._pass(one, self._order.place(visit, len(one.path)))
        self._legs.begin(one.number, len(one.path))
        one.path.append(visit)
        give_hooks_back(one.entering)  # that unit was not the last one
        one.entering = []
        if not torch.is_grad_enabled() or modes_active():
            return None
        if one is self._leader:
            one.given[visit] = UnitArguments(args, kwargs)
        if self._leader is not None or not self._order.is_last(visit) or visit in self._order.taken_as_given:
            return None
        one.entering_from = sequence_number()
        stand = partial(stand_for, in_containers(args, kwargs), one.entering)
        return tuple(map(stand, args)), {name: stand(value) for name, value in kwargs.items()}

    def region(self, window: Window, module: nn.Module, args: Any, kwargs: Any) -> ActivationRegion | None:
        """The window opens in a forward with gradients."""
        one = None if in_backward() else self._here()
        if one is None or one.forward_is_over:
            return None
        return self._activations.region(one.number, window, module, args, kwargs)

    def leave(self, window: Window, output: Any) -> None:
        """The call of a module is over."""
        one = None if in_backward() else self._here()
        if one is None or one.forward_is_over:
            return
        self._activations.call_ended(one.number, window)
        visit = window, one.latest[window]
        given = one.given.pop(visit, None)
        if given is not None and given.needs_no_view():
            self._order.taken_as_given.add(visit)
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                if one.came_back is None:
                    one.came_back = partial(self._came_back, one)
                self._own_hooks.put_on(value, one.came_back)

    # -- backwards -------------------------------------------------------------------------------------------------

    def _came_back(self, one: MicroBatch, gradient: Tensor) -> None:
        """Backward comes to what a micro-batch has got from a unit."""
        if one.forward_is_over:
            self._run_as(one)

    def land(self, param: Tensor, handle: ParamHandle, gradients: GradientDoor) -> None:
        """Autograd itself has completed the gradient of a parameter. It has nothing to add where all was kept apart."""
        if get_grad(param) is None:
            return
        one = self._running
        if one.without_graph and not self._order.hides_weights:
            self._order.hides_weights = not one.shows(handle) and self._backwards.is_nested()
        self._resumed(one.number)
        gradients.land(param, handle)

    def _land_apart(self, number: int, leaf: Tensor, gradient: Tensor) -> None:
        """The gradient that a micro-batch gives to a leaf is complete."""
        handle = leaf.__dict__.get("_slot")
        gradients = self._gradients
        if (
            not isinstance(handle, ParamHandle)
            or not gradients.is_tracked(handle)
            or gradients.is_users(handle)
            or gradient.layout is not torch.strided
            or get_grad(leaf) is not None
        ):
            running, self._running = self._running, self._all[number]
            self._streams_used.come_after()  # one of them may have made what is there
            autograd_backward((leaf,), (gradient,))
            self._running = running
            return
        self._resumed(number)
        if self._copies_leave and past_doors(tensor_use_count, (gradient,)) > _USERS_LONE:
            gradient = gradient.clone()  # as autograd does; it leaves later, and the other user may write to it
        set_grad(leaf, gradient)
        gradients.land(leaf, handle)
        if get_grad(leaf) is not None:  # it stays, and may be the memory of another gradient
            set_grad(leaf, torch.empty_like(gradient).copy_(gradient))


# An exception keeps the variables of the functions that it has passed. So no variable ever has a greenlet, which must
# not live longer than its thread.


def _switch_to(one: MicroBatch) -> None:
    one.runs.switch(one)  # type: ignore[union-attr]


def _end(one: MicroBatch) -> None:
    one.runs.throw(Ended)  # type: ignore[union-attr]


def _park() -> None:
    getcurrent().parent.switch()
