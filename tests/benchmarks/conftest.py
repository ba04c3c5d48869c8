"""Benchmarks in the process of the test, on a disk that is measured for a moment only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from benchmarks.end_to_end import disk
from deepoffload.cli.nvme.job import Effort


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Calls the ``main`` of a benchmark with words of a command line; the cases have separate processes."""
    monkeypatch.setattr(disk, "EFFORT", Effort(0.0, 0.05))
    handler = signal.getsignal(signal.SIGTERM)

    def run(main: Callable[[list[str]], int], *words: object) -> None:
        assert main([str(word) for word in words]) == 0

    yield run
    signal.signal(signal.SIGTERM, handler)
