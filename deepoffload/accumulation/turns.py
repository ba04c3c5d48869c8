"""Micro-batches take turns: each has a thread, one runs at a time, and each stops before it comes to the next unit.

[Note: turns] With three micro-batches and a model of an embedding, two layers and a head, the order of work is::

    forward                embedding 0 1 2   layer A 0 1 2   layer B 0 1 2
    forward and backward   head and loss 0 0 1 1 2 2
    backward               layer B 0 1 2   layer A 0 1 2   embedding 0 1 2

A thread *parks* where a unit begins. In the forward this is before the unit's window opens. In backward it is when the
gradient of what the unit has put out is complete: a tensor hook, which autograd calls with no lock held. It does not
park between its loss and the backward of its last unit: what these two need, such as logits, is that of one micro-batch
at a time. Each thread runs the ordinary ``loss.backward()`` of its own graph. So a gradient is summed and rounded
exactly as in the ordinary loop, also of tied weights and of tensors that leave a unit by a side door, and the gradients
of the micro-batches land in each parameter one after the other, in the order of their numbers.

Who goes next is decided from where all of them stand, by the one that parks: the least place in the order of visits
(see ``schedule.visits``), then the least number. Nobody ever waits for a particular other one, so a micro-batch that
skips a layer, or ends early, only changes who is next. While no order is known, the first micro-batch goes ahead to the
end of its forward. It shows the order, which weights are used twice, and how large its activations are.
"""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.accumulation.activations import Activations
from deepoffload.accumulation.caller_state import CallerState
from deepoffload.accumulation.freed_memory import FreedMemory
from deepoffload.accumulation.landing_order import LandingOrder
from deepoffload.accumulation.micro_batch import MicroBatch, TurnPhase, Visit
from deepoffload.accumulation.random_streams import RandomStreams
from deepoffload.errors import UsageError
from deepoffload.memory.lock import SHIELD
from deepoffload.params.hook_stack import HookStack
from deepoffload.params.ports import ActivationRegion, GradientDoor
from deepoffload.params.torch_private import current_node, get_grad, in_backward, set_grad, tree_flatten
from deepoffload.params.unit import ParamHandle
from deepoffload.params.window import Window
from deepoffload.schedule.visits import VisitOrder, places_of

WAIT_LIMIT_S = 1800.0
"""So long a micro-batch may compute between two units, and one that was told to end until it has."""


class Ended(BaseException):
    """Unwinds the thread of a micro-batch that is not to go on."""


