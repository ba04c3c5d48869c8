"""What each forward pass of a whole model has read and waited for, where nothing is trained. In generation a pass is
the next token of every sequence."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from deepoffload.params.inference import without_backward
from deepoffload.params.pager import Pager
from deepoffload.timeline import Lane


class _Totals(NamedTuple):
    read_bytes: int
    waits: int
    wait_s: float


class ForwardPasses:
    """Told by the model's hooks when a call begins and ends.

    A pass counts from the end of the one before it: what was read ahead for it meanwhile belongs to it, as what it
    reads ahead belongs to the next one.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._number = 0
        self._begin_s = 0.0
        self._before = self._last = _Totals(0, 0, 0.0)

    def began(self) -> None:
        self._begin_s = time.perf_counter()

    def ended(self, output: Any) -> Any:
        """Returns what the program gets of ``output``. None is that of a call that failed."""
        if output is None:
            return None
        now, before = self._totals(), self._before
        self._number += 1
        self._last = _Totals(now.read_bytes - before.read_bytes, now.waits - before.waits, now.wait_s - before.wait_s)
        self._before = now
        timeline = self._pager.tiers.timeline
        if timeline is not None:
            timeline.add(Lane.PASS, f"forward pass {self._number}", self._begin_s, time.perf_counter())
            timeline.end_of_step()
        return without_backward(output)

    def stats(self) -> dict[str, float]:
        """How many there were, and what the last one has read and waited for."""
        return {
            "forwards": self._number,
            "forward_bytes_read": self._last.read_bytes,
            "forward_waits": self._last.waits,
            "forward_wait_s": self._last.wait_s,
        }

    def _totals(self) -> _Totals:
        counters, space = self._pager.tiers.counters, self._pager.tiers.space
        waits = counters.waits + counters.faults + counters.partial_reads
        return _Totals(0 if space is None else space.bytes_read, waits, counters.wait_s)
