"""Rounds: no rank enters a collective before all ranks have said what they need. A pure state machine, without torch.

Each rank has a queue of wants. Round i tells every rank the i-th want of every rank, and then all ranks launch the
union of these wants, in rank order. So the order of payload collectives is equal on all ranks by construction, also
where their programs differ. Equal programs have equal queues: their rounds carry one want each, and none is *mixed*.

A reduction is of the parts that ranks have in one backward: the first of a step, the second, and so on. It is *held*
until every rank has announced its parts, or has ended that backward, or is at its step and so announces nothing any
more. Otherwise the round in which a slow rank answers would decide which parts are added first. Who ends a backward
says so with the next thing that it says.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepoffload.ranks.held_reductions import AnnouncedPart, HeldReductions, Released


class WantKind(enum.IntEnum):
    """What a rank says in a round."""

    NOTHING = 0
    """Its program is elsewhere; said for it by the thread that others have nudged."""
    GATHER = 1
    """The whole bytes of a unit."""
    REDUCE = 2
    """The sum of a unit's gradients over all ranks; this rank has its part."""
    WAIT = 3
    """The program waits until a part that it has announced is reduced, and needs nothing else."""
    STEP = 4
    """The program is at its optimizer step; over when all ranks are at it, or have joined."""
    JOIN = 5
    """The program has no batches left; over when all ranks have joined. Until then it steps with the others."""
    CLOSE = 6
    """The program ends; over when all ranks are at it."""
    FAILED = 7
    """The rank had an error and cannot continue."""
    EDIT = 8
    """The program is about to change a tensor of a unit, or has changed it; over when all ranks say so of the same
    tensor and, afterwards, of the same values."""
    AWAY = 9
    """The program waits for others outside of rounds, at a save for example; said by the thread."""
    ELSEWHERE = 10
    """All of the program waits in a call of another model; said by the thread."""
    CLOSING = 11
    """The program ends, and waits for what this rank is still at, a save in the background; said by the thread."""


class WaitFor(enum.IntEnum):
    """What a WAIT is for."""

    ALL_PARTS = 0
    """The sum of all ranks, which the program reads."""
    ROOM = 1
    """The memory of the part: any sum of it with what is there gives that back."""
    A_WHILE = 2
    """Nothing that cannot be done without: it ends by itself."""


class EndOf(enum.IntEnum):
    """What of a rank ends."""

    ENGINE = 0
    """The program has closed it."""
    PROGRAM = 1
    """Without having closed anything."""
    MODEL = 2
    """The program has dropped it; perhaps it ends."""


PAYLOADS = frozenset({WantKind.GATHER, WantKind.REDUCE})
"""What moves bytes, is of a unit, and is queued."""
STEPPING = frozenset({WantKind.STEP, WantKind.JOIN})
"""Where a rank has announced all of a step's parts."""
RESTS = STEPPING | {WantKind.WAIT, WantKind.CLOSE, WantKind.EDIT}
"""What a rank says again in every round until it is over: it waits, and serves the others meanwhile."""
NAMED = PAYLOADS | {WantKind.EDIT}
"""What says which unit it is about."""
STAYS = RESTS - {WantKind.WAIT}
"""Where a program waits for all others."""
NEEDS_PROGRAMS = STAYS | {WantKind.REDUCE}
"""What is waited for until the programs of other ranks come; a thread of theirs cannot help."""
ANSWERS = frozenset({WantKind.NOTHING, WantKind.AWAY, WantKind.ELSEWHERE, WantKind.CLOSING})
"""What the thread says for a program that is not in a call of ours, or waits outside of rounds."""
ENDS = frozenset({WantKind.CLOSE, WantKind.CLOSING})
"""Who says one of these makes no step any more."""


class Want(NamedTuple):
    """What a rank needs next.

    Attributes:
        unit: a unit's index; of AWAY, 0 where it waits for all, else 1 + the rank; of WAIT, 0 where it is not the
            program that waits, or it does so for a while only, else 1 + the number of the reduction; 0 for other kinds.
        content: of REDUCE, that of a :class:`~deepoffload.ranks.held_reductions.AnnouncedPart`; of an edit, what
            :class:`~deepoffload.ranks.edited.Edited` says of it; of AWAY and ELSEWHERE, a number that stands for what
            it waits at; of CLOSE and CLOSING, an :class:`EndOf`; of WAIT, a :class:`WaitFor`; 0
            for other kinds.
    """

    kind: WantKind
    unit: int = 0
    content: int = 0

    @property
    def stays(self) -> bool:
        """Whether the program goes on only when others have come, or announced their parts."""
        return self.kind in STAYS | ENDS or (self.kind is WantKind.WAIT and self.unit > 0)


class Payload(NamedTuple):
    """A collective that all ranks launch now.

    ``ranks``: of a gather, those that asked for it in this round, and take it; of a reduction, those that have a part
    in it; ``is_partial``: another part of the backward may come later; ``is_more``: a rank has several of them.
    """

    kind: WantKind
    unit: int
    ranks: tuple[int, ...]
    is_partial: bool = False
    is_more: bool = False


