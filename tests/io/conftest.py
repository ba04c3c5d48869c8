"""Engines and memory for the I/O tests. Files go to a real disk: pytest's temporary directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepoffload.io.engine import BACKENDS, IoEngine, probe_backend
from deepoffload.native.aio import HostMapping
from tests.support.threads import native_threads, native_threads_left
from tests.support.waiting import Gate


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    report = probe_backend(request.param)
    if not report.available:
        pytest.skip(f"{report.name}: {report.reason}")
    return str(request.param)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Shut until the test opens it, and open before its engines are closed."""
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def make_engine(gate: Gate) -> Iterator[Callable[..., IoEngine]]:
    """Makes engines and closes them; none of their threads may be left."""
    before = len(native_threads())
    engines: list[IoEngine] = []

    def make(**options: object) -> IoEngine:
        engines.append(IoEngine(**options))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    gate.open()
    for engine in engines:
        engine.close(timeout_s=100)
    assert native_threads_left(before) == []
    assert threading.active_count() < 50


@pytest.fixture
def memory() -> Iterator[HostMapping]:
    with HostMapping(16 << 20) as mapping:
        yield mapping


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Three paths, as of three disks."""
    paths = [tmp_path / name for name in ("one", "two", "three")]
    for path in paths:
        path.mkdir()
    return paths
