"""The end of an engine whose models are gone, and that nobody has closed.

Python finds out at any time, in the middle of anything. One process gives everything back there and then. Several ranks
end together: each may still be asked for its shards until all have dropped the model. A thread waits for that, without
a limit, and serves the others. It waits in gloo, and costs nothing meanwhile.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext

from deepoffload.copies.rank_link import RankLink
from deepoffload.memory.lock import BooksLock
from deepoffload.params.pager import Pager
from deepoffload.ranks.leaving import at_exit_of, call_at_exit, program_has_ended, telling_end
from deepoffload.ranks.rounds import EndOf
from deepoffload.ranks.service import RoundService

log = logging.getLogger("deepoffload")

NO_LIMIT_S = 1e9
PROGRAM_ENDS_WITHIN_S = 0.02
"""What lies between the last line of a program and the end of its thread."""


def end_unasked(close: Callable[[], None], lock: BooksLock, link: RankLink | None) -> Departure | None:
    """End an engine whose last parameter has just been deleted: now, or with several ranks (``link``) when they all
    have. One process leaves it as it is where somebody is in the middle of something (has ``lock``)."""
    if link is not None:
        return Departure(close, link.rounds)
    if lock.acquire_idle():
        try:
            close()
        finally:
            lock.release()
    return None


def failure_under_way(before: int) -> str | None:
    """What closes an engine, where an error is on its way out. ``before``: the id of the one that the program handled
    when the engine was made."""
    error = sys.exc_info()[1]
    if error is None or id(error) == before:
        return None
    return f"its engine was closed by {type(error).__name__}: {error}"


def finish_saves(pager: Pager, link: RankLink | None, failure: str | None) -> None:
    """Before an engine closes, return when nothing that was begun needs it. Other ranks do not wait for that where they
    still train. ``failure``: what it closes with, where it does so because of an error."""
    guards = pager.tiers.guards
    if not pager.lock.is_mine():
        with nullcontext() if link is None or not guards else telling_end(link.rounds, failure):
            guards.finish()


class Departure:
    """A thread that closes one engine. The end of the process, and a call of ``close()``, wait for it.

    Args:
        close: ends the engine. It waits for the other ranks.
        rounds: serves them meanwhile.
    """

    def __init__(self, close: Callable[[], None], rounds: RoundService) -> None:
        self._close: Callable[[], None] | None = close
        self._rounds = rounds
        self._begun = time.monotonic()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="deepoffload leaving", daemon=True)
        self._over = _thread.allocate_lock()
        self._over.acquire()
        rounds.timeout_s = NO_LIMIT_S
        self._cancel_at_exit = call_at_exit(at_exit_of(weakref.ref(self)))
        # The code that has dropped the model may hold locks of `threading`, for which a new Thread would wait.
        _thread.start_new_thread(self._start, ())

    @property
    def timeout_s(self) -> float:
        """How long it waits from now on while nothing happens."""
        return self._rounds.timeout_s

    @timeout_s.setter
    def timeout_s(self, limit_s: float) -> None:
        self._rounds.timeout_s = time.monotonic() - self._begun + limit_s

    @property
    def untold(self) -> str | None:
        """What has failed, where the program does not know it."""
        return self._rounds.untold

    def program_ends(self) -> None:
        """What the others are told, if they have not been told yet."""
        self._rounds.program_ends()

    def let_first_end(self) -> None:
        """Nobody is left to look at the others: see :meth:`RoundService.let_first_end`."""

    def fail(self, message: str) -> None:
        """Tell all ranks that this one cannot continue."""
        self._rounds.fail(message)

    def close(self) -> None:
        """Return when the engine has ended.

        Raises:
            RankError, IoFailure, BudgetError: what its end has raised.
        """
        with self._over:
            pass
        if self._thread.ident is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close_within(self, limit_s: float) -> None:
        """The same for a program that asks for it: the ranks have so many seconds to come, as with any other wait."""
        self.timeout_s = limit_s
        self.close()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends, and starts no threads any more
            self._run()

    def _run(self) -> None:
        close, self._close = self._close, None
        assert close is not None
        time.sleep(PROGRAM_ENDS_WITHIN_S)  # where it has dropped the model as its frames have gone
        self._rounds.away.end = EndOf.PROGRAM if program_has_ended() else EndOf.MODEL
        try:
            close()
        except Exception as error:
            self._error = error
            log.debug("the end of a model that is gone: %s", error)
        finally:
            del close
            self._cancel_at_exit()
            self._over.release()
