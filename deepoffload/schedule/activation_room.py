"""Whether memory has room for the activations of several micro-batches at once, as far as it was measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

SHARE = 0.5
"""So much of the memory that is free may be taken: other things of a step come and go, too."""


class ActivationRoom:
    """Nothing is known before the first call that measures. What memory allows is found out once, in the next call,
    when weights and optimizer have what they need.

    Attributes:
        micro_batch_bytes: that the activations of one micro-batch have taken at most; None before one was measured.
        allowed_bytes: that activations may take; None before it was found out.
        edited: windows of modules whose arguments the program edits in place when they have run: they cannot run again.
    """

    def __init__(self) -> None:
        self.micro_batch_bytes: int | None = None
        self.allowed_bytes: int | None = None
        self.edited: weakref.WeakSet[Any] = weakref.WeakSet()

    def measured(self, micro_batch_bytes: int) -> None:
        """The activations of one micro-batch take so much."""
        self.micro_batch_bytes = max(self.micro_batch_bytes or 0, micro_batch_bytes)

    def holds(self, count: int, free_bytes: Callable[[], int]) -> bool | None:
        """Whether memory has room for the activations of ``count`` micro-batches; None where nothing is known yet."""
        if self.micro_batch_bytes is None:
            return None
        if self.allowed_bytes is None:
            self.allowed_bytes = max(0, int(SHARE * free_bytes()))
        return count * self.micro_batch_bytes <= self.allowed_bytes
