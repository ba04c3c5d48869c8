"""Whether memory has room for the activations of several micro-batches at once, as far as it was measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

SHARE = 0.5
"""So much of the memory that is free may be taken: other things of a step come and go, too."""
COUNTED_EVERY = 16
"""In each such call of ``accumulate`` all is counted again: the program may have changed a setting of a layer."""
_KNOWN_MAX = 64
"""So many different things that a unit was called with are remembered."""


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
        self._calls = 0
        self._known: weakref.WeakKeyDictionary[Any, dict[Hashable, int]] = weakref.WeakKeyDictionary()

    def begin_call(self) -> None:
        """The first micro-batch of another call of ``accumulate`` comes."""
        if self._calls % COUNTED_EVERY == 0:
            self._known.clear()
        self._calls += 1

    def known(self, window: object, given: Hashable) -> int | None:
        """How many bytes a call of a window's module has kept that was given the same; None where none was counted."""
        return self._known.get(window, {}).get(given)

    def counted(self, window: object, given: Hashable, nbytes: int) -> None:
        """A call of a window's module has kept so much."""
        of_window = self._known.setdefault(window, {})
        if len(of_window) >= _KNOWN_MAX:
            of_window.clear()
        of_window[given] = max(nbytes, of_window.get(given, 0))

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
