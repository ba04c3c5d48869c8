"""Sizes of the blocks that a drafted unit will have, without the blocks: equal ones are counted, not made.

A model with a hundred thousand pieces of optimizer state is cut and placed in several ways before one is chosen.
Only the blocks of that one are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from deepoffload.native.aio import round_up
from deepoffload.native.cpu_adam import StateLayout
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.state import LAYOUTS, equal_rooms, piece_runs
from deepoffload.params.layout import byte_offsets
from deepoffload.params.shards import ShardLayout
from deepoffload.params.unit import ParamHandle, StateFormat
from deepoffload.runtime.building import is_cut, kept_bytes
from deepoffload.runtime.construct import fills_state
from deepoffload.runtime.draft import UnitDraft, alignment_numel
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

    With several ranks these are the same on each: of what one rank stores, and the most that any needs for the set-up.

    registered_bytes: what its parameters take before it is filled.
    set_up_bytes: what must be in memory at once while the unit is filled, and everything else can leave.
    set_up_peak_bytes, set_up_net_bytes: by how much the memory in use grows at most, and until the end, while the unit
    is filled and nothing can leave.
    whole_weight_bytes, whole_gradient_bytes: the room of a copy of all weights, and of all gradients.
    backed: the weights are read from a checkpoint, and take no room on NVMe.
    """

    blocks: tuple[BlockSizes, ...]
    registered_bytes: int
    set_up_bytes: int
    set_up_peak_bytes: int
    set_up_net_bytes: int
    whole_weight_bytes: int
    whole_gradient_bytes: int
    backed: bool = False

    def room_bytes(self, kind: BlockKind) -> int:
        """Of all its blocks of a kind."""
        return sum(block.room_bytes * block.count for block in self.blocks if block.kind is kind)


