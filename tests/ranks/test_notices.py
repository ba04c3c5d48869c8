"""How long a rank waits outside of rounds for one that has stopped."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from deepoffload.errors import RankError
from deepoffload.ranks import notices
from deepoffload.ranks.notices import Notices


class Clock:
    """Moves on while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Rounds:
    """Of a rank whose others are silent."""

    def __init__(self) -> None:
        self.rank, self.said, self.away = 0, "", None

    @contextmanager
    def judged(self) -> Any:
        yield

    def hear(self) -> None:
        """Nobody says anything."""

    def fail(self, message: str) -> None:
        self.said = message

    def check(self) -> None:
        if self.said:
            raise RankError(self.said)


@pytest.mark.parametrize("timeout_s", [2.0, 600.0])
def test_the_limit_counts_from_the_last_thing_that_has_happened(timeout_s: float, monkeypatch: pytest.MonkeyPatch):
    """And not from when somebody looked."""
    clock, rounds = Clock(), Rounds()
    monkeypatch.setattr(notices, "time", clock)
    waiting = Notices(None, rounds, 2, lambda rank: False, timeout_s)  # type: ignore[arg-type]
    happens_at = 100.0 + 0.11
    with pytest.raises(RankError, match="has waited"), waiting.kept_together():
        waiting.wait(lambda: False, "rank 1 at a save", lambda: clock.now >= happens_at)
    assert timeout_s <= clock.now - happens_at < 1.15 * timeout_s + notices.LONGEST_POLL_S
