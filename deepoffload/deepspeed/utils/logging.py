"""DeepSpeed's logger and the functions around it, over Python's ``logging``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from deepoffload.deepspeed import comm
from deepoffload.errors import UsageError

logger = logging.getLogger("deepoffload.deepspeed")
"""For what scripts log through it; the engine's own messages go to its parent, ``deepoffload``."""


def log_dist(message: object, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks: those of ``ranks`` (-1: on all). Without a process group there is one, which logs."""
    if _is_one_of(ranks):
        logger.log(level, message)


def print_dist(message: object, ranks: Iterable[int] | None = None) -> None:
    """:func:`log_dist` as a warning, which is seen unless the program says otherwise."""
    log_dist(message, ranks, logging.WARNING)


def _is_one_of(ranks: Iterable[int] | None) -> bool:
    if not comm.is_initialized():
        return True
    wanted = list(ranks or ())
    return bool(wanted) and (wanted[0] == -1 or comm.get_rank() in wanted)


@functools.lru_cache(maxsize=1024)
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: object, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, but each message once."""
    _once(str(message), None if ranks is None else tuple(ranks), level)


def warning_once(message: object) -> None:
    """A warning, but each message once."""
    _once(str(message), (-1,), logging.WARNING)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of :data:`logger` by name.

    Raises:
        UsageError: there is no such level.
    """
    levels = {"debug", "info", "warning", "error", "critical"}
    if not isinstance(log_level_str, str) or log_level_str.lower() not in levels:
        raise UsageError(f"{log_level_str!r} is no level of logging; expected one of {', '.join(sorted(levels))}")
    (logger if custom_logger is None else custom_logger).setLevel(log_level_str.upper())
