"""Durable steps of one engine: what a commit consists of, and when it is on the disk.

[Note: durable steps] A commit freezes the run as it is after a step; nothing is copied. A unit whose update is still to
come (``step_overlap="deferred"``) is frozen when that update is made, so step n is complete in the next forward. Its
blocks are written while the program computes: those that come and go anyway by the pager, those that stay in memory
from here. Before step n + 1 changes anything, what is left is written, all files are synced, and the record of step n
is published. So a commit waits for the record of the one before it only, which has had a whole backward for it::

    optimizer.step()   # finishes step 1's record; then step 2 is decided
    state.commit()     # number 2: units are frozen as they are updated
    model(batch)       # makes the updates of step 2, block by block, and writes
    loss.backward()    # writes
    optimizer.step()   # the record of step 2 is published, then step 3 is decided

A weight that the program changes inside of a module's call, between its update and its write, is seen too late: that
step cannot be had. The next commit then waits until it is on the disk itself, so the promise holds all the same.

With several ranks each makes its own part durable. Before step n + 1 is decided, when all ranks have met, they tell
each other whether they have published step n. Where one of them has not, none counts it: the next record takes its
place ([Note: steps of several ranks] in ``io.durable_store``).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import BudgetError, DeepOffloadError, IoFailure, RankError, UsageError
from deepoffload.io.durable_store import DurableStore
from deepoffload.io.extents import Extent
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.block import Block
from deepoffload.memory.committed import CommittedBlock, CommittedBlocks, lost_ones
from deepoffload.optim.paged_state import resident_piece
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, StatePiece, Unit
from deepoffload.schedule.durable import least_every

log = logging.getLogger("deepoffload")

TIMED_STEPS = 5

Tell = Callable[[Any], list[Any]]
"""Says something to all ranks, which call it together; returns what each has said, in rank order."""


@dataclass(frozen=True)
class UnitCut:
    """A unit as it was after a step.

    Attributes:
        stale: parameters whose master is the weight itself.
    """

    unit: Unit
    weights: CommittedBlock
    pieces: Sequence[tuple[StatePiece, CommittedBlock]]
    stale: frozenset[ParamHandle]

    @property
    def blocks(self) -> list[CommittedBlock]:
        return [self.weights, *(frozen for _, frozen in self.pieces)]


class StepContent(Protocol):
    """Everything of a step that lies in no block (``checkpoint.durable_content``)."""

    extents: list[Extent]
    """What it has written already; freed when the step is durable, or given up."""

    def encode(self, cuts: Sequence[UnitCut], numbers: Mapping[CommittedBlock, int], first: int) -> bytes:
        """For the record. ``numbers``: which of the record's extents holds a block; one that is not among them is all
        zero. ``first``: the number of the first of ``extents``."""


@dataclass
class _Making:
    """A step that is not durable yet.

    Attributes:
        waiting: units whose update is to come, by the ids of their weights.
    """

    step: int
    content: StepContent
    cuts: list[UnitCut] = field(default_factory=list)
    waiting: dict[int, Unit] = field(default_factory=dict)
    problem: str | None = None


class StepTimer:
    """How long steps take between commits that write nothing."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._steps_s: list[float] = []

    def note(self, *, writes: bool) -> float | None:
        """A step has ended. The median of the first steps, when they are all there: once."""
        now, last, self._last_s = time.perf_counter(), self._last_s, None if writes else time.perf_counter()
        if writes or last is None or len(self._steps_s) == TIMED_STEPS:
            return None
        self._steps_s.append(now - last)
        return sorted(self._steps_s)[TIMED_STEPS // 2] if len(self._steps_s) == TIMED_STEPS else None


class Durability:
    """Makes steps of one engine durable. See [Note: durable steps].

    Args:
        extra_s: seconds of disk that only a durable step needs, where ``every`` may become less when steps turn out to
            take long; else 0.
        link: to the other ranks; None with one.

    Attributes:
        every: a step is made durable when its number is a multiple of this.
        space, store: where.
        owed: why the last step could not be had, so that the next commit waits for its own; None where it could.
    """

    def __init__(
        self,
        pager: Pager,
        space: SwapSpace,
        store: DurableStore,
        every: int,
        extra_s: float = 0.0,
        link: RankLink | None = None,
    ) -> None:
        self.every = every
        self._extra_s = extra_s
        self._timer = StepTimer()
        self.space = space
        self.store = store
        self._pager = pager
        self._frozen = CommittedBlocks(
            pager.tiers, self._updated, self._give_up, in_call=lambda: bool(pager.hooks.opened())
        )
        self._making: _Making | None = None
        self.owed: str | None = None
        self._link = link
        self._asked: int | None = None  # the step of which the ranks have still to tell whether they have it
        pager.commits = self

    def is_due(self, step: int, *, wait: bool, tell: Tell | None = None) -> bool:
        """Whether a commit of this step makes it durable. ``tell``: with several ranks, which all decide the same."""
        due = wait or self.owed is not None or step % self.every == 0
        step_s = self._timer.note(writes=due) if self._extra_s else None
        if step_s is not None:
            every = least_every(self._extra_s, step_s if tell is None else max(tell(step_s)))
            if every < self.every:
                log.info("steps take %.2f s: from now on every %d steps one is durable", step_s, every)
                self.every = every
        return due

    def commit(self, step: int, content: StepContent, *, wait: bool, tell: Tell | None = None) -> None:
        """Begin to make the run as it is now durable; with ``wait``, or where an earlier step could not be had, return
        when it is. ``tell``: with several ranks, which all commit the same.

        Raises:
            IoFailure: the disk failed, or has no room. BudgetError: ``nvme_budget`` is too small. The run goes on, and
            the step that was durable before still is; the next commit waits for its own.
        """
        wait = wait or self.owed is not None
        try:
            self.finish(tell)
        except BaseException:
            self._free(content)
            raise
        try:
            with self._pager.lock:
                making = self._making = _Making(step, content)
                for unit in list(self._pager.units):
                    if unit.pending is not None:
                        making.waiting[unit.weights.id] = unit
                    elif any(handle.tensor is not None for handle in unit.handles):
                        making.cuts.append(self._cut(unit))
                if self._pager.memory.all_stay() or not self._pager.prefetch:
                    self._frozen.start_all()  # no event comes in which it could be done
            self._asked = step
        except BaseException as error:
            if self._making is None or self._making.content is not content:
                self._free(content)
            self._drop(str(error))
            raise
        if wait:
            self.finish(tell)
            if self.owed is not None and self._making is None and (tell is not None or self.store.step != step):
                raise UsageError(f"step {step} cannot be made durable: {self.owed}")

    def pump(self) -> None:
        """Called at every event: take what is written, and write what stays in memory."""
        if self._making is not None:
            self._frozen.pump()

    def undo(self, step: int, why: str) -> None:
        """Another rank could not begin to make a step durable."""
        if self._asked == step:
            self._asked = None
            self._drop(why)

    def before_step(self) -> None:
        """The next step is about to change something. Called when all ranks have met for it.

        Raises:
            As :meth:`commit`, with one rank. With several an error in a step would end them, and this one need not:
            it is logged, and the next commit waits for its own step.
        """
        if self._link is None:
            self.finish()
        elif (problem := self._finish_together(self._tell_met)) is not None:
            log.warning("%s; the next commit waits until its own step is on the disk", problem)

    def before_other_step(self) -> None:
        """:meth:`before_step` of an optimizer of torch's, for whose steps ranks do not meet."""
        if self._link is None:
            self.finish()
        elif self._asked is not None:
            with self._link.tasks.begin("the end of a durable step").together() as task:
                self.finish(task.gather)

    def finish(self, tell: Tell | None = None) -> None:
        """Make the step durable that was committed last, if it is not yet. Called before anything of a newer step.

        Args:
            tell: with several ranks, all of which call this; without it this one makes its part durable, as at its end.

        Raises:
            As :meth:`commit`.
        """
        if tell is None:
            self._finish_own()
        elif (problem := self._finish_together(tell)) is not None:
            if isinstance(problem, RankError):
                tell(None)  # the rank that has failed says so here, and all raise the same
            raise problem

    def _tell_met(self, mine: Any) -> list[Any]:
        """Tell the ranks, which have met."""
        assert self._link is not None, "there are several ranks"
        return [json.loads(said) for said in self._link.exchange_messages(json.dumps(mine).encode())]

    def _finish_together(self, tell: Tell) -> DeepOffloadError | None:
        """Make this rank's part of the step durable, and hear whether all have theirs. Returns what has failed."""
        step = self._asked
        if step is None:
            return None
        failure: IoFailure | BudgetError | None = None
        try:
            self._finish_own()
        except (IoFailure, BudgetError) as error:
            failure = error
        mine = None if self.owed is None else ["" if failure is None else type(failure).__name__, self.owed]
        said = tell(mine)
        self._asked = None  # not before: where another rank has failed meanwhile, all have still to tell
        lacking = [(rank, *theirs) for rank, theirs in enumerate(said) if theirs is not None]
        if not lacking:
            self.store.confirm()
            return None
        rank, name, why = next((each for each in lacking if each[1]), lacking[0])
        text = f"rank {rank} could not make its part of step {step} durable: {why}"
        self.owed = self.owed or text
        log.info("%s; the next commit waits for its own", text)
        return failure if failure is not None or not name else RankError(text)

    def _finish_own(self) -> None:
        making = self._making
        if making is None:
            return
        try:
            self._pager.catch_up_all()
            with self._pager.lock:
                self._frozen.write_all()
                lost = self._lost(making)
                if lost is not None:
                    log.info("step %d cannot be durable (%s); the next commit waits for its own", making.step, lost)
                    self._drop(lost)
                    return
                self._publish(making)
                self._release(making)
                self._making, self.owed = None, None
        except BaseException as error:
            self._drop(str(error))
            raise

    def discard(self) -> None:
        """Give up what is durable and what is to become it."""
        with self._pager.lock:
            self._drop(None)
            self._asked = None
            self.store.discard()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _cut(self, unit: Unit) -> UnitCut:
        memory = self._pager.memory
        memory.settle(unit.weights)
        weights = self._frozen.freeze(unit.weights)
        pieces = []
        for piece in unit.pieces:
            if memory.keeps(piece.block):
                with resident_piece(self._pager, piece):
                    pieces.append((piece, self._frozen.freeze(piece.block, at_once=True)))
            else:
                pieces.append((piece, self._frozen.freeze(piece.block)))
        return UnitCut(unit, weights, pieces, frozenset(handle for handle in unit.handles if handle.master_stale))

    def _updated(self, block: Block) -> None:
        """An update is made: a unit that waited for it can be frozen."""
        making = self._making
        unit = making.waiting.pop(block.id, None) if making is not None else None
        if making is None or unit is None:
            return
        try:
            making.cuts.append(self._cut(unit))
        except (IoFailure, BudgetError) as error:  # the update is made all the same
            making.problem = str(error)

    def _lost(self, making: _Making) -> str | None:
        """Why a step cannot be had."""
        if making.problem is not None:
            return making.problem
        if making.waiting:
            return f"{next(iter(making.waiting.values())).name} was deleted"
        return next(iter(lost_ones(frozen for cut in making.cuts for frozen in cut.blocks)), None)

    def _publish(self, making: _Making) -> None:
        making.cuts.sort(key=lambda cut: cut.unit.index)
        numbers: dict[CommittedBlock, int] = {}
        extents: list[Extent] = []
        for cut in making.cuts:
            for frozen in cut.blocks:
                if frozen.extent is not None:
                    numbers[frozen] = len(extents)
                    extents.append(frozen.extent)
        content = making.content.encode(making.cuts, numbers, len(extents))
        self.store.publish(making.step, [*extents, *making.content.extents], content)

    def _release(self, making: _Making) -> None:
        for cut in making.cuts:
            for frozen in cut.blocks:
                self._frozen.release(frozen)
        self._free(making.content)

    def _free(self, content: StepContent) -> None:
        while content.extents:
            self.space.free(content.extents.pop())

    def _drop(self, why: str | None) -> None:
        """Give the step up that is being made. ``why``: the next commit then waits for its own."""
        with self._pager.lock:
            making, self._making = self._making, None
            if making is not None:
                self._release(making)
            self.owed = why

    def _give_up(self) -> None:
        self._drop("there is no room on NVMe for it and for what came after it")