class Sizer:
    """Works out :class:`UnitSizes`; units of the same shapes share one answer.

    Args:
        piece_bytes, typical_bytes: as of :class:`~deepoffload.runtime.construct.Assembly`.
        shares: in how many parts ranks keep what is registered; 1 where it is whole.
    """

    def __init__(
        self, gradients: Gradients, piece_bytes: int, state_format: StateFormat, typical_bytes: int | None, shares: int
    ) -> None:
        self._shares = shares
        self._gradients = gradients
        self._piece_bytes = piece_bytes
        self._format = state_format
        self._typical_bytes = typical_bytes
        self._alignment_numel = alignment_numel(state_format)
        self._known: dict[object, UnitSizes] = {}

    def sizes(self, draft: UnitDraft) -> UnitSizes:
        trained = {id(handle) for handle, _ in draft.trained}
        pairs = zip(draft.handles, draft.dtypes, strict=True)
        tensors = tuple(
            (handle.numel, handle.dtype, dtype, id(handle) in trained, self._parts_of(handle))
            for handle, dtype in pairs
        )
        key = (tensors, draft.nbytes, draft.backing is not None)
        if key not in self._known:
            self._known[key] = self._sizes(draft)
        return self._known[key]

    def _sizes(self, draft: UnitDraft) -> UnitSizes:
        sorts = [(BlockKind.WEIGHT, draft.nbytes, 1)]
        runs: list[tuple[StateLayout, int, int, int]] = []
        if draft.trained:
            sorts.append((BlockKind.GRADIENT, self._gradient_nbytes(draft), 1))
            like = draft.nbytes if self._typical_bytes is None else self._typical_bytes
            ranges = [(numel, dtype) for dtype, numel in draft.range_numels().items()]
            numels = ranges or [(handle.numel, dtype) for handle, dtype in draft.trained]
            runs = list(piece_runs(numels, like, self._piece_bytes, self._format, self._alignment_numel))
            sorts += [(BlockKind.STATE, nbytes, count) for _, _, nbytes, count in runs]
        rooms = {nbytes: round_up(nbytes) for _, nbytes, _ in sorts}
        if draft.trained:
            rooms = equal_rooms(rooms.items())
        backed = draft.backing is not None
        blocks = tuple(BlockSizes(kind, nbytes, rooms[nbytes], count) for kind, nbytes, count in sorts)
        largest = max(handle.nbytes for handle in draft.handles)
        piece = max((rooms[nbytes] for _, _, nbytes, _ in runs), default=0)
        pieces: dict[StateLayout, list[tuple[int, int, int]]] = {}
        for layout, numel, nbytes, count in runs:
            pieces.setdefault(layout, []).append((numel, rooms[nbytes], count))
        used: list[list[int]] = []
        for rank in range(1 if draft.layout is None else draft.layout.world_size):
            used.append(list(accumulate(self._set_up_changes(draft, rank, rooms[draft.nbytes], pieces), initial=0)))
        return UnitSizes(
            blocks,
            registered_bytes=sum(kept_bytes(handle.nbytes, self._parts_of(handle)) for handle in draft.handles),
            set_up_bytes=rooms[draft.nbytes] + (0 if backed else self._whole_bytes(largest) + piece),
            set_up_peak_bytes=max(map(max, used)),
            set_up_net_bytes=max(changes[-1] for changes in used),
            whole_weight_bytes=_copy_bytes(draft.layout, blocks, BlockKind.WEIGHT),
            whole_gradient_bytes=_copy_bytes(draft.gradient_layout, blocks, BlockKind.GRADIENT),
            backed=backed,
        )

    def _parts_of(self, handle: ParamHandle) -> int:
        """What is built on a device stays whole. One that is only planned for is on the meta device."""
        return self._shares if handle.device.type in ("cpu", "meta") else 1

    def _kept_bytes(self, nbytes: int) -> int:
        """Of a parameter before it comes to its unit."""
        return kept_bytes(nbytes, self._shares)

    def _whole_bytes(self, nbytes: int) -> int:
        """Of one that is on its way there."""
        return round_up(nbytes) + (self._kept_bytes(nbytes) if is_cut(nbytes, self._shares) else 0)

    def _gradient_nbytes(self, draft: UnitDraft) -> int:
        if draft.gradient_layout is not None:
            return draft.gradient_layout.shard_nbytes
        landing = self._gradients.landing_dtype
        return byte_offsets([handle.numel * landing(dtype).itemsize for handle, dtype in draft.trained])[1]

    def _set_up_changes(
        self, draft: UnitDraft, rank: int, weight_room_bytes: int, pieces: dict[StateLayout, list[tuple[int, int, int]]]
    ) -> Iterator[int]:
        """By how many bytes the memory of a rank in use changes, in order. ``pieces``: elements, room and number of the
        full ones, and of the rest, by layout."""
        yield weight_room_bytes
        trained = {id(handle) for handle, _ in draft.trained}
        filled = dict.fromkeys(pieces, 0)  # elements of a layout's state that belong to the parameters before
        made: set[tuple[StateLayout, int]] = set()
        parts = 0  # they are kept until the unit is full
        for index, (handle, dtype) in enumerate(zip(draft.handles, draft.dtypes, strict=True)):
            held = round_up(handle.nbytes)
            if is_cut(handle.nbytes, self._parts_of(handle)):
                yield held
                parts += self._kept_bytes(handle.nbytes)
            start, own_numel = draft.own_run(index, rank)
            if id(handle) in trained and own_numel:
                layout = LAYOUTS[dtype]
                (numel, _, full), *_ = pieces[layout]
                begin = filled[layout]
                filled[layout] = begin + round_up(own_numel, self._alignment_numel)
                last = (begin + own_numel - 1) // numel
                for number in range(last, begin // numel - 1, -1) if fills_state(handle, dtype) else ():
                    if (layout, number) not in made:
                        made.add((layout, number))
                        yield pieces[layout][0 if number < full else -1][1]
                    left = round_up(max((start + max(number * numel - begin, 0)) * handle.itemsize, 1))
                    yield left - held
                    held = left
            yield -held
        yield -parts


def _copy_bytes(layout: ShardLayout | None, blocks: tuple[BlockSizes, ...], kind: BlockKind) -> int:
    """What a copy of a unit's block of a kind takes: with one rank as much as the block."""
    rooms = (block.room_bytes for block in blocks if block.kind is kind)
    return max(rooms, default=0) if layout is None else round_up(layout.whole_nbytes)
