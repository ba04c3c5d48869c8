"""How busy others keep the processors while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path


class ForeignLoad:
    """CPU time that was neither idle nor ours since the last question, as a share of all cores.

    ``/proc/stat`` against the times of this process and its finished children; what the kernel's own threads do counts
    as foreign, no matter for which process.
    """

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s - sum(os.times()[:4])

    def share(self) -> float:
        """Of the time since the last call."""
        before, self._last = self._last, self._now()
        passed_s = self._last[0] - before[0]
        return max(0.0, self._last[1] - before[1]) / (self._cores * passed_s) if passed_s > 0 else 0.0
