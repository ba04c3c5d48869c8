"""Gradients on their way from autograd to the ranks that own them.

What autograd has made of a unit is collected in a *contribution*. When every gradient has come it is *announced*: a
reduction is posted, which starts when all ranks have announced theirs. The parts that arrive are landed by
:class:`~deepoffload.optim.rank_gradients.RankGradients`, in the order in which the reductions started.

`[Note: when a unit is announced]` Autograd does not say which gradients will come. A unit that lacks some is announced
when gradients of another one begin to come: experts without tokens, for example. If more of them come after all, they
make another contribution. That costs a transfer, and ranks that cut a unit at different places add its gradients up in
another order. So until it is known that a unit's gradients come without others in between, on all ranks, it is
announced at the end of backward, or when somebody looks at the gradient. Each contribution says whether others came. A
backward inside another one (reentrant checkpointing) does not see where the outer one ends. A layer that is computed
again does, and asks to be told. Where none has asked, all that is there is announced at the end of the inner one.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from deepoffload.copies.payload_numbers import late_index
from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import BudgetError, RankError
from deepoffload.memory.block import Block
from deepoffload.memory.lock import SHIELD
from deepoffload.memory.tier_manager import TierManager
from deepoffload.optim import outside_gradient
from deepoffload.optim.backward_ends import BackwardEnds
from deepoffload.optim.contribution import Contribution, ContributionPlan, Reducing
from deepoffload.optim.contribution_plans import ContributionPlans
from deepoffload.optim.contribution_slots import ContributionSlots, reduction_of, slot_sizes
from deepoffload.optim.gradients_out import GradientsOut
from deepoffload.optim.lands import Lands, Offered, Reading
from deepoffload.params.shards import ShardLayout
from deepoffload.params.torch_private import in_backward
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.ranks.rounds import Payload, WaitFor

WAIT_S = 5.0
"""A rank waits so long for the others before it moves a contribution out of its slot."""


class Contributions:
    """This rank's contributions, and the reductions that are under way. Guarded by the tier manager's lock. It has many
    methods, because nothing else knows where a contribution is on its way: each is one step of it, or one question.

    Waits for other ranks are those of rounds, which serve the others meanwhile. Only inside a launch a flight is waited
    for directly: the other ranks have agreed on it, too.

    Args:
        link: to the other ranks. What it calls is set, and ``before_meeting`` gets :meth:`land_launched`.
        gradients: lands parts.
        out: brings gradients from the device that computes them; None for a CPU.

    Attributes:
        wait_s: how long a full slot waits for the other ranks: [Note: contributions that wait].
    """

    def __init__(self, link: RankLink, tiers: TierManager, gradients: Lands, out: GradientsOut | None = None) -> None:
        self._link = link
        self._tiers = tiers
        self._gradients = gradients
        self._out = out
        self._plans = ContributionPlans(link.ranks.rank)
        self._slots = ContributionSlots(tiers, out)
        self._open: list[Contribution] = []  # the oldest first
        self._leaving: deque[Contribution] = deque()  # complete, and on their way from the device
        self._announced: deque[Contribution] = deque()  # the posted ones of all units
        self._reducing: deque[Reducing] = deque()
        self._landed: deque[Reducing] = deque()  # others may still read this rank's parts in them
        self._is_landing = False
        self.wait_s = WAIT_S
        self._launched_since_moved = True
        self._ends = BackwardEnds(self._backward_ends)
        link.on_reduce = self.launch
        link.before_gather = self._before_gather
        link.on_forward = self._enters
        link.before_meeting.append(self.land_launched)

    # -- memory ----------------------------------------------------------------------------------------------------

    def reserve(self, units: Iterable[Unit]) -> None:
        """Have memory for contributions to these units and those before. Units without gradients have none.

        Raises:
            BudgetError: the host budget has no room for it.
            RankError: gradients of smaller units are under way, and another rank does not come.
        """
        with self._tiers.lock:
            for unit in units:
                if unit.gradient_layout is not None and unit.gradients is not None and unit.index not in self._plans:
                    self._plans.add(unit.index, unit, unit.gradients, unit.gradient_layout)
            self._fit()

    def reserve_late(self, unit: Unit, block: Block, layout: ShardLayout) -> None:
        """The same for parameters of a unit that were frozen when it was made. Their gradients land in ``block``.

        Raises:
            As :meth:`reserve`.
        """
        with self._tiers.lock:
            self._plans.add(late_index(unit.index), unit, block, layout)
            try:
                self._fit()
            except BaseException:
                self._plans.drop(late_index(unit.index))
                raise

    def _fit(self) -> None:
        """Have slots for the largest contribution. For larger ones everything that is under way lands before."""
        sizes = slot_sizes(self._plans.largest_bytes(), self._link.exchange, self._tiers.arena.capacity_bytes)
        if sizes.slot_bytes > self._slots.sizes.slot_bytes:
            for plan in self._plans:
                self.settle(plan.unit)
            while self._landed:
                self._await_read()
                self._release_what_is_read()
            self._slots.reserve(sizes)

    def forget(self, unit: Unit) -> None:
        """The unit is gone, or was never finished."""
        if not self.is_under_way(unit):
            for index in (unit.index, late_index(unit.index)):
                self._plans.drop(index)

    # -- from autograd ---------------------------------------------------------------------------------------------

    def take(self, handle: ParamHandle, grad: Tensor) -> bool:
        """Copy a gradient, of the parameter's type, into its unit's contribution. Returns whether that is complete, and
        so announced."""
        plan = self._plans.of(handle)
        number = plan.numbers[handle]
        if self._announced or self._reducing or self._leaving:
            self._post_left()
            self._link.pump()
            self.poll()
        if plan.open is not None and number in plan.open.present:
            self._announce(plan.open, may_have_more=True)
        contribution = plan.open or self._begin(plan)
        self._return(contribution)
        if grad.stride() != handle.stride or grad.is_neg():
            grad = outside_gradient.with_stride(grad, handle)
        self._slots.put(contribution, number, grad)
        is_complete = len(contribution.present) == len(plan.numbers)
        if is_complete:
            is_inner = self._ends.is_inner() and not self._gradients.takes_turns
            self._announce(contribution, may_have_more=is_inner and self._plans.comes_again(plan))
        self._ends.watch()
        return is_complete

    def _enters(self, units: Sequence[int]) -> None:
        if in_backward():
            self._ends.watch()
        else:
            self._plans.enters(units)

    def _backward_ends(self, others_last: bool) -> None:
        """[Note: when a unit is announced] The others need not wait for parts in units that this rank has not used."""
        with self._tiers.lock:
            if not (in_backward() and others_last):
                self.announce_all(is_over=not in_backward())
            last = self._leaving[-1].left if self._leaving else None
        if last is not None:
            # Without the lock, so that others are served meanwhile: the device may wait for them, as NCCL's sums do.
            last.synchronize()
        with self._tiers.lock:
            self._post_left(wait=True)  # the program may wait for other ranks now, which wait for these
            if not in_backward():
                self._plans.end_of_backward()
                self._link.end_backward()

    def announce_all(self, *, is_over: bool = True) -> None:
        """Announce what is there, complete or not. ``is_over``: this backward makes no more gradients."""
        while self._open:
            self._announce(self._open[0], is_over=is_over)

    def _begin(self, plan: ContributionPlan) -> Contribution:
        """Fill another contribution. [Note: when a unit is announced]"""
        for other in tuple(self._open):
            other.was_passed = True
            if self._plans.comes_whole(other.plan) and other in self._open:
                self._announce(other)
        offset = self._take_slot()
        memory = self._slots.slot(offset, plan.layout)
        plan.open = Contribution(plan, offset, memory)
        self._open.append(plan.open)
        self._gradients.parts_come(plan.block)
        return plan.open

    def _take_slot(self) -> int:
        """A free slot; waits for the oldest contribution where there is none."""
        while not self._slots.free:
            if self._reducing:
                self._await(self._reducing[0])
            elif self._landed:
                self._await_read()
            elif self._leaving:
                self._post_left(wait=True)
            elif self._in_slots():
                self._await_launch(self._in_slots()[0])
            else:
                self._put_aside()
            self._release_what_is_read()
        return self._slots.free.pop()

    def _put_aside(self) -> None:
        """Free the slot of the oldest one that is being filled: it goes into a block. Where there is no room for that
        it is announced, and what comes is another part of it."""
        oldest = next(one for one in self._open if one.block is None)
        if not self._slots.move_out(oldest):
            self._announce(oldest)

    def _return(self, contribution: Contribution) -> None:
        """Have one that was put aside in a slot again."""
        if contribution.block is not None:
            self._slots.free.append(self._take_slot())
            self._slots.move_in(contribution)

    def _await_read(self) -> None:
        """Wait until the other ranks have read this rank's part in the oldest reduction that has landed here."""
        oldest = self._landed[0]
        SHIELD.outside(self._link.rounds.wait_flight, Reading(oldest.flight), oldest.plan.want)

    def _in_slots(self, *, including_open: bool = False) -> list[Contribution]:
        """Those announced and not launched. ``including_open``: all not launched, first what may stay longest."""
        found = [*reversed(self._announced), *self._leaving, *self._open] if including_open else self._announced
        return [contribution for contribution in found if contribution.block is None]

    def _await_launch(self, contribution: Contribution) -> None:
        """Wait for the launch of a contribution that is in a slot. `[Note: contributions that wait]` It may take long:
        another rank may leave its backward out, and its program wait for this one before it comes to its step. So a
        contribution that has waited for a while goes into a block, which is paged like others, and those after it do
        so at once until something is launched."""
        plan = contribution.plan
        limit_s = self.wait_s if self._launched_since_moved and not contribution.may_have_more else 0.0
        SHIELD.outside(self._link.wait_reduced, plan.index, WaitFor.A_WHILE, limit_s)
        if contribution not in self._in_slots():
            return  # launched, or moved out for one that was
        self._launched_since_moved &= contribution.may_have_more
        if not self._slots.move_out(contribution):
            SHIELD.outside(self._link.wait_reduced, plan.index, WaitFor.ROOM)

    def _announce(self, contribution: Contribution, *, is_over: bool = False, may_have_more: bool = False) -> None:
        plan, present = contribution.plan, contribution.present
        self._return(contribution)
        plan.open = None
        self._open.remove(contribution)
        contribution.coming = {
            n for n in plan.numbers.values() if self._gradients.adds_up or not (is_over or n in present)
        }
        contribution.may_have_more = may_have_more
        self._slots.seal(contribution)
        if self._out is None:
            self._post(contribution)
        else:
            contribution.left = self._out.mark()
            self._leaving.append(contribution)
            self._post_left()

    def _post_left(self, *, wait: bool = False) -> None:
        """Announce what has come from the device, in the order in which it was completed. ``wait``: all of it."""
        while self._leaving and (wait or self._leaving[0].left.query()):
            contribution = self._leaving.popleft()
            contribution.await_left(self._tiers.timeline)
            self._post(contribution)

    def _post(self, contribution: Contribution) -> None:
        contribution.plan.posted.append(contribution)
        self._announced.append(contribution)
        self._link.post_reduce(contribution.plan.index, contribution.may_have_more)
        self.poll()

    # -- from the other ranks --------------------------------------------------------------------------------------

    def launch(self, unit_index: int, payload: Payload) -> Reducing:
        """All ranks start the reduction of a unit now. Called by the link, in the same order on all ranks."""
        self._release_what_is_read()  # who waits for one unit may launch all others meanwhile
        plan = self._plans.get(unit_index)
        if plan is None:
            raise self._gradients.not_trained(unit_index)
        given = None
        plan.was_cut |= payload.is_more
        if self._link.ranks.rank in payload.ranks:
            given = plan.posted.popleft()
            self._announced.remove(given)
            self._bring_back(given)
            self._launched_since_moved = True
        while not self._slots.free_scratch:
            self._land_first()
        scratch, reduction = self._slots.free_scratch.pop(), reduction_of(plan.layout.part_nbytes, payload.ranks)
        what, memory = f"gradients of layer '{plan.unit.name}'", None if given is None else given.memory
        flight = self._link.exchange.send_parts(memory, reduction, scratch, what)
        self._reducing.append(reducing := Reducing(self.land_through, plan, flight, given, scratch))
        reducing.is_partial = payload.is_partial
        self._gradients.parts_come(plan.block)
        return reducing

    def _bring_back(self, given: Contribution) -> None:
        """Have one where transports can read it: outside of slots where memory has room for that next to all that a
        step needs, else in a slot, which what is in flight leaves for it, or else one that has not been launched."""
        while given.block is not None:
            if self._slots.has_room_aside(given):
                with contextlib.suppress(BudgetError):
                    return self._slots.bring_back(given)
            if self._slots.free:
                self._slots.move_in(given)
            elif self._landed or self._reducing:
                self._let_one_leave()
            elif not any(self._slots.move_out(one, for_another=True) for one in self._in_slots(including_open=True)):
                return self._slots.bring_back(given)

    def _let_one_leave(self) -> None:
        """Have the memory of the oldest that is in flight."""
        if not self._landed:
            self._land_first()
        oldest = self._landed[0]
        self._link.rounds.wait_out(Reading(oldest.flight), oldest.plan.want)
        self._release_what_is_read()

    def land_through(self, last: Reducing) -> None:
        """Land the reductions up to this one, if they have not landed. All ranks have launched them."""
        while last in self._reducing:
            self._land_first()

    def _before_gather(self, paged_bytes: int) -> None:
        """`[Note: room for landing]` Others read a block of this rank. Where memory has no room for it next to all that
        a step needs, what was launched before lands first. Else a landing may wait for room until they have read it.
        One of them may be in an earlier launch, and wait there for this landing."""
        if not self._slots.has_spare(paged_bytes):
            while self._reducing:
                self._land_first()

    def land_before_gather(self, block: Block) -> None:
        """A unit's gradients are about to be gathered: land those of it that were launched before."""
        for reducing in [one for one in self._reducing if one.plan.block is block]:
            self.land_through(reducing)

    def land_launched(self) -> None:
        """Land all that has been launched. What has left the device is announced before."""
        with self._tiers.lock:
            self._post_left(wait=True)
            while self._reducing:
                self._await(self._reducing[-1])
            self._release_what_is_read()

    def poll(self) -> None:
        """Land what has arrived, and have the memory back that nobody reads any more. Waits for nobody."""
        with self._link.rounds.judged():
            while self._reducing and self._reducing[0].ready():
                self._land_told(self._reducing[0])
        self._release_what_is_read()

    def is_under_way(self, unit: Unit) -> bool:
        """Whether gradients of a unit have not landed yet, as far as this rank knows."""
        return any(
            plan.open is not None
            or self._link.awaits_parts(plan.index, ended=False)
            or any(one.plan is plan for one in self._on_the_way())
            for plan in self._plans.of_unit(unit)
        )

    def _on_the_way(self) -> list[Contribution | Reducing]:
        return [*self._leaving, *self._reducing]

    def settle(self, unit: Unit) -> None:
        """Announce what is there of a unit, and land all ranks' parts of the backwards that this rank has ended."""
        with self._tiers.lock:
            for plan in self._plans.of_unit(unit):
                if plan.open is not None:
                    self._announce(plan.open)
                self._post_left(wait=True)
                if self._link.awaits_parts(plan.index):
                    SHIELD.outside(self._link.wait_reduced, plan.index, WaitFor.ALL_PARTS)
                for reducing in [one for one in self._reducing if one.plan is plan]:
                    self._await(reducing)

    def settle_within(self, unit: Unit, limit_s: float) -> bool:
        """Land what has been launched of a unit, if it comes within about ``limit_s``. Returns whether nothing of it is
        under way. It does not say that this rank waits: others would take that to mean that it announces no more, and
        what is held would be added in another order."""
        with self._tiers.lock:
            self._post_left()
            self._link.pump()
            until = time.monotonic() + limit_s
            with self._link.rounds.judged():
                for reducing in [one for one in self._reducing if one.plan.unit is unit]:
                    SHIELD.outside(reducing.ready_within, max(0.0, until - time.monotonic()))
            self.poll()
            return not self.is_under_way(unit)

    def end_of_step(self) -> None:
        """What comes from now on belongs to the next step. [Note: when a unit is announced]"""
        self._ends.forget()
        self._plans.end_of_step()

    # -- landing ---------------------------------------------------------------------------------------------------

    def _await(self, reducing: Reducing) -> None:
        """Wait for a reduction, serving the others meanwhile, and land it."""
        if not reducing.ready():
            SHIELD.outside(self._link.rounds.wait_flight, reducing, reducing.plan.want)
        self._land_told(reducing)

    def _land_told(self, reducing: Reducing) -> None:
        """Land a reduction; all ranks are told of an error."""
        try:
            with self._link.rounds.judged(reducing.plan.want):
                self.land_through(reducing)
        except RankError:
            raise
        except Exception as error:
            self._link.fail(f"{type(error).__name__}: {error}")
            raise

    def _land_first(self) -> None:
        if self._is_landing:
            raise RuntimeError("gradients are to land while others are landing")
        first = self._reducing[0]
        if not first.ready():  # the others may wait until this rank has taken what comes of a gather
            self._link.rounds.wait_out(Offered(first.flight), first.plan.want)
        self._gradients.before_landing(first.plan.unit, first.plan.block)
        if not self._reducing or self._reducing[0] is not first:
            return  # it has landed meanwhile
        self._is_landing, plan = True, first.plan
        try:
            with self._link.hold():
                plan.was_cut |= self._gradients.land_parts(
                    plan.block, plan.layout, first.flight, is_partial=first.is_partial
                )
        finally:
            self._is_landing = False
        plan.has_landed = True
        self._reducing.popleft()
        self._slots.free_scratch.append(first.scratch)
        self._landed.append(first)
        more_come = plan.open is not None or bool(plan.posted) or any(one.plan is plan for one in self._on_the_way())
        self._gradients.after_landing(plan.block, more_come=more_come)

    def _release_what_is_read(self) -> None:
        with self._link.rounds.judged():
            read = [one for one in self._landed if one.flight.releasable()]
        for reducing in read:
            reducing.flight.release()
            self._landed.remove(reducing)
            if reducing.given is not None:
                self._slots.drop(reducing.given)
