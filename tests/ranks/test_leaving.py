"""Other ranks hear that a program has ended while its process waits for a save."""

from __future__ import annotations

import sys
import threading

import pytest

from deepoffload.ranks.leaving import telling_end, telling_end_of_process
from deepoffload.ranks.rounds import EndOf


class Rounds:
    """What the others hear."""

    def __init__(self) -> None:
        self.away, self.has_failed, self.end = self, False, EndOf.ENGINE
        self.said: list[str] = []
        self.heard = threading.Event()

    def fail(self, message: str) -> None:
        self.has_failed = True
        self.ends(message)

    def ends(self, message: str = "it ends") -> None:
        self.said.append(message)
        self.heard.set()


@pytest.mark.parametrize("error", [None, KeyError("no such sample")])
def test_others_hear_of_the_end_of_a_process_that_waits(error: BaseException | None, monkeypatch: pytest.MonkeyPatch):
    if error is not None:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    ended = threading.Thread()
    rounds, of_one_that_runs = Rounds(), Rounds()
    with telling_end_of_process(of_one_that_runs), telling_end_of_process(rounds, ended):
        assert rounds.heard.wait(60.0)
    assert rounds.said[0] == ("it ends" if error is None else "its program ended with KeyError: 'no such sample'")
    assert of_one_that_runs.said == []
    assert (rounds.end, of_one_that_runs.end) == (EndOf.PROGRAM, EndOf.ENGINE)


def test_what_ends_at_once_is_not_told():
    rounds = Rounds()
    with telling_end(rounds, None):
        """Nothing takes long."""
    assert rounds.said == []
