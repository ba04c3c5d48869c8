"""One stream of random numbers for each micro-batch, the same in every order of accumulation.

Before the first forward one seed for each micro-batch is drawn from torch's CPU generator. A micro-batch that runs has
its own stream in that generator's place. In the end the generator stands where the drawing of the seeds has left it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_SEEDS = (1 << 63) - 1


class RandomStreams:
    """The streams of ``count`` micro-batches, and which of them the program draws from now."""

    def __init__(self, count: int) -> None:
        seeds = torch.randint(_SEEDS, (count,), device="cpu").tolist()
        self._states: list[Tensor] = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self._program = torch.default_generator.get_state()
        self._current: int | None = None

    def switch(self, number: int | None) -> None:
        """From now on random numbers come from the stream of micro-batch ``number``; None: from the program's."""
        if number == self._current:
            return
        if self._current is not None:
            self._states[self._current] = torch.default_generator.get_state()
        torch.default_generator.set_state(self._program if number is None else self._states[number])
        self._current = number

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """The stream of one micro-batch for a while."""
        self.switch(number)
        try:
            yield
        finally:
            self.switch(None)
