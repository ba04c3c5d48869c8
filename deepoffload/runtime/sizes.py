"""Sizes of the blocks that a drafted unit will have, without the blocks: equal ones are counted, not made.

A model with a hundred thousand pieces of optimizer state is cut and placed in several ways before one is chosen.
Only the blocks of that one are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepoffload.native.aio import round_up
from deepoffload.native.cpu_adam import StateLayout
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.state import LAYOUTS, equal_rooms, piece_runs
from deepoffload.params.layout import byte_offsets
from deepoffload.params.unit import StateFormat
from deepoffload.runtime.construct import UnitDraft, alignment_numel, fills_state
from deepoffload.schedule.cost_model import BlockKind


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """``count`` blocks of a unit: what each stores, and the room that it takes in memory."""

    kind: BlockKind
    nbytes: int
    room_bytes: int
    count: int


@dataclass(frozen=True)
class UnitSizes:
    """Blocks of a unit in the order in which they are made: weights, gradients, pieces of state.

    set_up_bytes: what must be in memory at once while the unit is filled, and everything else can leave.
    set_up_peak_bytes, set_up_net_bytes: by how much the memory in use grows at most, and until the end, while the unit
    is filled and nothing can leave.
    """

    blocks: tuple[BlockSizes, ...]
    set_up_bytes: int
    set_up_peak_bytes: int
    set_up_net_bytes: int

    def room_bytes(self, kind: BlockKind) -> int:
        """Of all its blocks of a kind."""
        return sum(block.room_bytes * block.count for block in self.blocks if block.kind is kind)


class Sizer:
    """Works out :class:`UnitSizes`; units of the same shapes share one answer.

    Args:
        piece_bytes, typical_bytes: as of :class:`~deepoffload.runtime.construct.Assembly`.
    """

    def __init__(
        self, gradients: Gradients, piece_bytes: int, state_format: StateFormat, typical_bytes: int | None
    ) -> None:
        self._gradients = gradients
        self._piece_bytes = piece_bytes
        self._format = state_format
        self._typical_bytes = typical_bytes
        self._alignment_numel = alignment_numel(state_format)
        self._known: dict[object, UnitSizes] = {}

    def sizes(self, draft: UnitDraft) -> UnitSizes:
        trained = {id(handle) for handle, _ in draft.trained}
        pairs = zip(draft.handles, draft.dtypes, strict=True)
        key = tuple((handle.numel, handle.dtype, dtype, id(handle) in trained) for handle, dtype in pairs)
        if key not in self._known:
            self._known[key] = self._sizes(draft)
        return self._known[key]

    def _sizes(self, draft: UnitDraft) -> UnitSizes:
        trained = [(handle.numel, dtype) for handle, dtype in draft.trained]
        sorts = [(BlockKind.WEIGHT, draft.nbytes, 1)]
        runs: list[tuple[StateLayout, int, int, int]] = []
        if trained:
            landing = self._gradients.landing_dtype
            _, nbytes = byte_offsets([numel * landing(dtype).itemsize for numel, dtype in trained])
            sorts.append((BlockKind.GRADIENT, nbytes, 1))
            like = draft.nbytes if self._typical_bytes is None else self._typical_bytes
            runs = list(piece_runs(trained, like, self._piece_bytes, self._format, self._alignment_numel))
            sorts += [(BlockKind.STATE, nbytes, count) for _, _, nbytes, count in runs]
        rooms = {nbytes: round_up(nbytes) for _, nbytes, _ in sorts}
        if trained:
            rooms = equal_rooms(rooms.items())
        blocks = tuple(BlockSizes(kind, nbytes, rooms[nbytes], count) for kind, nbytes, count in sorts)
        largest = max(handle.nbytes for handle in draft.handles)
        piece = max((rooms[nbytes] for _, _, nbytes, _ in runs), default=0)
        pieces: dict[StateLayout, list[tuple[int, int, int]]] = {}
        for layout, numel, nbytes, count in runs:
            pieces.setdefault(layout, []).append((numel, rooms[nbytes], count))
        used = peak = 0
        for change in self._set_up_changes(draft, rooms[draft.nbytes], pieces):
            used += change
            peak = max(peak, used)
        return UnitSizes(blocks, rooms[draft.nbytes] + round_up(largest) + piece, peak, used)

    def _set_up_changes(
        self, draft: UnitDraft, weight_room_bytes: int, pieces: dict[StateLayout, list[tuple[int, int, int]]]
    ) -> Iterator[int]:
        """By how many bytes the memory in use changes, in order. ``pieces``: elements, room and number of the full
        ones, and of the rest, by layout."""
        yield weight_room_bytes
        trained = {id(handle) for handle, _ in draft.trained}
        filled = dict.fromkeys(pieces, 0)  # elements of a layout's state that belong to the parameters before
        made: set[tuple[StateLayout, int]] = set()
        for handle, dtype in zip(draft.handles, draft.dtypes, strict=True):
            held = round_up(handle.nbytes)
            if id(handle) in trained:
                layout = LAYOUTS[dtype]
                (numel, _, full), *_ = pieces[layout]
                begin = filled[layout]
                filled[layout] = begin + round_up(handle.numel, self._alignment_numel)
                last = (begin + handle.numel - 1) // numel
                for number in range(last, begin // numel - 1, -1) if fills_state(handle, dtype) else ():
                    if (layout, number) not in made:
                        made.add((layout, number))
                        yield pieces[layout][0 if number < full else -1][1]
                    left = round_up(max((number * numel - begin) * handle.itemsize, 1))
                    yield left - held
                    held = left
            yield -held
