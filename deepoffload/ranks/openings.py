"""What ranks tell each other before they make the groups of a model: that they have come to that, or what has failed.

A rank that cannot read its configuration, or does not know with whom it trains, never comes. Those that wait for it
would be in a collective of torch until its limit is over, and after that count their groups otherwise than this rank.
So each says in the store of the default group that it has come, and looks there until all have. Nothing is collective
before that: a rank that fails says so, and need not know who waits for it.

`[Note: postings]` Each rank numbers what it says. Others take it in that order: they pass over what is for other ranks,
and do not look again at what they have met or heard. So one that comes late hears what those before it have heard. A
rank that gives up takes back that it has come, and says what has failed first: those that wait for it give up with the
same text. Second attempts meet each other: who has heard of a failure takes no other one for come that has not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

from deepoffload.errors import DeepOffloadError
from deepoffload.ranks.notices import LONGEST_POLL_S, POLL_S, kind_of
from deepoffload.ranks.words import ranks_in_words

KNOWN_WITHIN_S = 1.0
"""A rank that does not know who waits for it has heard of one that does, if there is one."""


class _Posting(NamedTuple):
    """What a rank says once.

    Attributes:
        rank, number: of the posting that says it first: where others have failed before, of theirs.
        members: for whom it is, in order; None: for all that wait for that rank.
        error: why it does not come: the class of an error, at what (may be empty), and its text.
    """

    rank: int
    number: int
    members: Sequence[int] | None
    error: tuple[str, str, str] | None = None

    @classmethod
    def read(cls, said: bytes) -> _Posting:
        """As the store has it."""
        rank, number, members, error = json.loads(said)
        return cls(rank, number, members, None if error is None else tuple(error))

    def raised(self) -> DeepOffloadError:
        """What all raise."""
        assert self.error is not None
        name, at, text = self.error
        return kind_of(name)(f"rank {self.rank} has failed at {at}: {text}" if at else text)


class Openings:
    """One rank's view of it.

    Args:
        store: common to all ranks of the program. Nobody else uses its keys.
        rank: this one. All ranks here count in the default group.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._known: dict[int, int] = {}
        self._seen: dict[tuple[int, int], float] = {}

    def come(self, members: Sequence[int], timeout_s: float) -> None:
        """Return when all ``members``, this rank among them, have come.

        Raises:
            DeepOffloadError: what one of them has failed with. UsageError: one of them has come with other members.
                RankError: not all have come within ``timeout_s``. All raise it.
        """
        mine = self._say(list(members))
        come: dict[int, int] = {}
        until, pause_s = time.monotonic() + timeout_s, POLL_S
        while True:
            failed = self._failed_later(come) or self._failed_before(mine, come)
            missing = [rank for rank in members if rank != self._rank and rank not in come]
            if not missing:
                break
            if failed is None and time.monotonic() >= until:
                failed = mine._replace(error=("RankError", "", _late(mine, missing, timeout_s)))
            if failed is not None:
                self._post(failed._replace(members=mine.members), mine.number)
                self._hear(failed, mine.members)
                raise failed.raised()
            time.sleep(pause_s)
            pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)
        for rank, number in come.items():
            self._pass(rank, number)

    def fail(
        self, error: tuple[str, str, str], members: Sequence[int] | None, hearers: Sequence[int], limit_s: float
    ) -> DeepOffloadError | None:
        """Say that this rank does not come, and return when all that may wait for it have heard it, or have failed
        themselves, at the latest after ``limit_s``.

        Args:
            error: as a :class:`_Posting` has it.
            members: who trains the model; None where this rank does not know. The first one that hears it says so.
            hearers: who may wait for it.

        Returns:
            What the others raise; None where all of them have failed alike.
        """
        mine = self._say(members, error)
        left, alike = [rank for rank in hearers if rank != self._rank], True
        until, pause_s = time.monotonic() + limit_s, POLL_S
        while left and time.monotonic() < until:
            for rank in tuple(left):
                if rank not in left:
                    continue
                has_heard = self._store.check([_heard(rank, mine)])  # before: it may have failed, and heard it then
                found = next((said for _, said in self._after(rank) if said.error is not None), None)
                if found is not None:
                    self._hear(found, mine.members)
                if found is not None or has_heard:
                    left.remove(rank)
                    alike = alike and found is not None and found.error == error
                if has_heard and mine.members is None:
                    mine = mine._replace(members=json.loads(self._store.get(_heard(rank, mine))))
                    left = [other for other in left if mine.members is None or other in mine.members]
            time.sleep(pause_s)
            pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)
        return None if alike and not left else mine.raised()

    # -- what others say ---------------------------------------------------------------------------------------------

    def _failed_later(self, come: dict[int, int]) -> _Posting | None:
        """What a rank has failed with after it had come. To be asked before it is looked whether all have come: a rank
        for which they have may fail at something else by now."""
        for rank, number in come.items():
            for _, said in self._after(rank, number - 1):
                if said.error is not None and said.members is not None:
                    return said
        return None

    def _failed_before(self, mine: _Posting, come: dict[int, int]) -> _Posting | None:
        """What a rank has failed with that has not come. Notes in ``come`` who has."""
        assert mine.members is not None
        for rank in mine.members:
            if rank == self._rank or rank in come:
                continue
            has_heard = self._has_heard_as_much(rank, mine.members)
            for number, said in self._after(rank):
                if said.error is not None:
                    if self._is_meant(said, mine.members, come):
                        return said
                    break
                if not has_heard:
                    break
                if said.members != mine.members:  # both say that the lower one has failed
                    lower = min(mine, said, key=lambda one: one.rank)
                    return lower._replace(error=("UsageError", "", _apart(mine, said)))
                come[rank] = number
                break
        return None

    def _is_meant(self, failed: _Posting, members: Sequence[int], come: Container[int]) -> bool:
        """Whether a failure is one for these members. A rank that does not know who they are soon hears it from them,
        where it is not this one."""
        others = (rank for rank in members if rank not in (self._rank, failed.rank))
        seen = self._seen.setdefault((failed.rank, failed.number), time.monotonic())
        is_old = time.monotonic() - seen >= KNOWN_WITHIN_S
        return failed.members is not None or is_old or all(rank in come for rank in others)

    def _has_heard_as_much(self, rank: int, members: Sequence[int]) -> bool:
        """Whether another rank has heard of all failures of which this one has, and which it will hear of. To be asked
        before it is looked whether it has come: it may have said that before."""
        return all(
            self._store.check([_heard(rank, failed)])
            for failed in self._failures()
            if failed.rank in members and failed.rank != rank and (failed.members is None or rank in failed.members)
        )

    def _after(self, rank: int, number: int | None = None) -> Iterator[tuple[int, _Posting]]:
        """What another rank has said to this one, after a posting or after what is over, with its numbers."""
        number = self._over(rank) if number is None else number
        while self._store.check([_posting(rank, number := number + 1)]):
            said = _Posting.read(self._store.get(_posting(rank, number)))
            is_for_us = said.members is None or self._rank in said.members
            if is_for_us and (said.error is None or said.number > self._over(said.rank)):
                yield number, said

    def _over(self, rank: int) -> int:
        """What another rank has said up to here is over for this one."""
        if rank not in self._known:
            self._known[rank] = int(self._store.add(f"{self._rank} is past {rank}", 0))
        return self._known[rank]

    def _pass(self, rank: int, number: int) -> None:
        if (more := number - self._over(rank)) > 0:
            self._known[rank] = int(self._store.add(f"{self._rank} is past {rank}", more))

    def _hear(self, failed: _Posting, members: Sequence[int] | None) -> None:
        """Note that this rank has heard of it, which trains with ``members``."""
        self._pass(failed.rank, failed.number)
        count = int(self._store.add(self._count_of_failures, 1))
        if failed.members is None and members is not None:  # for others it is none, now that it is known for whom it is
            failed = failed._replace(members=members)
            self._store.set(_posting(failed.rank, failed.number), json.dumps(failed))
        self._store.set(f"failure {count} that {self._rank} has heard of", json.dumps(failed))
        self._store.set(_heard(self._rank, failed), json.dumps(members))

    def _failures(self) -> Iterator[_Posting]:
        """Those that this rank has heard of."""
        for number in range(1, int(self._store.add(self._count_of_failures, 0)) + 1):
            yield _Posting.read(self._store.get(f"failure {number} that {self._rank} has heard of"))

    @property
    def _count_of_failures(self) -> str:
        return f"failures that {self._rank} has heard of"

    # -- what this rank says -----------------------------------------------------------------------------------------

    def _say(self, members: Sequence[int] | None, error: tuple[str, str, str] | None = None) -> _Posting:
        mine = _Posting(self._rank, int(self._store.add(f"postings of {self._rank}", 1)), members, error)
        if error is not None:
            self._pass(self._rank, mine.number)  # those that have heard it say nothing new
        self._post(mine, mine.number)
        return mine

    def _post(self, said: _Posting, number: int) -> None:
        self._store.set(_posting(self._rank, number), json.dumps(said))


def _posting(rank: int, number: int) -> str:
    return f"posting {number} of {rank}"


def _heard(rank: int, failed: _Posting) -> str:
    return f"{rank} has heard posting {failed.number} of {failed.rank}"


def _late(mine: _Posting, missing: Sequence[int], timeout_s: float) -> str:
    assert mine.members is not None
    have = "has" if len(missing) == 1 else "have"
    return (
        f"{ranks_in_words(missing)} {have} not come to building a model with {ranks_in_words(mine.members)} within "
        f"{timeout_s:g} s (ranks.timeout_s), for which rank {mine.rank} has waited. Every one of them builds it: is "
        'one at ranks="local", at a call of another model, or at another attempt, after an error that it has caught?'
    )


def _apart(mine: _Posting, other: _Posting) -> str:
    said = sorted((one.rank, one.members or ()) for one in (mine, other))
    where = " and ".join(f"rank {rank} with {ranks_in_words(members)}" for rank, members in said)
    return f"ranks build a model together, {where}: group= and mesh= name the same ranks on all of them"
