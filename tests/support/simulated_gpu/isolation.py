"""Tests that use the simulated GPU run in a process that does nothing else, and are reported as others.

A ``conftest.py`` takes the hooks of this module and the fixture ``simulated_gpu``. Tests that ask for the fixture, or
have a parameter ``device`` that names the simulated GPU or CUDA, are then handed to a child, which is an ordinary
pytest over all modules with such tests: fixtures, parameters and failures look as always. There is one child at a time,
of one device. What kills it fails the test with all that it had said, and the next test gets another.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from _pytest.runner import runtestprotocol

from tests.support import cuda

FIXTURE = "simulated_gpu"
DEVICES = ("simgpu", "cuda")
CHILD = "SIMULATED_GPU_CHILD"
"""Environment: the two file descriptors of a child, to read requests from and to write reports to."""

SERVED = pytest.StashKey["Child | None"]()


class Child:
    """A pytest over some modules that waits for tests of one device to run."""

    def __init__(self, modules: Iterable[Path], device: str, config: pytest.Config) -> None:
        self.device = device
        # Torch knows one kind of accelerator in a process.
        environment = cuda.visible(os.environ) if device == "cuda" else {**os.environ, cuda.VISIBLE: ""}
        self._said: IO[bytes] = tempfile.TemporaryFile()
        to_child, requests = os.pipe()
        reports, from_child = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *map(str, modules)],
            cwd=config.rootpath,
            env=environment | {CHILD: f"{to_child},{from_child}"},
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )
        os.close(to_child)
        os.close(from_child)
        self._requests = os.fdopen(requests, "w")
        self._reports = os.fdopen(reports, "rb")

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[dict[str, Any]] | str:
        """The reports of a test, or why there are none."""
        try:
            self._requests.write(json.dumps([item.nodeid, nextitem.nodeid if nextitem else None]) + "\n")
            self._requests.flush()
            return pickle.load(self._reports)
        except (BrokenPipeError, EOFError):
            return self.end()
        except pytest.fail.Exception as failure:
            # The time limit of this process.
            self._process.kill()
            return f"{failure}\n{self.end()}"

    def end(self) -> str:
        """Wait for the child to leave; how it left, and what it said."""
        self._reports.close()
        with contextlib.suppress(BrokenPipeError):  # a request that a dead child has not read
            self._requests.close()
        status = self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        self._said.close()
        return f"the process with the simulated GPU ended with status {status}:\n{said}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile now, so that no test's time limit counts it."""
    if CHILD not in os.environ and any(device_of(item) == "simgpu" for item in session.items):
        from tests.support.simulated_gpu.build import build

        with contextlib.suppress(RuntimeError):  # which the fixture will raise again, where it is reported
            build()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In the process that was started: hand tests with the fixture to the child of their module."""
    device = device_of(item)
    if CHILD in os.environ or device is None or item.get_closest_marker("skip") is not None:
        return None
    child = item.session.stash.get(SERVED, None)
    if child is None or child.device != device:
        close(item.session)
        modules = dict.fromkeys(each.path for each in item.session.items if device_of(each) == device)
        child = item.session.stash[SERVED] = Child(modules, device, item.config)
        item.config.add_cleanup(partial(close, item.session))
    same_child = nextitem is not None and device_of(nextitem) == device
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    answer = child.run(item, nextitem if same_child else None)
    if isinstance(answer, str):
        item.session.stash[SERVED] = None
        reports = [pytest.TestReport(item.nodeid, item.location, {}, "failed", answer, "call")]
    else:
        load = item.config.hook.pytest_report_from_serializable
        reports = [load(config=item.config, data=data) for data in answer]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Collectors that earlier tests had set up here and that later ones do not have.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def device_of(item: pytest.Item) -> str | None:
    """On which device a test is to run, None for one that needs no child."""
    if FIXTURE in getattr(item, "fixturenames", ()):
        return "simgpu"
    chosen = getattr(item, "callspec", None)
    device = None if chosen is None else chosen.params.get("device")
    return device if device in DEVICES else None


def close(session: pytest.Session) -> None:
    child = session.stash.get(SERVED, None)
    if child is not None:
        child.end()
        session.stash[SERVED] = None


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In the child: run what is asked for, until nothing is any more."""
    if CHILD not in os.environ:
        return None
    to_child, from_child = map(int, os.environ[CHILD].split(","))
    items = {item.nodeid: item for item in session.items}
    with os.fdopen(to_child) as requests, os.fdopen(from_child, "wb") as answers:
        for line in requests:
            nodeid, following = json.loads(line)
            reports = runtestprotocol(items[nodeid], nextitem=items.get(following), log=False)
            dump = session.config.hook.pytest_report_to_serializable
            pickle.dump([dump(config=session.config, report=report) for report in reports], answers)
            answers.flush()
    return True


@pytest.fixture
def simulated_gpu() -> Iterator[str]:
    """The name of the simulated device, in late mode, with nothing queued."""
    from tests.support.simulated_gpu import install, reset

    install()
    reset()
    yield "simgpu"
    reset()
