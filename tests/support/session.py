"""What every session of tests needs, also one without torch: ``pytest -p tests.support.session``."""

from __future__ import annotations

import signal

import hypothesis

# The same examples in every run, however slow the machine is; ``--hypothesis-profile=search`` looks for others.
for name, derandomize in (("search", False), ("repeatable", True)):
    hypothesis.settings.register_profile(
        name,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("repeatable")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: the Ctrl-C tests need it heard."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
