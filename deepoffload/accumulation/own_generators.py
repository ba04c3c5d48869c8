"""Random numbers that a call draws from other generators than torch's own ones: Python's, NumPy's, and those that
modules hold. A second run of the call draws the same again, and leaves the generators where they stood."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from deepoffload.params.torch_private import outside_user_modes


class _Kept:
    """One generator, and where it stood."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._read, self._write = read, write
        self._then = read()

    def has_moved(self) -> bool:
        return bool(self._read() != self._then)

    def lend(self) -> Callable[[], object]:
        """The generator stands there again. Returns what takes that back."""
        now = self._read()
        self._write(self._then)
        return lambda: self._write(now)


class OwnGenerators:
    """From the begin of a call on. Few calls draw such numbers: of the others nothing is kept after their end.

    A ``torch.Generator`` that no module of the call has as an attribute is not seen.
    """

    def __init__(self, module: nn.Module) -> None:
        held = {id(each): each for part in module.modules() for each in vars(part).values() if _is_generator(each)}
        with outside_user_modes():
            self._kept = [_Kept(random.getstate, random.setstate), _Kept(_state_of_numpy, _move_numpy)]
            self._kept += [_Kept(partial(_state_of, each), partial(_move, each)) for each in held.values()]

    def forget_unused(self) -> None:
        """The call is over: keep where those stood that it has drawn from."""
        with outside_user_modes():
            self._kept = [kept for kept in self._kept if kept.has_moved()]

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """They stand where they stood before the call."""
        with outside_user_modes():
            back = [kept.lend() for kept in self._kept]
        try:
            yield
        finally:
            with outside_user_modes():
                for each in back:
                    each()


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


def _state_of_numpy() -> bytes:
    """As bytes, which ``==`` compares for each kind of generator."""
    return pickle.dumps(np.random.get_state(legacy=False))


def _move_numpy(state: bytes) -> None:
    np.random.set_state(pickle.loads(state))


def _state_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _move(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
