"""The guesses of one pager: which units are updated inside backward before the step is known, and what becomes of it.

With units 0 to 3, of which 1 and 3 are chosen::

    backward of unit 3    its last gradient lands: its state comes, it is updated; what it was is kept
    backward of unit 2    its gradient lands, and waits
    backward of unit 1    as unit 3
    backward of unit 0    as unit 2
    optimizer.step()      knows the norm. Nothing clips: 3 and 1 are confirmed, what they were is forgotten.
                          Else they are undone. All that is not updated then is pending, as with "deferred".

Nobody sees a guess: everything that looks at a unit before ``step()`` undoes its guess first (``params.pager``: [Note:
deferred updates]).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepoffload.errors import BudgetError, DeepOffloadError, IoFailure
from deepoffload.memory.block import Block
from deepoffload.memory.kept_bytes import KeptBytes
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import round_up
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.speculation.guess import Guess, GuessedStep, undo_all
from deepoffload.optim.speculation.last_gradients import LastGradients
from deepoffload.optim.speculation.port import GuessingOptimizer
from deepoffload.optim.speculation.room_guard import RoomGuard
from deepoffload.optim.speculation.unit_choice import StepOutcome, UnitChoice
from deepoffload.optim.threads import num_threads
from deepoffload.optim.update import HostUpdate
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.speculation import FIRST_SHARE, ROOM_MARGIN
from deepoffload.timeline import Lane, Timeline

log = logging.getLogger("deepoffload")


class StepSoFar:
    """What is known, during backward, of the step that an optimizer will make.

    Attributes:
        squares: sum of squares of the units that have all their gradients.
        spoiled: the step clips, or a gradient is not finite.
        sample: the guess of one unit's step, to know afterwards whether guesses were right, also where none was made.
        confirmed: units whose guess was right.
        agreed: what several ranks make of it together.
    """

    def __init__(self) -> None:
        self.squares = 0
        self.spoiled = False
        self.sample: tuple[Unit, GuessedStep] | None = None
        self.confirmed: dict[Unit, Guess] = {}
        self.wrong = False
        self.agreed: StepOutcome | None = None


class Speculation:
    """Under the pager's lock, all of it. The gradients tell it of every landing.

    It has more methods than other classes, because each is one thing that can come to a guess or to the step that it is
    for: a landing, a look, a lack of room, the end of backward, the step itself.

    Args:
        disk_bytes_per_s: that are read and written together.
        asked_for: whether the user asks for guesses. Else the first steps are deferred, and it guesses as soon as these
            wait long for the disk.
        first_share: see :class:`BackwardShare`.

    Attributes:
        in_memory: whether state that stays in memory is guessed, too, as far as there is room for what it was. That
            pays where the processors of the host are idle during backward, not where they compute it.
        choice: which units are updated on a guess.
        guessed, confirmed, undone: units, so far. left: those that were chosen, and deferred all the same.
        saved_s: seconds of disk time that backward has hidden, by estimate.
    """

    def __init__(
        self,
        pager: Pager,
        gradients: Gradients,
        disk_bytes_per_s: float,
        *,
        asked_for: bool = True,
        first_share: float = FIRST_SHARE,
    ) -> None:
        self.is_asked_for = asked_for
        self.choice = UnitChoice(pager.tiers.counters, asked_for=asked_for, first_share=first_share)
        self.guessed = self.confirmed = self.undone = self.left = 0
        self.saved_s = 0.0
        self.in_memory = False
        self._pager = pager
        self._tiers = pager.tiers
        self._gradients = gradients
        gradients.speculation = self
        self._disk_bytes_per_s = disk_bytes_per_s
        self._last = LastGradients(self._is_trained)
        self._steps: weakref.WeakKeyDictionary[Any, StepSoFar] = weakref.WeakKeyDictionary()
        self._guesses: dict[Unit, Guess] = {}
        self._coming: dict[Unit, Any] = {}
        self._guard = RoomGuard(self._undo_for_room)
        self._journals: list[Block] = []
        self._disk_left_bytes = 0.0
        self._is_settling = False

    # -- what tells whose gradients these are --------------------------------------------------------------------------

    def announce(self, is_last: bool | None) -> None:
        """The next backward is the last one before ``step()``, or is not; None: nobody says so any more."""
        self._last.announce(is_last)

    def _owner(self, handle: ParamHandle) -> Any:
        return self._pager.held.owner(handle)

    def _is_trained(self, handle: ParamHandle) -> bool:
        param = handle.tensor
        return param is not None and param.requires_grad and self._owner(handle) is not None

    # -- backward ------------------------------------------------------------------------------------------------------

    def landed(self, handle: ParamHandle) -> None:
        """A gradient has landed in its unit's block. If it was the last one of its unit, that may be updated now."""
        self.choice.in_backward()
        if handle.unit is not None and self._last.landed(handle):
            self._complete(handle.unit)

    def backward_ended(self, optimizer: GuessingOptimizer) -> None:
        """Nothing waits here: what has landed was seen to."""

    def _complete(self, unit: Unit) -> None:
        """All gradients of a unit have landed."""
        if self._pager.updates_hide_nothing() and not self.in_memory:
            return
        handles = [other for other in unit.handles if self._is_trained(other)]
        owners = {id(owner): owner for owner in map(self._owner, handles)}
        if len(owners) != 1 or any(self._gradients.in_block(other) is None for other in handles):
            return
        (optimizer,) = owners.values()
        step = self._steps.setdefault(optimizer, StepSoFar())
        if step.spoiled or self._spoils(optimizer, step, handles):
            return
        if self.choice.completed(unit, self._guessed_bytes(unit)):
            alive = [other.tensor for other in unit.handles]  # held, so that none dies during its update
            if self._make(unit, optimizer, handles):
                self.guessed += 1
            else:
                self.left += 1
            del alive
        elif step.sample is None:
            self._take_sample(step, unit, optimizer, handles)

    def _spoils(self, optimizer: GuessingOptimizer, step: StepSoFar, handles: Sequence[ParamHandle]) -> bool:
        """Whether the gradients so far tell that guesses of this step are wrong. Those made are undone then."""
        for handle in handles:
            squares, non_finite = self._gradients.sum_of_squares(handle)
            step.squares += squares
            step.spoiled |= non_finite
        step.spoiled = step.spoiled or optimizer.surely_clips(step.squares)
        if step.spoiled:
            for guess in self._of(optimizer):
                self._undo(guess)
        return step.spoiled

    def _guessed_bytes(self, unit: Unit) -> int:
        static = () if self.in_memory else self._tiers.static
        return sum(piece.block.room_bytes for piece in unit.pieces if piece.block.id not in static)

    def _take_sample(
        self, step: StepSoFar, unit: Unit, optimizer: GuessingOptimizer, handles: Sequence[ParamHandle]
    ) -> GuessedStep | None:
        """What the step will be for a unit; None where ``step()`` will raise an error."""
        try:
            guessed = optimizer.guess_step(handles)
        except (DeepOffloadError, ValueError):
            return None
        step.sample = (unit, guessed)
        return guessed

    # -- one guess -----------------------------------------------------------------------------------------------------

    def _make(self, unit: Unit, optimizer: GuessingOptimizer, handles: Sequence[ParamHandle]) -> bool:
        """Update a unit on a guess; False, with nothing changed, where that cannot be done or undone."""
        guess = self._prepare(unit, optimizer, handles)
        if guess is None:
            return False
        if not self._guesses:
            self._tiers.guards.add(self._guard)
        self._guesses[unit] = guess
        try:
            guess.make()
        except (IoFailure, BudgetError) as error:
            log.info("%s is not updated inside backward: %s", unit.name, error)
            self._undo(guess)
            return False
        except BaseException:
            self._undo(guess)
            raise
        return True

    def _prepare(self, unit: Unit, optimizer: GuessingOptimizer, handles: Sequence[ParamHandle]) -> Guess | None:
        tiers, weights = self._tiers, unit.weights
        memory = self._pager.memory
        if unit.pending is not None or unit.owner.may_be_read_unseen() or not memory.is_idle(weights):
            return None
        step = self._take_sample(self._steps[optimizer], unit, optimizer, handles)
        if step is None:
            return None
        tiers.note_changes(weights)
        memory.settle(weights)
        update = HostUpdate(self._pager, self._gradients, optimizer.rule, step.jobs, step.factor, [unit])
        changed = update.blocks_to_change(unit)
        if changed is None or update.is_watched(unit) or any(memory.keeps(block) for block in changed):
            return None
        moving = [n for n, p in enumerate(unit.pieces) if p.block in changed and p.block.id not in tiers.static]
        every = [n for n, p in enumerate(unit.pieces) if p.block in changed]
        for pieces in (every, moving) if self.in_memory and every != moving else (moving,):
            blocks = [weights, *(unit.pieces[number].block for number in pieces)]
            kept = self._keep(unit, blocks) if pieces else None
            if kept is not None:
                return Guess(unit, optimizer, update, tuple(pieces), kept, self._was_undone)
        return None

    def _keep(self, unit: Unit, blocks: Sequence[Block]) -> KeptBytes | None:
        """What the blocks hold; None where memory has no room for it, or the disk has none next to all that may have to
        leave memory."""
        static = self._tiers.static
        staying = [block for block in blocks if block.id in static] if self.in_memory else []
        moving = [block for block in blocks if block not in staying]
        if any(block.leases for block in blocks) or not _has_room(self._tiers, unit, staying, moving):
            return None
        if not self._guesses:
            self._disk_left_bytes = self._tiers.transfers.spare_disk_bytes()
        needed_bytes = sum(round_up(block.nbytes) for block in moving)
        if needed_bytes > self._disk_left_bytes:
            return None
        try:
            ids = {block.id for block in staying}
            parts = () if self.in_memory else (unit.weights.id,)
            kept = KeptBytes(self._tiers, blocks, num_threads(), ids, in_turn=self.in_memory, in_parts=parts)
        except (BudgetError, IoFailure):
            return None
        self._disk_left_bytes -= needed_bytes
        return kept

    def _undo(self, guess: Guess) -> None:
        """Undo a guess that nobody waits for. Where that fails, the next who looks at the unit tries again."""
        try:
            guess.apply(guess.unit)
        except (IoFailure, BudgetError) as error:
            log.warning("the update of %s is not undone yet: %s", guess.unit.name, error)

    def _was_undone(self, guess: Guess) -> None:
        self.undone += 1
        self._remove(guess)
        _mark(self._tiers.timeline, "undo", guess)
        if not self._is_settling:
            self.choice.looked_at(guess.unit)

    def _remove(self, guess: Guess) -> None:
        self._guesses.pop(guess.unit, None)
        if not self._guesses:
            self._tiers.guards.remove(self._guard)

    def _undo_for_room(self, block: Block) -> bool:
        """Somebody lacks disk space for ``block``."""
        guess = next((guess for guess in self._standing() if guess.may_be_undone_for(block)), None)
        if guess is None:
            return False
        guess.apply(guess.unit)
        return True

    # -- the step ------------------------------------------------------------------------------------------------------

    def _of(self, optimizer: object) -> list[Guess]:
        return [guess for guess in self._standing() if guess.optimizer is optimizer]

    def _standing(self) -> list[Guess]:
        """The guesses of units that are still there. What was kept of others is given back."""
        for guess in list(self._guesses.values()):
            if guess.unit not in self._pager.units:
                self._journals += guess.abandon()
                self._remove(guess)
        return list(self._guesses.values())

    def settle(self, optimizer: GuessingOptimizer, jobs: Mapping[ParamHandle, UpdateJob], factor: float | None) -> None:
        """Undo the guesses that differ from the step of ``optimizer``. Those that are left are right.

        Args:
            factor: what gradients are multiplied by; None: the step is skipped.

        Raises:
            IoFailure, BudgetError: something cannot be undone. The step has not begun.
        """
        step = self._steps.get(optimizer)
        if step is not None and step.sample is not None:
            unit, sample = step.sample
            step.wrong |= step.spoiled or factor is None or sample != _of_unit(unit, jobs, factor)
        self._is_settling = True
        try:
            wrong = [
                guess
                for guess in self._standing()
                if (guess.optimizer is optimizer or any(handle in jobs for handle in guess.unit.handles))
                and (factor is None or not guess.is_right(_of_unit(guess.unit, jobs, factor), optimizer.rule))
            ]
            undo_all(wrong)
        finally:
            self._is_settling = False

    def confirm(self, optimizer: GuessingOptimizer, update: HostUpdate) -> None:
        """``update`` is the step that was settled: what is left of the guesses of its units is part of it."""
        for guess in self._standing():
            if any(handle in update.jobs for handle in guess.unit.handles):
                self._journals += guess.confirm()
                update.made(guess.unit, guess.pieces)
                self._remove(guess)
                _mark(self._tiers.timeline, "confirm", guess)
                self._steps.setdefault(optimizer, StepSoFar()).confirmed[guess.unit] = guess
                self.confirmed += 1
        step = self._steps.get(optimizer)
        if step is not None and step.wrong and self.choice.share:
            units = {handle.unit for handle in update.jobs if handle.unit is not None}
            self._pager.order.postpone_updates(unit.index for unit in units if unit not in step.confirmed)

    def end_of_step(self, optimizer: GuessingOptimizer) -> None:
        """A step of ``optimizer`` is over, made or skipped."""
        step = self._steps.pop(optimizer, None) or StepSoFar()
        outcome = step.agreed or StepOutcome(self.choice.waits(), step.wrong, bool(step.confirmed))
        self.choice.step_ended(step.confirmed, outcome)
        blocks = [unit.pieces[n].block for unit, guess in step.confirmed.items() for n in guess.pieces]
        moved_bytes = 2 * sum(block.nbytes for block in blocks if block.id not in self._tiers.static)
        if moved_bytes:
            self.saved_s += max(0.0, moved_bytes / self._disk_bytes_per_s - self.choice.backward_wait_s)
        self._last.start_step(self._units_of(optimizer), stepped=True)
        self._end(optimizer)

    def forget(self, optimizer: GuessingOptimizer) -> None:
        """``zero_grad()``: the gradients so far are for no step.

        Raises:
            IoFailure, BudgetError: as :meth:`settle`; the gradients are there then.
        """
        for guess in self._of(optimizer):
            guess.apply(guess.unit)
        if self._steps.pop(optimizer, None) is not None:
            self._last.start_step(self._units_of(optimizer), stepped=False)
        self._end(optimizer)

    def _units_of(self, optimizer: object) -> Iterable[Unit]:
        return [unit for unit in self._pager.units if any(self._owner(each) is optimizer for each in unit.handles)]

    def _end(self, optimizer: object) -> None:
        """What comes of an optimizer's units, where gradients land later, belongs to the next step, or to none.
        Journals of what is confirmed are given up, but for those that are just being written."""
        for unit in self._units_of(optimizer) if self._coming else ():
            self._coming.pop(unit, None)
        busy = [journal for journal in self._journals if journal.state is BlockState.WRITING]
        for journal in self._journals:
            if journal not in busy:
                self._tiers.remove(journal)
        self._journals = busy

    def stats(self) -> dict[str, float]:
        """Numbers so far."""
        return {
            "speculated": self.confirmed,
            "rolled_back": self.undone,
            "speculation_left": self.left,
            "speculation_saved_s": self.saved_s,
            "speculation_share": self.choice.share,
        }


