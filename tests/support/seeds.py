"""Runs generated programs, and counts those that go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable


def run_seeds(run: Callable[[int], str | None], count: int, first: int, say: Callable[[str], None]) -> int:
    """How many of the programs of ``count`` seeds from ``first`` on go wrong.

    Args:
        run: runs the program of a seed; what goes wrong with it, None when nothing does.
        say: is told each failure, and the number of them at the end.
    """
    wrong = 0
    begin_s = time.monotonic()
    for seed in range(first, first + count):
        failure = run(seed)
        if failure is not None:
            wrong += 1
            say(failure)
    say(f"{wrong} of {count} programs go wrong ({time.monotonic() - begin_s:.0f} s)")
    return wrong
