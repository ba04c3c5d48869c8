"""How finely a model is cut into units and state pieces, and which cuts there are to choose from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from deepoffload.memory.arena import common_size
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.state import pieces_per_unit
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, StateFormat
from deepoffload.runtime.compute_types import ComputeTypes
from deepoffload.runtime.construct import Assembly, UnitDraft
from deepoffload.runtime.unit_finder import find_units

PIECES_PER_BUDGET = 14
"""A state piece takes about this part of the budget at most, so that small budgets have a ring, too."""

UNITS_PER_BUDGET = 8
"""A unit's weights take at most this part of the budget, where the model can be split so far."""

GRAINS_PER_OCTAVE = 8
"""There are so many grains between a budget and twice as much. Models are cut as for one of them, so that cuts are few,
and the same ones for each budget."""


def grain_below(nbytes: int) -> int:
    """The largest grain that is not above ``nbytes``; grains are 8, 9, ... 15 times a power of two, from a page on."""
    shift = max(nbytes.bit_length() - GRAINS_PER_OCTAVE.bit_length(), 0)
    return max(nbytes >> shift << shift, PAGE_BYTES)


def grain_above(grain_bytes: int) -> int:
    """The next larger grain."""
    return grain_bytes + (1 << (grain_bytes.bit_length() - GRAINS_PER_OCTAVE.bit_length()))


@dataclass(frozen=True)
class Cut:
    """A model cut into units as a budget of ``grain_bytes`` suggests.

    Attributes:
        windows: names and modules whose calls open windows.
        outer: names and modules that were split.
    """

    grain_bytes: int
    assembly: Assembly
    drafts: list[UnitDraft]
    windows: list[tuple[str, nn.Module]]
    outer: list[tuple[str, nn.Module]]

    def declare(self) -> None:
        """Declare the units' blocks, which have no bytes yet."""
        for draft in self.drafts:
            self.assembly.make(draft)

    def take_back(self) -> None:
        """Undo :meth:`declare`."""
        for draft in self.drafts:
            self.assembly.discard(draft)


class Cutter:
    """Cuts one model in different ways.

    Args:
        types: what the parameters compute in.
        roots: the models.
        handles: of all parameters that are paged; each one outside of ``roots`` becomes a separate unit.
    """

    def __init__(
        self,
        pager: Pager,
        gradients: Gradients,
        types: ComputeTypes,
        state_format: StateFormat,
        roots: Sequence[nn.Module],
        handles: list[ParamHandle],
    ) -> None:
        self._pager = pager
        self._gradients = gradients
        self._types = types
        self._format = state_format
        self._roots = roots
        self._handles = handles

    def cuts(self, capacity_bytes: int) -> Iterator[Cut]:
        """All cuts that differ, the one that suits ``capacity_bytes`` first, then finer ones, then coarser ones."""
        seen: set[Hashable] = set()
        for grain_bytes in self._grains(capacity_bytes):
            cut = self._cut(grain_bytes)
            kind = _kind(cut)
            if kind not in seen:
                seen.add(kind)
                yield cut

    def _grains(self, capacity_bytes: int) -> Iterator[int]:
        """The same ones for every capacity, in another order. None is below what the largest parameter alone takes,
        which every budget must hold; from the largest one on all cuts are alike."""
        params = [handle.tensor for handle in self._handles]
        sizes = [param.numel() * self._types.of(param).itemsize for param in params if param is not None]
        least = grain_below(max(sizes, default=0))
        most = max(least, grain_below(2 * PIECES_PER_BUDGET * sum(sizes)))
        first = min(max(grain_below(capacity_bytes), least), most)
        grain = first
        while True:
            yield grain
            if grain <= least:
                break
            grain = grain_below(grain - 1)
        grain = grain_above(first)
        while grain <= most:
            yield grain
            grain = grain_above(grain)

    def _cut(self, grain_bytes: int) -> Cut:
        assembly = Assembly(self._pager, self._gradients, grain_bytes // PIECES_PER_BUDGET, self._types, self._format)
        by_tensor = {id(handle.tensor): handle for handle in self._handles}
        cut = Cut(grain_bytes, assembly, [], [], [])
        drafted: set[int] = set()
        for root in self._roots:
            found = find_units(root, grain_bytes // UNITS_PER_BUDGET, assembly.target_nbytes)
            cut.windows.extend(found.windows)
            cut.outer.extend(found.outer)
            for unit in found.units:
                mine = []
                for name, param in unit.params:
                    handle = by_tensor.get(id(param))
                    if handle is not None and id(handle) not in drafted:
                        handle.name = name
                        drafted.add(id(handle))
                        mine.append(handle)
                if mine:
                    cut.drafts.append(assembly.draft(unit.name, mine))
        for handle in self._handles:  # registered somewhere, alive, but in no module that is left
            if id(handle) not in drafted:
                cut.drafts.append(assembly.draft(handle.name, [handle]))
        assembly.typical_bytes = common_size(draft.nbytes for draft in cut.drafts)
        return cut


def _kind(cut: Cut) -> Hashable:
    """What two cuts that are the same have in common."""
    typical, limit_bytes = cut.assembly.typical_bytes, cut.assembly.piece_bytes
    sizes = sorted({draft.nbytes for draft in cut.drafts}) if typical is None else [typical]
    units = tuple(len(draft.handles) for draft in cut.drafts)
    windows = tuple(name for name, _ in cut.windows)
    return units, windows, tuple(pieces_per_unit(size, limit_bytes) for size in sizes)
