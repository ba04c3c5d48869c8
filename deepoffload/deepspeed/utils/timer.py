"""``deepspeed.utils.timer``: how long an engine's calls take, and how many samples that is per second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from deepoffload.deepspeed.names import submodules

START_STEP = 2
"""So many updates are not counted: the first ones are slower."""


class ThroughputTimer:
    """``engine.tput_timer``. As with DeepSpeed, a micro-step lasts from its forward to the end of ``engine.step()``, so
    what loads data is not counted. A program may also call ``start`` and ``stop`` itself.

    Attributes:
        batch_size: samples of an update, of all ranks; 1 where the configuration does not say.
        epoch_count, micro_step_count, global_step_count: what was counted; micro-steps since the epoch began.
        total_elapsed_time: seconds of the micro-steps that are counted.
        seconds: of forward, backward and step since the last update.
    """

    def __init__(self, batch_size: int | None) -> None:
        self.batch_size = batch_size or 1
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self.seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        self._started: float | None = None

    def update_epoch_count(self) -> None:
        """An epoch has ended."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self, at: float | None = None) -> None:
        """A micro-step begins now, or began at ``at`` (of ``time.perf_counter``)."""
        self._started = time.perf_counter() if at is None else at

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """It ends, and with it an update where ``global_step`` is true. Nothing where none has begun.
        ``report_speed`` is accepted; the key ``steps_per_print`` reports."""
        if self._started is None:
            return
        started, self._started = self._started, None
        counted = self.global_step_count >= START_STEP
        self.micro_step_count += 1
        self.global_step_count += global_step
        if counted:
            self.total_elapsed_time += time.perf_counter() - started

    def avg_samples_per_sec(self) -> float:
        """Samples per second of the updates that are counted; minus infinity, as with DeepSpeed, before there are
        any."""
        steps = self.global_step_count - START_STEP
        if steps <= 0 or self.total_elapsed_time <= 0.0:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add to :attr:`seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start


__getattr__ = submodules(__name__, (), "utils.timer")
