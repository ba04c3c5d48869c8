"""A tensor that lies in parts: what ``state_dict()`` shows of a layer whose weight is split.

Its values have no bytes. An operation on one puts those parts together that it looks at, and what it
writes goes back to them.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepoffload.params.pager import Pager
from deepoffload.params.slot import make_stand_in
from deepoffload.params.state_dict_values import lazy_value, source_of
from deepoffload.params.torch_private import outside_user_modes, version_of
from deepoffload.params.unit import ParamHandle
from deepoffload.params.value_source import ValueSource, View

_REMEDY = "torch.save and safetensors need room for a copy of the weights where the swap files are (else in TMPDIR)"


class JoinedSource(ValueSource):
    """Parts, one behind the other along the first dimension.

    Args:
        with_graph: operations are recorded for backward, as those on a parameter are.
    """

    __slots__ = ("parts", "_ends", "_with_graph", "_shown", "_version", "_mapped")

    def __init__(self, name: str, parts: Sequence[Tensor], *, with_graph: bool = False) -> None:
        first = parts[0]
        shape = torch.Size((sum(part.shape[0] for part in parts), *first.shape[1:]))
        like = torch.empty(shape, dtype=first.dtype, device="meta")
        stand_in = like if first.is_meta else make_stand_in(shape, first.dtype, first.device)
        super().__init__(name, like.stride(), stand_in)
        self.parts = tuple(parts)
        self._ends = list(itertools.accumulate(part.numel() for part in parts))
        self._with_graph = with_graph
        self._shown: tuple[Tensor, slice] | None = None
        self._version = 0
        self._mapped: Tensor | None = None

    @property
    def key(self) -> object:
        return self.parts[0]

    def operand(self, view: View, *, bare: bool, escapes: bool) -> Tensor:
        parts = self._seen_by(view)
        with torch.set_grad_enabled(self._with_graph and torch.is_grad_enabled()):
            whole = torch.cat([part if self._with_graph else part.detach() for part in self.parts[parts]])
        self._shown, self._version = (whole, parts), version_of(whole)
        return self._of(whole, view, parts)

    def used(self) -> None:
        shown, self._shown = self._shown, None
        if shown is None or version_of(shown[0]) == self._version:
            return
        whole, parts = shown
        pieces = whole.detach().split([part.shape[0] for part in self.parts[parts]])
        with torch.no_grad():
            for part, piece in zip(self.parts[parts], pieces, strict=True):
                part.copy_(piece)

    def mapped(self) -> Tensor:
        """It follows later changes of the parts only when asked for again."""
        if self._mapped is None:
            self._mapped = self._room()
        pieces = self._mapped.split([part.shape[0] for part in self.parts])
        with torch.no_grad():
            for part, piece in zip(self.parts, pieces, strict=True):
                piece.copy_(part.detach())
        return self._mapped

    def clone(self) -> Tensor:
        with torch.no_grad():
            return torch.cat([part.detach() for part in self.parts])

    def _room(self) -> Tensor:
        """Memory for all of it: of a mapped file, where the parts are paged and there is a disk."""
        slot = self.parts[0].__dict__.get("_slot")
        if not isinstance(slot, ParamHandle) or slot.pager.tiers.space is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.stand_in.device)
        pager: Any = slot.pager
        assert isinstance(pager, Pager)
        nbytes = max(self.numel * self.dtype.itemsize, mmap.PAGESIZE)
        with pager.lock, outside_user_modes():
            copies = pager.mapped_copies
            copies.give_room_back()
            (place,) = copies.places([nbytes], self.name, _REMEDY)
            memory = copies.memory(place, pager.lock, self.name, _REMEDY)
            return torch.frombuffer(memory, dtype=self.dtype, count=self.numel).view(self.shape)

    def _seen_by(self, view: View) -> slice:
        """The parts in which elements of ``view`` lie."""
        size = self.dtype.itemsize
        first = view.offset * view.dtype.itemsize // size
        span = sum((length - 1) * step for length, step in zip(view.shape, view.stride, strict=True)) + 1
        last = -(-(view.offset + span) * view.dtype.itemsize // size)
        begin = next((i for i, end in enumerate(self._ends) if first < end), len(self._ends) - 1)
        stop = next((i for i, end in enumerate(self._ends) if last <= end), len(self._ends) - 1)
        return slice(begin, max(begin, stop) + 1)

    def _of(self, whole: Tensor, view: View, parts: slice) -> Tensor:
        """``view``, of some of the parts."""
        missing = self._ends[parts.start - 1] if parts.start else 0
        if view == self.whole():
            return whole
        if view.dtype is not self.dtype:
            whole = whole.view(-1).view(view.dtype)
            missing = missing * self.dtype.itemsize // view.dtype.itemsize
        return whole.as_strided(view.shape, view.stride, view.offset - missing)


def joined(name: str, parts: Sequence[Tensor], *, with_graph: bool = False) -> Tensor:
    """A value for all of ``parts`` together, along their first dimension."""
    return lazy_value(JoinedSource(name, parts, with_graph=with_graph))


def parts_of(value: object) -> tuple[Tensor, ...] | None:
    """The parts of a value that :func:`joined` has made; None for everything else."""
    source = source_of(value)
    return source.parts if isinstance(source, JoinedSource) else None
