"""What pytest needs for DeepSpeed's own tests in addition to their conftest.py, and a file that says how far it is.

A run that hangs or is ended leaves that file behind: the next run with the same file leaves out what has ended.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "deepspeed", "pytest"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", type=Path, help="a file that gets a line when a case begins, and one when it ends")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("world_size(number): of ranks", "sequential: not next to others"):
        config.addinivalue_line("markers", marker)
    if config.option.progress is not None:
        config.pluginmanager.register(Progress(config.option.progress))


class Progress:
    """Writes the lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        self.ended = {entry["case"] for entry in entries if "outcome" in entry}
        self.outcome, self.error = "passed", ""

    def write(self, **entry: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.write(collected=[item.nodeid for item in items])
        done = [item for item in items if item.nodeid in self.ended]
        items[:] = [item for item in items if item.nodeid not in self.ended]
        config.hook.pytest_deselected(items=done)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(case=report.nodeid, outcome="failed", error=first_line(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.error = "passed", ""
        self.write(case=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome, self.error = "failed", self.error or first_line(report)
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(case=nodeid, outcome=self.outcome, error=self.error)


def first_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Of the error itself, where pytest knows which it is."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return next(iter(str(crash.message).splitlines()), "")
    lines = report.longreprtext.strip().splitlines()
    return next((line[1:].strip() for line in reversed(lines) if line.startswith("E ")), lines[0] if lines else "")


@pytest.fixture
def compile_mode() -> bool:
    """Of some of their tests: with ``engine.compile()`` or without."""
    return False
