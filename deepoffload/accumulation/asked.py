"""What a call may ask for in the place of the configuration."""

from __future__ import annotations

import enum
from typing import TypeVar

from deepoffload.errors import UsageError

Choice = TypeVar("Choice", bound=enum.Enum)


def choose(
    kind: type[Choice], argument: str, asked: str | None, configured: Choice, call: str = "accumulate"
) -> Choice:
    """The member of ``kind`` that a call asks for, or else the configured one.

    Raises:
        UsageError: there is no such member.
    """
    if asked is None:
        return configured
    try:
        return kind(asked)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise UsageError(f"{call}({argument}={asked!r}): there are {known}") from None
