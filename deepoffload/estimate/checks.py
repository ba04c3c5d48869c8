"""Numbers that a user gave, refused where they make no sense."""

from __future__ import annotations

import math
from numbers import Integral, Real

from deepoffload.errors import ConfigError


def positive_integer(name: str, value: object) -> int:
    """``value`` as an int.

    Raises:
        ConfigError: it is not a whole number of at least 1.
    """
    whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    number = int(value)  # type: ignore[call-overload]
    if number < 1:
        raise ConfigError(f"{name} must be at least 1, not {number}")
    return number


def at_least(name: str, value: object, least: float) -> float:
    """``value`` as a float.

    Raises:
        ConfigError: it is no finite number, or less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least:g}, not {value}")
    return float(value)


def positive(name: str, value: object) -> float:
    """``value`` as a float.

    Raises:
        ConfigError: it is no finite number above 0.
    """
    number = at_least(name, value, 0.0)
    if number == 0.0:
        raise ConfigError(f"{name} must be more than 0")
    return number
