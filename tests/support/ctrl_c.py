"""Ctrl-C, as the system sends it."""

from __future__ import annotations

import signal
import threading


class CtrlC(threading.Thread):
    """Sends one to the main thread some time after ``go`` is set, unless it is called off."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.go, self.off = threading.Event(), threading.Event()
        self._delay_s = delay_s
        self.start()

    def run(self) -> None:
        self.go.wait()
        if not self.off.wait(self._delay_s):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def call_off(self) -> None:
        while self.is_alive():
            try:
                self.off.set()
                self.join()
            except KeyboardInterrupt:
                continue
