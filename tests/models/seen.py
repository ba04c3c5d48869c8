"""Whether what a program showed on a paged model is what it shows on a plain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepoffload.errors import DeepOffloadError
from tests.models.matrix import Close, Feature, Refused
from tests.models.programs import Subject
from tests.support.loops import assert_same_bits


@dataclass
class Seen:
    """What a program on a paged model returned or raised."""

    value: Any = None
    error: DeepOffloadError | None = None


def look(feature: Feature, subject: Subject) -> Seen:
    try:
        return Seen(feature.program(subject))
    except DeepOffloadError as error:
        error.__traceback__ = None  # its frames hold the program's tensors
        return Seen(error=error)


def wrong(expected: Any, seen: Seen, wanted: Close | Refused | None) -> str:
    """Empty when the outcome is the wanted one."""
    if isinstance(wanted, Refused) and (wanted.always or seen.error is not None):
        if seen.error is None:
            return "should be refused"
        fits = isinstance(seen.error, wanted.error) and wanted.message in str(seen.error)
        return "" if fits else f"another refusal: {seen.error!r}"
    if seen.error is not None:
        return repr(seen.error)
    try:
        if isinstance(wanted, Close):
            torch.testing.assert_close(seen.value, expected, rtol=wanted.relative, atol=wanted.relative)
        else:
            assert_same_bits(expected, seen.value)
    except AssertionError as error:
        return str(error)
    return ""
