"""How finely a model is cut into units and state pieces, and which cuts there are to choose from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor, nn

from deepoffload.memory.arena import common_size
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.state import pieces_per_unit
from deepoffload.params.pager import Pager
from deepoffload.params.routed import has_experts
from deepoffload.params.unit import ParamHandle, StateFormat
from deepoffload.runtime.building import shares_of
from deepoffload.runtime.compute_types import ComputeTypes
from deepoffload.runtime.construct import Assembly
from deepoffload.runtime.draft import UnitDraft, draft_unit
from deepoffload.runtime.sizes import Sizer, UnitSizes
from deepoffload.runtime.unit_finder import RootUnits, UnitFinder

PIECES_PER_BUDGET = 14
"""A state piece takes about this part of the budget at most, so that small budgets have a ring, too."""

UNITS_PER_BUDGET = 8
"""A unit's weights take at most this part of the budget, where the model can be split so far."""

UNITS_PER_BUDGET_IN_INFERENCE = 5
"""The same where nothing is trained: no gradients and no state want memory, and fewer units cost less of the program's
time."""

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
class Division:
    """A model cut into units, for some limit of their bytes; the units' blocks are not made.

    Attributes:
        windows: names and modules whose calls open windows.
        outer: names and modules that were split.
        names: of the parameters that the drafts hold.
    """

    drafts: list[UnitDraft]
    windows: list[tuple[str, nn.Module]]
    outer: list[tuple[str, nn.Module]]
    names: list[tuple[ParamHandle, str]]

    @cached_property
    def typical_bytes(self) -> int | None:
        """Of the weights of most units, if there are such."""
        return common_size(draft.nbytes for draft in self.drafts)

    @cached_property
    def sizes_bytes(self) -> list[int]:
        """Weights of the units to which the size of pieces is fitted."""
        typical = self.typical_bytes
        return sorted({draft.nbytes for draft in self.drafts}) if typical is None else [typical]

    @cached_property
    def kind(self) -> Hashable:
        """What two divisions that are the same have in common."""
        return tuple(len(draft.handles) for draft in self.drafts), tuple(name for name, _ in self.windows)

    @cached_property
    def window_units(self) -> list[tuple[str, list[int]]]:
        """Each window's name, and the numbers of the drafts whose weights a call of its module takes."""
        number_of = {id(h.tensor): number for number, draft in enumerate(self.drafts) for h in draft.handles}
        return [
            (name, list(dict.fromkeys(number_of[id(p)] for p in module.parameters() if id(p) in number_of)))
            for name, module in self.windows
        ]


@dataclass(frozen=True)
class Cut:
    """A model cut into units and pieces of state as a budget of ``grain_bytes`` suggests."""

    grain_bytes: int
    division: Division

    @property
    def piece_bytes(self) -> int:
        """About the most that a piece of optimizer state may take."""
        return self.grain_bytes // PIECES_PER_BUDGET


def _target_nbytes(types: ComputeTypes, param: Tensor) -> int:
    """Bytes of a parameter in the dtype it will compute in."""
    return param.numel() * types.of(param).itemsize


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
        self.types = types
        self._format = state_format
        self._handles = handles
        # No method of this object: a cycle would keep the model alive until garbage is collected.
        nbytes = partial(_target_nbytes, types)
        self._units_per_budget = UNITS_PER_BUDGET_IN_INFERENCE if pager.inference else UNITS_PER_BUDGET
        apart = has_experts if pager.inference else None
        self._finders = [UnitFinder(root, nbytes, apart) for root in roots]
        self._divisions: dict[tuple[int, ...], Division] = {}

    @property
    def num_walks(self) -> int:
        """How often the modules of the models were walked through."""
        return sum(finder.num_walks for finder in self._finders)

    def sizes(self, cut: Cut, capacity_bytes: int) -> list[UnitSizes]:
        """Of the blocks that each draft of ``cut`` would have. ``capacity_bytes``: of the memory in which the model is
        built."""
        link, shares = self._pager.link, 1
        if link is not None and link.exchange is not None:
            shares = shares_of([handle.nbytes for handle in self._handles], capacity_bytes, link.ranks.world_size)
        sizer = Sizer(self._gradients, cut.piece_bytes, self._format, cut.division.typical_bytes, shares)
        return [sizer.sizes(draft) for draft in cut.division.drafts]

    def declare(self, cut: Cut) -> Assembly:
        """Declare the blocks of a cut's units, which have no bytes yet."""
        assembly = Assembly(self._pager, self._gradients, cut.piece_bytes, self.types, self._format)
        assembly.typical_bytes = cut.division.typical_bytes
        for handle, name in cut.division.names:
            handle.name = name
        for draft in cut.division.drafts:
            assembly.make(draft)
        return assembly

    def cuts(self, capacity_bytes: int) -> Iterator[Cut]:
        """All cuts that differ, the one that suits ``capacity_bytes`` first, then finer ones, then coarser ones."""
        seen: set[Hashable] = set()
        for grain_bytes in self._grains(capacity_bytes):
            cut = Cut(grain_bytes, self._division(grain_bytes // self._units_per_budget))
            pieces = tuple(pieces_per_unit(size, cut.piece_bytes) for size in cut.division.sizes_bytes)
            kind = cut.division.kind, pieces
            if kind not in seen:
                seen.add(kind)
                yield cut

    def _grains(self, capacity_bytes: int) -> Iterator[int]:
        """The same ones for every capacity, in another order. None is below what the largest parameter alone takes,
        which every budget must hold; from the largest one on all cuts are alike."""
        params = [handle.tensor for handle in self._handles]
        sizes = [_target_nbytes(self.types, param) for param in params if param is not None]
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

    def _division(self, max_unit_bytes: int) -> Division:
        key = tuple(finder.step(max_unit_bytes) for finder in self._finders)
        if key not in self._divisions:
            self._divisions[key] = self._divided([finder.find(max_unit_bytes) for finder in self._finders])
        return self._divisions[key]

    def _divided(self, every: Sequence[RootUnits]) -> Division:
        by_tensor = {id(handle.tensor): handle for handle in self._handles}
        division = Division([], [], [], [])
        drafted: set[int] = set()
        for found in every:
            division.windows.extend(found.windows)
            division.outer.extend(found.outer)
            for unit in found.units:
                mine = []
                for name, param in unit.params:
                    handle = by_tensor.get(id(param))
                    if handle is not None and id(handle) not in drafted:
                        division.names.append((handle, name))
                        drafted.add(id(handle))
                        mine.append(handle)
                if mine:
                    division.drafts.append(draft_unit(self._pager, self.types, unit.name, mine))
        for handle in self._handles:  # registered somewhere, alive, but in no module that is left
            if id(handle) not in drafted:
                division.drafts.append(draft_unit(self._pager, self.types, handle.name, [handle]))
        return division
