"""What a value of a state dict is of: a weight, or an array of optimizer state."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class View(NamedTuple):
    """Which part of its source's memory a value shows, and how."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    offset: int


class ValueSource(abc.ABC):
    """What a value, with all views of it, is of.

    Attributes:
        name: for messages.
        shape, dtype, stride, numel: how it lies in memory, without gaps.
        stand_in: shows as much without bytes.
    """

    __slots__ = ("name", "shape", "dtype", "stride", "numel", "stand_in", "__weakref__")

    def __init__(self, name: str, stride: Sequence[int], stand_in: Tensor) -> None:
        self.name = name
        self.shape = stand_in.shape
        self.dtype = stand_in.dtype
        self.stride = tuple(stride)
        self.numel = stand_in.numel()
        self.stand_in = stand_in

    @property
    def key(self) -> object:
        """What tied values share."""
        return self

    @abc.abstractmethod
    def mapped(self) -> Tensor:
        """An ordinary tensor at an address that stays, with the values of now."""

    @abc.abstractmethod
    def operand(self, view: View, *, bare: bool, escapes: bool) -> Tensor:
        """What takes the place of a value in one operation.

        Args:
            bare: the operation hands out no alias and has no graph. escapes: it hands out memory to write to.
        """

    def used(self) -> None:  # noqa: B027
        """The operation has ended."""

    @abc.abstractmethod
    def clone(self) -> Tensor:
        """An ordinary copy, in memory."""

    def parameter(self, value: Tensor, view: View) -> nn.Parameter:
        """``nn.Parameter(value)``."""
        return nn.Parameter(value.clone())

    def whole(self) -> View:
        """It as it is."""
        return View(self.shape, self.dtype, self.stride, 0)


def view_of(whole: Tensor, source: ValueSource, view: View) -> Tensor:
    """The part of an ordinary tensor, which lies as ``source`` does, that ``view`` shows."""
    if view.dtype is not source.dtype:
        whole = whole.as_strided((source.numel,), (1,), 0).view(view.dtype)
    elif view == source.whole():
        return whole
    return whole.as_strided(view.shape, view.stride, view.offset)