NOTHING = Want(WantKind.NOTHING)


@dataclass(frozen=True)
class RoundOutcome:
    """What a round leads to; the same on all ranks.

    Attributes:
        payloads: the collectives to launch, in this order. None where ``failed`` names a rank, or ``apart``.
        met: STEP, JOIN, CLOSE or EDIT where all ranks are there.
        joined: the ranks that are there because they have joined.
        idle: the other ranks at a step that have made no backward for it, where some have.
        failed: the ranks that have said so.
        apart: ranks are at places that can never meet: at their end while others train, at edits of different
            tensors, or of the same one with different values.
    """

    payloads: tuple[Payload, ...] = ()
    met: WantKind | None = None
    joined: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    apart: bool = False


@dataclass
class RoundCounts:
    """``rounds`` that are over, those of them that were ``mixed`` (not all ranks said the same), and ``answers``: how
    often this rank said that it needs nothing because its program was elsewhere."""

    rounds: int = 0
    mixed: int = 0
    answers: int = 0


@dataclass
class Rounds:
    """One rank's side of the protocol.

    ``exchange`` sends a want to all ranks, with ``ended``; :meth:`take` gets what all of them have sent. At most one
    exchange is under way. The methods may be called by any thread, one at a time.

    Attributes:
        backwards: how many backwards the program has ended in this step.
        ended: so many of them are told of with what this rank says now.
        asked: what this rank says in the round that is under way, or None between rounds.
        steps: how many steps all ranks have made.
        meetings: how often all ranks have met, at steps and elsewhere.
    """

    rank: int
    world_size: int
    exchange: Callable[[Want], None]
    asked: Want | None = None
    steps: int = 0
    meetings: int = 0
    counts: RoundCounts = field(default_factory=RoundCounts)
    backwards: int = 0
    ended: int = 0
    _queue: deque[tuple[Want, int]] = field(default_factory=deque)  # and how many backwards have ended after it
    _held: HeldReductions = field(init=False)

    def __post_init__(self) -> None:
        self._held = HeldReductions(self.world_size)

    # -- what this rank says ----------------------------------------------------------------------------------------
    def post(self, want: Want) -> None:
        """Queue what moves bytes. Once for each: a second one would shift all rounds that follow. The content of a
        REDUCE is whether the rank may have more parts of the unit in this backward."""
        assert want.kind in PAYLOADS, want
        if want.kind is WantKind.REDUCE:
            want = want._replace(content=AnnouncedPart(self.backwards, bool(want.content)).content)
        self._queue.append((want, 0))

    def end_backward(self) -> None:
        """The program has ended a backward, and announces no more parts of it."""
        self.backwards += 1
        if self._queue:
            want, ends = self._queue.pop()
            self._queue.append((want, ends + 1))
        else:
            self.ended += 1

    @property
    def upcoming(self) -> Want | None:
        """What this rank says when it enters the next round; None while one is under way, or if there is nothing."""
        return self._queue[0][0] if self.asked is None and self._queue else None

    @property
    def has_queue(self) -> bool:
        """Whether wants wait for the rounds after this one."""
        return bool(self._queue)

    def enter(self) -> None:
        """Enter the next round with the first want of the queue, if there is one."""
        if self.asked is None and self._queue:
            want, ends = self._queue.popleft()
            self.ended += ends
            self._say(want)

    def rest(self, want: Want) -> None:
        """Enter the next round as one that waits, if this rank has nothing else to say."""
        assert want.kind in RESTS, want
        if self.asked is None and not self._queue:
            self._say(want)

    def answer(self, want: Want = NOTHING) -> bool:
        """Enter the next round for a program that is elsewhere. Returns whether there was nothing else to say."""
        assert want.kind in ANSWERS, want
        if self.asked is not None or self._queue:
            return False
        self.counts.answers += 1
        self._say(want)
        return True

    def fail(self) -> None:
        """The next want of this rank is its failure, and it has no others."""
        self._queue.clear()
        if self.asked is None:
            self._say(Want(WantKind.FAILED))
        else:
            self._queue.append((Want(WantKind.FAILED), 0))

    def _say(self, want: Want) -> None:
        self.asked = want
        self.exchange(want)

    # -- what all ranks have said -----------------------------------------------------------------------------------
    def is_pending(self, want: Want) -> bool:
        """Whether a want of this rank has still to be launched: queued, said, or held."""
        said = [self.asked, *(queued for queued, _ in self._queue)]
        if any(one is not None and one[:2] == want[:2] for one in said):
            return True
        return want.kind is WantKind.REDUCE and self._held.of(want.unit, self.rank) > 0

    def awaits_parts(self, unit: int, *, ended: bool = True) -> bool:
        """Whether parts of a unit are still to be launched, of this rank or of backwards that this program has ended.

        Args:
            ended: all ranks have to say that they have ended these; else one part from each of the others is enough.
        """
        if self.is_pending(Want(WantKind.REDUCE, unit)) or self._held.holds(unit, self.backwards):
            return True
        ranks, last = range(self.world_size), self.backwards - 1
        if ended:  # this one, too: else equal programs would not all wait for the same round
            return not all(self._held.has_ended(rank, last) for rank in ranks)
        return not all(self._held.has_said(unit, rank, last) for rank in ranks if rank != self.rank)

    def needs(self, rank: int, want: Want, other: int) -> bool:
        """Whether ``rank``, which stays at ``want``, does not go on before the program of ``other`` says something."""
        if want.kind is WantKind.WAIT:
            return self._held.needs(want.unit - 1, rank, other, reads=want.content == WaitFor.ALL_PARTS)
        return want.kind in STAYS | ENDS

    def take(self, wants: Sequence[Want], ended: Sequence[int] = ()) -> RoundOutcome:
        """The round under way is over; ``wants`` has what each rank said, in rank order, and ``ended`` of how
        many backwards each has told; nothing where there is no news."""
        assert self.asked is not None and wants[self.rank] == self.asked, (self.asked, wants)
        self.asked = None
        self.counts.rounds += 1
        self.counts.mixed += len(set(wants)) > 1
        kinds = {want.kind for want in wants}
        if WantKind.FAILED in kinds:
            return RoundOutcome(failed=_those_at(wants, WantKind.FAILED))
        if kinds & ENDS and kinds & (STEPPING | {WantKind.REDUCE, WantKind.WAIT, WantKind.EDIT}):
            return RoundOutcome(apart=True)
        payloads = tuple(self._launched(wants, ended))
        told = self._held.ended
        met = self._meet(kinds, len(set(wants)))
        self.meetings += met is not None
        if WantKind.EDIT in kinds and met is None and not payloads and all(want.stays for want in wants):
            return RoundOutcome(apart=True)
        joined = () if met is None else _those_at(wants, WantKind.JOIN)
        idle = [rank for rank, count in enumerate(told) if not count and rank not in joined] if any(told) else ()
        return RoundOutcome(payloads, met, joined, tuple(idle) if met is WantKind.STEP else ())

    def _launched(self, wants: Sequence[Want], ended: Sequence[int]) -> Iterator[Payload]:
        held, before = self._held, (self._held.ended, self._held.over)
        held.over = frozenset(rank for rank, want in enumerate(wants) if want.kind in STEPPING)
        for want in dict.fromkeys(wants):
            asking = tuple(rank for rank, other in enumerate(wants) if other == want)
            if want.kind is WantKind.GATHER:
                # A rank that still has the same want in its queue takes nothing now: the others cannot know that it
                # would.
                yield Payload(want.kind, want.unit, asking)
            elif want.kind is WantKind.REDUCE:
                for rank in asking:
                    held.announce(want.unit, rank, AnnouncedPart.said(want.content))
                yield from _payloads(held.release(want.unit))
        held.ended = list(ended) or held.ended
        goes_on = (held.ended, held.over) != before
        if held and (held.over or goes_on):
            released = tuple(_payloads(held.release_all()))
            yield from released
            goes_on = goes_on or bool(released)
        if goes_on:
            return  # who waited may announce more
        if held and all(want.kind in STEPPING or want.kind is WantKind.WAIT for want in wants):
            yield from self._released_for_room([want for want in wants if want.kind is WantKind.WAIT])

    def _released_for_room(self, waits: Sequence[Want]) -> Iterator[Payload]:
        """Where nobody can announce a part before something is reduced, the parts that are there are added. Not those
        of a sum that a program reads, as long as others help."""
        reasons = {want.content for want in waits}
        if WaitFor.A_WHILE in reasons:
            return  # that rank ends its wait, and may announce more
        read = {want.unit - 1 for want in waits if want.content == WaitFor.ALL_PARTS}
        released = tuple(self._held.release_all(partial=True, but=read)) if WaitFor.ROOM in reasons else ()
        yield from _payloads(released or self._held.release_all(partial=True))

    def _meet(self, kinds: set[WantKind], different: int) -> WantKind | None:
        if kinds == {WantKind.EDIT}:
            return WantKind.EDIT if different == 1 else None
        if kinds <= STEPPING:
            if WantKind.STEP not in kinds:
                # The step is not over. What comes now comes after all that there has been of it.
                self.backwards = self.ended = max(self._held.ended)
                self._held.ended = [self.ended] * self.world_size
                return WantKind.JOIN
            self.steps += 1
            self.backwards = self.ended = 0
            self._held = HeldReductions(self.world_size)
            return WantKind.STEP
        return WantKind.CLOSE if kinds == {WantKind.CLOSE} else None


def _payloads(released: Iterable[Released]) -> Iterator[Payload]:
    return (Payload(WantKind.REDUCE, *one) for one in released)


def _those_at(wants: Sequence[Want], kind: WantKind) -> tuple[int, ...]:
    return tuple(rank for rank, want in enumerate(wants) if want.kind is kind)
