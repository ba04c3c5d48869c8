"""What a person sees while it runs, and the memory it takes."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

BAR_WIDTH = 24
SAMPLE_INTERVAL_S = 0.02


class ProgressBar:
    """One line that is rewritten on a terminal; a line per step anywhere else."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._started = time.monotonic()
        self._live = sys.stdout.isatty()

    def show(self, done: int, text: str) -> None:
        """``done`` of the steps are done; ``text`` says how it goes."""
        left = (time.monotonic() - self._started) / done * (self._steps - done)
        width = len(str(self._steps))
        line = f"step {done:{width}}/{self._steps}  {text}"
        if self._live:
            filled = BAR_WIDTH * done // self._steps
            bar = "=" * filled + " " * (BAR_WIDTH - filled)
            print(f"\r\033[K[{bar}] {line}  {left:.0f} s left", end="\n" if done == self._steps else "", flush=True)
        else:
            print(line, flush=True)


def process_bytes() -> int:
    """Memory that is this process's own: RssAnon + RssShmem of ``/proc/self/status`` (proc_pid_status(5))."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class MemorySampler:
    """Looks at this process's memory every 20 ms while it is entered.

    Attributes:
        start_bytes: when it was entered.
        peak_bytes: the most that was seen.
    """

    def __init__(self) -> None:
        self.start_bytes = self.peak_bytes = process_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, process_bytes())

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, process_bytes())
