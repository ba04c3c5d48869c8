"""The one error that all ranks raise, on one rank. [Note: ends] in :mod:`service`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from deepoffload.errors import RankError
from deepoffload.ranks.apart import PeersApartError
from deepoffload.ranks.collectives import LinkError
from deepoffload.ranks.leaving import text_of
from deepoffload.ranks.long_waits import is_ours
from deepoffload.ranks.roll_call import RollCall, Verdict
from deepoffload.ranks.round_runner import LaunchError, PeersFailedError, RoundRunner, say_failure
from deepoffload.ranks.rounds import ENDS, NOTHING, Want
from deepoffload.ranks.words import Whereabouts, at, ranks_in_words

log = logging.getLogger("deepoffload")

HEARD_WITHIN_S = 1.0
"""How long a rank that has failed waits until the others have heard it."""
VERDICT_WITHIN_S = 3.0
"""How long another rank may take to find out what has happened."""


class CommonError:
    """What has ended the rounds of these ranks.

    Attributes:
        text: what all calls raise; None while nothing has happened.
        is_of_another: another rank has caused it, and ends.
        is_told: the program has been told.

    Args:
        lock: of the runner.
        here: where this rank is.
        nudge: lets the others take a round of this number.
        told: what a rank in a call of another model has found out.
        cut: ends the connections, and what is in flight.
        name_of: what errors call what a want is of.
    """

    def __init__(
        self,
        roll_call: RollCall,
        runner: RoundRunner,
        lock: AbstractContextManager[Any],
        here: Callable[[], Whereabouts],
        nudge: Callable[[int], None],
        told: Callable[[], str | None],
        cut: Callable[[], None],
        name_of: Callable[[Want], str],
    ) -> None:
        self.text: str | None = None
        self.is_of_another = self.is_told = False
        self._roll_call, self._runner, self._lock, self._here = roll_call, runner, lock, here
        self._nudge, self._told, self._cut, self._name_of = nudge, told, cut, name_of
        self._rank = runner.rounds.rank

    def check(self) -> None:
        """Raise what has failed before, if anything has."""
        if self.text is not None:
            raise self._raised(self.text)

    def hear(self) -> None:
        """Raise what another rank has said to all, for a wait that is not in a round. Asks the store."""
        with self.judged(), self._lock:
            self.check()
            if (said := self._roll_call.verdict()) is not None:
                raise self._give_up(said)

    def fail(self, message: str) -> None:
        """Tell all ranks that this one cannot continue, and why. Returns when they have heard it."""
        self._give_up(self._tell(f"rank {self._rank} has failed {self._here().at}: {message}"))

    def answer_alarm(self) -> None:
        """Say where this rank is, and take what another one finds."""
        self._roll_call.answer(self._here())
        if (verdict := self._roll_call.verdict(VERDICT_WITHIN_S)) is not None:
            self._give_up(verdict)

    def end_all(self, cause: str, *, says_where: bool = False, ranks: tuple[int, ...] = ()) -> RankError:
        """Let all ranks raise ``cause``, and where each of them is unless it ``says_where``. Returns the error.

        Args:
            ranks: those that have caused it, and end.
        """
        return self._give_up(self._roll_call.inquire(self._here(), cause, says_where=says_where, ranks=ranks))

    @contextmanager
    def judged(self, want: Want = NOTHING) -> Iterator[None]:
        """Errors of the links and of payloads become the one that all ranks raise."""
        try:
            yield
        except PeersFailedError as error:
            said = self._roll_call.verdict(VERDICT_WITHIN_S)
            text = f"failure of {ranks_in_words(error.ranks)}: its output says why"
            raise self._give_up(Verdict(text if said is None else said.text, tuple(error.ranks))) from None
        except PeersApartError as error:
            # Those that have not seen it yet lose their connections to this rank, and read there why.
            ended = tuple(rank for rank, want in enumerate(error.wants) if want.kind in ENDS)
            raise self._give_up(self._roll_call.judge(Verdict(error.text(self._name_of), ended))) from None
        except LaunchError as error:
            cause = error.__cause__
            assert cause is not None
            where = at(Want(error.payload.kind, error.payload.unit), self._name_of)
            self._give_up(self._tell(f"rank {self._rank} has failed {where}: {text_of(cause)}"))
            raise cause from None
        except (LinkError, RankError) as error:
            if self.text is None:
                self.end_all(f"rank {self._rank} has lost a connection {at(want, self._name_of)} ({error})")
            assert self.text is not None
            if str(error) == self.text:
                raise
            # a connection has ended because the others have ended theirs; the cause is what they say
            raise self._raised(self.text) from (None if isinstance(error, LinkError) else error)

    def _give_up(self, found: Verdict) -> RankError:
        """All calls raise that from now on. Returns the error."""
        with self._lock:
            if self.text is None:
                self.text = self._told() or found.text
                self.is_of_another = bool(found.ranks) and self._rank not in found.ranks
                self._cut()
        return self._raised(self.text)

    def _tell(self, text: str) -> Verdict:
        """Say ``text`` to all ranks as this rank's failure. Returns what all raise: another may have failed first."""
        said = self._roll_call.judge(Verdict(text, (self._rank,)))
        try:
            say_failure(self._runner, self._lock, self._nudge, lambda: self.text is not None, HEARD_WITHIN_S)
        except RuntimeError as error:
            log.debug("rank %d has told the others that it has failed: %s", self._rank, error)
        return said

    def _raised(self, text: str) -> RankError:
        self.is_told = self.is_told or not is_ours(threading.current_thread())
        return RankError(text)
