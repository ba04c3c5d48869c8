"""Checks of arguments, before a call changes anything."""

from __future__ import annotations

import math

from deepoffload.checkpoint.values import clipped
from deepoffload.errors import UsageError


def check_switches(**given: object) -> None:
    """Check that each is True or False: text such as ``"no"`` would count as True.

    Raises:
        UsageError: with the name of the argument.
    """
    for name, value in given.items():
        if type(value) is not bool:
            raise UsageError(f"{name} has to be True or False, not {clipped(repr(value))}")


def check_keep_last(keep_last: object) -> None:
    """Check a number of checkpoints to keep; None: all of them.

    Raises:
        UsageError: it is no whole number of at least 1.
    """
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise UsageError(f"keep_last has to be a whole number of at least 1, not {clipped(repr(keep_last))}")


def checked_timeout(timeout_s: object) -> float | None:
    """A time to wait in seconds; None: as long as it takes.

    Raises:
        UsageError: it is no number, or a negative one.
    """
    if timeout_s is None:
        return None
    if type(timeout_s) not in (int, float) or math.isnan(timeout_s) or timeout_s < 0:  # type: ignore[arg-type, operator]
        raise UsageError(f"timeout has to be a number of seconds, or None, not {clipped(repr(timeout_s))}")
    return float(timeout_s)  # type: ignore[arg-type]
