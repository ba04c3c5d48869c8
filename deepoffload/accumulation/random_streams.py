"""One stream of random numbers for each micro-batch, the same in every order of accumulation.

Before the first forward one seed for each micro-batch is drawn from torch's CPU generator. A micro-batch that runs has
its own streams in the place of that generator and of the device's. In the end the CPU's generator stands where the
drawing of the seeds has left it, and the device's as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_SEEDS = (1 << 63) - 1


class _OfHost:
    """torch's CPU generator."""

    def seeded(self, seed: int) -> Tensor:
        """What the generator holds when it has this seed."""
        return torch.Generator().manual_seed(seed).get_state()

    def read(self) -> Tensor:
        return torch.default_generator.get_state()

    def write(self, state: Tensor) -> None:
        torch.default_generator.set_state(state)


class _OfDevice:
    """The generator of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def seeded(self, seed: int) -> Tensor:
        """What the generator holds when it has this seed."""
        before = self.read()
        try:
            with self._module.device(self._device):
                self._module.manual_seed(seed)
            return self.read()
        finally:
            self.write(before)

    def read(self) -> Tensor:
        found: Tensor = self._module.get_rng_state(self._device)
        return found

    def write(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self._device)


def _has_generator(device: torch.device) -> bool:
    """Whether each device of its kind has a generator, as ``torch.cuda`` offers them."""
    module = getattr(torch, device.type, None)
    return device.type != "cpu" and hasattr(module, "set_rng_state") and hasattr(module, "device")


class RandomStreams:
    """The streams of ``count`` micro-batches, and which of them the program draws from now.

    Args:
        device: that computes.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._generators: list[_OfHost | _OfDevice] = [_OfHost()]
        if _has_generator(device):
            self._generators.append(_OfDevice(device))
        seeds = torch.randint(_SEEDS, (count,), device="cpu").tolist()
        self._states = [[generator.seeded(seed) for generator in self._generators] for seed in seeds]
        self._program = self._read()
        self._current: int | None = None

    def _read(self) -> list[Tensor]:
        return [generator.read() for generator in self._generators]

    def switch(self, number: int | None) -> None:
        """From now on random numbers come from the streams of micro-batch ``number``; None: from the program's."""
        if number == self._current:
            return
        if self._current is not None:
            self._states[self._current] = self._read()
        states = self._program if number is None else self._states[number]
        for generator, state in zip(self._generators, states, strict=True):
            generator.write(state)
        self._current = number

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """The streams of one micro-batch for a while."""
        self.switch(number)
        try:
            yield
        finally:
            self.switch(None)
