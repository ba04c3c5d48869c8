"""Waiting for a condition instead of for a time, so that a busy machine makes a test slow and not wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from deepoffload.memory.tier_manager import TierManager

LIMIT_S = 200.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns when ``condition`` holds; fails after ``LIMIT_S``."""
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, f"it has not happened within {LIMIT_S:g} s"
        time.sleep(0.001)


class Gate:
    """Holds transfers back until it is opened: the words ``gate.word`` in a rule of a fault script."""

    def __init__(self) -> None:
        self._looked_at, self._opened_by = os.pipe()
        self.word = f"gate={self._looked_at}"

    def open(self) -> None:
        os.write(self._opened_by, b"x")

    def close(self) -> None:
        """Only when nobody looks at it any more."""
        os.close(self._looked_at)
        os.close(self._opened_by)


def settle_transfers(tiers: TierManager) -> None:
    """Returns when nothing is on its way to or from NVMe.

    Raises:
        IoFailure: the first of those that failed, when all have ended.
    """
    with tiers.lock:
        tiers.transfers.settle_all(tiers.transfers.in_flight())
