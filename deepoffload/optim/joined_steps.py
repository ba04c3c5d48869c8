"""Steps that a rank without batches makes with the others.

`[Note: joined]` Each rank updates what it owns, so a step needs all of them, also those whose program has nothing to
train with. Such a rank says that it has joined. Until all have, it serves the others. When they meet at their step, it
is told which optimizer steps, with which settings, and makes that step with the gradients of the others.

It does not run the program, so it cannot see when the others clear their gradients. It takes those that have made a
step for cleared as soon as the next gradient of their unit lands, or the next step comes. So a look at a gradient after
the step still shows it. A program that keeps its gradients is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from deepoffload.errors import UnsupportedError
from deepoffload.memory.lock import SHIELD
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.handles import handle_of
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.optim.rank_step import told_to_all
from deepoffload.optim.step_order import StepOrder, first_order
from deepoffload.params.pager import Pager


class JoinedSteps:
    """This rank's side of it.

    Raises:
        UnsupportedError: no optimizer that could step with the others has the model's parameters.
    """

    def __init__(self, pager: Pager, gradients: RankGradients) -> None:
        if not pager.held.optimizers():
            raise UnsupportedError(
                "join: a rank without batches makes the others' steps, and no optimizer of deepoffload has the model's "
                "parameters. Make one before (CPUAdamW, CPUAdam, CPULion, CPUAdagrad, CPUSGD); torch's own cannot step "
                "on a rank whose program does not"
            )
        self._pager, self._gradients, self._link = pager, gradients, gradients.link

    def make(self, after_step: Callable[[], object] | None) -> None:
        """Serve the other ranks, and step with them, until all have joined. Gradients that have made a step are cleared
        then, on all ranks.

        Args:
            after_step: called after each step.

        Raises:
            UsageError: the others' steps cannot be made here. RankError: another rank has failed.
        """
        self._gradients.has_joined = True
        try:
            while self._step():
                if after_step is not None:
                    after_step()
        finally:
            self._gradients.has_joined = False

    def _step(self) -> bool:
        """One more step with the others. False when there is none, because all have joined."""
        with ExitStack() as hold:
            hold.enter_context(self._pager.lock)
            with told_to_all(self._link):
                order = self._meet()
                if order is None:
                    return False
                optimizer = self._optimizer_of(order)
                order.give_settings(optimizer)
                self._gradients.frozen_elsewhere = order.frozen
                self._gradients.drop_stepped([handle_of(param) for param, _ in optimizer._each()])
            self._gradients.met_before = hold  # let go when the step is decided
            try:
                with _scaled(optimizer, order):
                    optimizer.step()
            finally:
                self._gradients.met_before = None
        return True

    def _meet(self) -> StepOrder | None:
        self._pager.hooks.close_leaked()
        self._pager.catch_up_all()
        self._gradients.contributions.announce_all()
        others_step = SHIELD.outside(self._link.meet_join)
        self._gradients.all_launched()
        if others_step:
            return first_order(self._link.exchange_messages(b""))
        self._gradients.drop_stepped(list(self._gradients.stepped))
        return None

    def _optimizer_of(self, order: StepOrder) -> HostOptimizer:
        found = self._pager.held.optimizers().get(order.optimizer)
        if not isinstance(found, HostOptimizer):
            raise UnsupportedError(
                f"join: the others step with optimizer number {order.optimizer} of this model, which this rank lacks: "
                "make the same optimizers in the same order on all ranks, and keep them"
            )
        return found


@contextmanager
def _scaled(optimizer: HostOptimizer, order: StepOrder) -> Iterator[None]:
    """The optimizer knows what the gradients are too large by, as the others' do."""
    if order.grad_scale is None:
        yield
        return
    optimizer.grad_scale = order.grad_scale
    try:
        yield
    finally:
        del optimizer.grad_scale