class Turns:
    """Runs the micro-batches of one step in vertical order. See [Note: turns] at the top of this file.

    It has more attributes than other classes, because everything that one call knows is one: it is made for each.

    Args:
        hooks: what runs now in each thread; the windows ask it who takes turns.
        order: of visits in a forward, as far as it is known.
        forward: of the micro-batch with a number; returns what is differentiated.
        backward: of what ``forward`` has returned.
        resumed: called with the number when a micro-batch continues its backward.
        changes: how often gradients have changed so far.
        first_alone: whether the first micro-batch goes to the end of its forward before the others begin. It is called
            then, and says whether they only begin when those before them are over.
    """

    def __init__(
        self,
        hooks: HookStack,
        order: VisitOrder,
        streams: RandomStreams,
        caller: CallerState,
        activations: Activations,
        count: int,
        *,
        forward: Callable[[int], Tensor],
        backward: Callable[[int, Tensor], None],
        resumed: Callable[[int], None],
        changes: Callable[[], int],
        first_alone: Callable[[], bool] | None,
    ) -> None:
        self._hooks = hooks
        self._order = order
        self._streams = streams
        self._caller = caller
        self._activations = activations
        self._forward, self._backward, self._resumed = forward, backward, resumed
        self._changes = changes
        self._all = [MicroBatch(number) for number in range(count)]
        self._first_alone = first_alone
        self._leader = None if order.is_learned and first_alone is None else self._all[0]
        self._one_by_one = False
        self._by_thread: dict[int, MicroBatch] = {}
        self._running = self._all[0]
        self._places: dict[Visit, int] | None = None
        self._landing_order: LandingOrder | None = LandingOrder(self._all)
        self._gradients: GradientDoor | None = None
        self._freed = FreedMemory()
        self._finished = threading.Event()
        self._stopping = False
        self._switches = 0
        self.failure: tuple[int, BaseException] | None = None

    # -- the caller's thread ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """All forwards, then all backwards. Returns when every thread has ended.

        Raises:
            UsageError: a micro-batch has not come to its next unit within the limit. Else what the first micro-batch
            has raised, whose number ``failure`` has.
        """
        with SHIELD:  # a Ctrl-C arrives in the waits, where everything is in order
            self._hooks.turns = self
            try:
                for one in self._all:
                    run = contextvars.copy_context().run
                    name = f"deepoffload micro-batch {one.number}"
                    one.thread = threading.Thread(target=run, args=(self._live, one), name=name, daemon=True)
                    one.thread.start()
                self._streams.switch(0)
                self._running.turn.release()
                SHIELD.outside(self._wait)
            finally:
                self._stop()
                self._hooks.turns = None
                self._streams.switch(None)
        if self.failure is not None:
            raise self.failure[1]
        self._order.learn([one.path for one in self._all])

    def _wait(self) -> None:
        switches = -1
        while not self._finished.wait(WAIT_LIMIT_S):
            if switches == self._switches:
                raise UsageError(f"accumulate: {self._where(self._running)} for {WAIT_LIMIT_S:g} s")
            switches = self._switches

    def _where(self, one: MicroBatch) -> str:
        phase = "forward" if one.phase is TurnPhase.FORWARD else "backward"
        return f"the {phase} of micro-batch {one.number} has been at {one.at}"

    def _stop(self) -> None:
        """End the micro-batches that are not over, the running one first, and wait for their threads."""
        self._stopping = True
        for one in sorted(self._all, key=lambda other: other is not self._running):
            if one.thread is None or one.thread.ident is None:
                continue
            with suppress(RuntimeError):  # the interrupt came while another one was letting it run
                one.turn.release()
            one.thread.join(WAIT_LIMIT_S)
            if one.thread.is_alive():
                raise UsageError(f"accumulate: {self._where(one)} for {WAIT_LIMIT_S:g} s, and does not end")

    # -- the threads of micro-batches ------------------------------------------------------------------------------

    def _live(self, one: MicroBatch) -> None:
        self._by_thread[threading.get_ident()] = one
        try:
            self._await(one)
            with self._caller.here():
                loss = self._forward(one.number)
                if one is self._leader:
                    self._leader = None
                    self._order.learn([one.path])
                    self._one_by_one = self._first_alone is not None and self._first_alone()
                self._activations.forward_ended(one.number)
                one.begin_backward()
                self._go_on(one)
                self._backward(one.number, loss)
                del loss
                one.phase = TurnPhase.OVER
                self._land_held(one)
                self._freed.look()
        except Ended:
            one.at = "its end"
        except BaseException as error:  # raised again in the caller's thread
            if self.failure is None:
                self.failure = one.number, error
            self._stopping = True
        finally:
            try:
                self._hooks.close_leaked()
                self._hooks.stand_back()
            finally:
                self._end(one)

    def _end(self, one: MicroBatch) -> None:
        one.phase, one.region = TurnPhase.OVER, None  # a node has hooks that have this: nobody would find such a cycle
        following = None if self._stopping else self._next()
        if following is None:
            self._finished.set()
        else:
            self._hand_over(following)

    def _next(self) -> MicroBatch | None:
        if self._leader is not None:
            return self._leader
        left = [one for one in self._all if one.phase is not TurnPhase.OVER]
        if self._one_by_one:
            return next(iter(left), None)
        if self._places is None and not any(one.phase is TurnPhase.FORWARD for one in self._all):
            self._forwards_are_over()
        return min(left, key=lambda one: (one.phase, one.place, one.number), default=None)

    def _forwards_are_over(self) -> None:
        """From now on it is known which way each micro-batch has gone."""
        one_by_one = any(one.may_land_twice() for one in self._all)  # else their gradients would land mixed
        places = {} if one_by_one else places_of([one.path for one in self._all]) or {}
        self._places = places  # empty: one whole backward after another
        for one in self._all:
            visit = one.path[one.reached] if one.reached < len(one.path) else None
            one.place = -places[visit] if places and visit is not None else -math.inf
        if self._landing_order is not None and not self._landing_order.is_needed:
            self._landing_order = None

    def _hand_over(self, following: MicroBatch) -> None:
        self._streams.switch(following.number)
        self._switches += 1
        self._running = following
        following.turn.release()

    def _pass(self, one: MicroBatch, place: float) -> None:
        """Come to a place, let those go first that stand before it, and go on."""
        one.place = place
        if self._stopping:
            raise Ended
        following = self._next()
        if following is not None and following is not one:
            self._hooks.stand_back()
            if one.phase is TurnPhase.FORWARD and self._activations.are_kept:
                self._freed.expect_growth()
            else:
                self._freed.look()
            before = self._changes()
            self._hand_over(following)
            self._await(one)
            one.changes_of_others += self._changes() - before
        elif one.phase is TurnPhase.BACKWARD:
            self._go_on(one)

    def _come_to(self, one: MicroBatch, visit: Visit) -> None:
        """In backward. The first one is the last unit of the forward, which is there."""
        first = one.reached == len(one.path)
        one.reached = one.indices[visit]
        one.at = visit[0].name
        if first and visit == one.path[-1] and self._places is None:
            return
        if self._places is None or self._places:
            self._pass(one, -self._places[visit] if self._places else -math.inf)

    def _await(self, one: MicroBatch) -> None:
        if not one.turn.acquire(timeout=2 * WAIT_LIMIT_S * len(self._all)):
            raise UsageError(f"accumulate: micro-batch {one.number} was never told to go on")
        if self._stopping:
            raise Ended
        if one.phase is TurnPhase.BACKWARD:
            self._go_on(one)

    def _go_on(self, one: MicroBatch) -> None:
        """With its backward."""
        self._land_held(one)
        self._resumed(one.number)

    def changes_of_others(self, number: int) -> int:
        """How often gradients have changed while a micro-batch was parked."""
        return self._all[number].changes_of_others

    # -- what windows tell -----------------------------------------------------------------------------------------

    def number(self) -> int | None:
        """Which micro-batch the calling thread runs while others are on their way, too."""
        one = self._by_thread.get(threading.get_ident())
        return None if one is None or one is self._leader else one.number

    def enter(self, window: Window) -> None:
        """A module is called whose window is about to open."""
        one = self._by_thread.get(threading.get_ident())
        if one is None:
            return
        if in_backward():
            self._run_again(one, window)
            return
        if one.phase is not TurnPhase.FORWARD:
            return
        count = one.latest[window] = one.latest.get(window, -1) + 1
        visit = window, count
        one.at = window.name
        if not torch.is_grad_enabled():
            one.without_graph.add(visit)
        self._pass(one, self._order.place(visit, len(one.path)))
        one.begin_visit(visit)

    def region(self, window: Window, module: nn.Module, args: Any, kwargs: Any) -> ActivationRegion | None:
        """The window opens in a forward with gradients."""
        one = self._by_thread.get(threading.get_ident())
        if one is None or one.phase is not TurnPhase.FORWARD or in_backward():
            return None
        return self._activations.region(one.number, window, module, args, kwargs)

    def leave(self, window: Window, output: Any) -> None:
        """The call of a module is over."""
        one = self._by_thread.get(threading.get_ident())
        if one is None or one.phase is not TurnPhase.FORWARD or in_backward():
            return
        self._activations.call_ended(one.number, window)
        visit = window, one.latest[window]
        for value in tree_flatten(output)[0]:
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                value.register_hook(partial(self._came_back, one, visit))

    def _came_back(self, one: MicroBatch, visit: tuple[Window, int], gradient: Tensor) -> None:
        """Backward of a micro-batch comes to a visit."""
        if (
            visit in one.entered
            or one.phase is not TurnPhase.BACKWARD
            or self._by_thread.get(threading.get_ident()) is not one
        ):
            return
        one.entered.add(visit)
        self._come_to(one, visit)

    def land(self, param: Tensor, handle: ParamHandle, gradients: GradientDoor) -> None:
        """The gradient of a parameter is complete in the backward that runs."""
        one = self._by_thread.get(threading.get_ident())
        order = self._landing_order
        self._gradients = gradients
        if one is not None and one.phase is TurnPhase.BACKWARD and order is not None and not gradients.is_users(handle):
            if order.holds_back(one, param, handle):
                return
        gradients.land(param, handle)

    def _land_held(self, one: MicroBatch) -> None:
        """Land what has waited and need not wait any more."""
        if self._landing_order is None or self._gradients is None:
            return
        for held in self._landing_order.ready():
            self._resumed(held.number)
            before = get_grad(held.param)  # autograd's own, where an earlier one did not land: it is sparse
            set_grad(held.param, held.gradient if before is None else before + held.gradient)
            self._gradients.land(held.param, held.handle)

    def _run_again(self, one: MicroBatch, window: Window) -> None:
        """A reentrant checkpoint runs its forward again inside backward: it begins with its first unit. (Another one
        does so when it comes to its last unit, where the tensor hook was.)"""
        node = current_node()
        region = node if isinstance(node, torch.autograd.function.BackwardCFunction) else None
        visit = window, one.latest.get(window, -1)
        if one.phase is not TurnPhase.BACKWARD or region is None or region is one.region or visit not in one.indices:
            return
        one.region = region
        self._come_to(one, visit)