def _has_room(tiers: TierManager, unit: Unit, staying: Sequence[Block], moving: Sequence[Block]) -> bool:
    """Whether memory has room for pieces and journals: for those of blocks that stay without anything leaving for them,
    for those of others if all leaves that may. Of these the weights come first, and pieces come one by one."""
    staying_bytes = ROOM_MARGIN * sum(block.room_bytes * (1 + (not block.resident)) for block in staying)
    if staying_bytes > tiers.arena.free_bytes:
        return False
    used = {block.id for block in unit.blocks()}
    leaving = (b for b in tiers.resident() if not b.leases and b.id not in tiers.static and b.id not in used)
    room_bytes = tiers.arena.free_bytes - staying_bytes + sum(block.room_bytes for block in leaving)
    needed = [block.room_bytes * ((not block.resident) + (block.state is BlockState.DIRTY)) for block in moving]
    return room_bytes >= ROOM_MARGIN * (sum(needed[:1]) + max(needed[1:], default=0))


def _of_unit(unit: Unit, jobs: Mapping[ParamHandle, UpdateJob], factor: float) -> GuessedStep:
    return GuessedStep({handle: jobs[handle] for handle in unit.handles if handle in jobs}, factor)


def _mark(timeline: Timeline | None, what: str, guess: Guess) -> None:
    if timeline is not None:
        now = time.perf_counter()
        timeline.add(Lane.UPDATE, f"{what} {guess.unit.name}", now, now)
