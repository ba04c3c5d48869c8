"""The disk of the simulated clock: two directions that share their bandwidth."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from deepoffload.schedule.cost_model import Bandwidths


@dataclass
class _Transfer:
    block: int
    left_bytes: float


class Disk:
    """Reads and writes, each in the order given (urgent reads first); both at once share ``mixed_bytes_per_s``.

    ``computing_share``: what is left of the rates while the program computes. Where all cores compute, the thread that
    hands requests to the kernel has to wait for its turn.
    """

    def __init__(self, bandwidths: Bandwidths, computing_share: float = 1.0) -> None:
        self._rates = bandwidths
        self._computing_share = computing_share
        self._urgent: deque[_Transfer] = deque()
        self._reads: deque[_Transfer] = deque()
        self._writes: deque[_Transfer] = deque()
        self._done: list[int] = []
        self.busy_s = 0.0
        self.now = 0.0

    def read(self, block: int, nbytes: int, *, urgent: bool) -> None:
        (self._urgent if urgent else self._reads).append(_Transfer(block, float(nbytes)))

    def write(self, block: int, nbytes: int) -> None:
        self._writes.append(_Transfer(block, float(nbytes)))

    def advance(self, until: float) -> None:
        """The program computes until the clock shows ``until``, and the disk works."""
        while self.now < until and self._next():
            self._work(until, self._computing_share)
        self.now = max(self.now, until)

    def wait_for(self, block: int) -> None:
        """The program waits until the transfer of ``block`` is done."""
        while block not in self._done:
            if not self._next():
                raise RuntimeError(f"block {block} has no transfer in flight")
            self._work(math.inf, 1.0)

    def collect(self) -> list[int]:
        """Blocks whose transfers are done, each once."""
        done, self._done = self._done, []
        return done

    def _next(self) -> list[tuple[deque[_Transfer], float]]:
        """The queues that move now, and their rates."""
        reads = self._urgent or self._reads
        if reads and self._writes:
            half = self._rates.mixed_bytes_per_s / 2
            return [(reads, half), (self._writes, half)]
        if reads:
            return [(reads, self._rates.read_bytes_per_s)]
        return [(self._writes, self._rates.write_bytes_per_s)] if self._writes else []

    def _work(self, until: float, share: float) -> None:
        active = [(queue, rate * share) for queue, rate in self._next()]
        span = min(queue[0].left_bytes / rate for queue, rate in active)
        whole = self.now + span <= until
        span = span if whole else until - self.now
        for queue, rate in active:
            queue[0].left_bytes -= span * rate
            if queue[0].left_bytes <= 1e-3:
                self._done.append(queue.popleft().block)
        self.now += span
        self.busy_s += span
