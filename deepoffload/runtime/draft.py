"""A unit before it is made: its parameters, their types, and where they will lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.cpu_adam import STATE_BLOCK, StateDType
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.state import LAYOUTS, block_name, equalise_room, make_pieces
from deepoffload.params.cut import Place, TensorCut, cuts_of
from deepoffload.params.layout import ALIGNMENT_BYTES, ALIGNMENT_NUMEL, byte_offsets
from deepoffload.params.pager import Pager
from deepoffload.params.shards import FlatTensor, ShardLayout, shard_layout
from deepoffload.params.unit import ParamHandle, StateFormat, Unit, WeightView
from deepoffload.ranks.places import RankMap
from deepoffload.runtime.backing import backing_if_any, nbytes_for_later
from deepoffload.runtime.compute_types import ComputeTypes
from deepoffload.schedule.placement import BlockKind

GRADIENT_DTYPE = torch.float32
"""In which ranks keep their parts of the mean gradient, also of 16-bit weights."""


class UnitDraft:
    """Which parameters a unit will have, in which types, at which places of its blocks.

    Args:
        ranks: those that train the model together; None for one.
        may_lie_elsewhere: later a checkpoint may come to have what copies are made of now.

    Attributes:
        trained: those of its parameters whose gradients land, and that have optimizer state; with their dtypes.
        layout, gradient_layout: as :class:`Unit` has them. All ranks draft the same ones.
        nbytes: that the block of weights stores.
        backing: where a checkpoint has these; None where it does not.
    """

    def __init__(
        self,
        index: int,
        name: str,
        handles: list[ParamHandle],
        dtypes: list[torch.dtype],
        ranks: RankMap | None = None,
        *,
        may_lie_elsewhere: bool = False,
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        # Trainable parameters first, and those of one dtype together: their state arrays then follow the weights'
        # order.
        order = sorted(range(len(handles)), key=lambda i: (not _trainable(handles[i]), str(dtypes[i])))
        self.index = index
        self.name = name
        self.handles = [handles[i] for i in order]
        self.dtypes = [dtypes[i] for i in order]
        pairs = list(zip(self.handles, self.dtypes, strict=True))
        self.trained = [(handle, dtype) for handle, dtype in pairs if _trainable(handle) and dtype in LAYOUTS]
        self.rank = 0
        self.layout: ShardLayout | None = None
        self.gradient_layout: ShardLayout | None = None
        self.unit: Unit
        self.backing = None if ranks is not None or self.trained else backing_if_any(self.handles, self.dtypes)
        if self.backing is not None:
            self._offsets, self.nbytes = list(self.backing.offsets), self.backing.nbytes
            return
        if ranks is None:
            sizes_bytes = [handle.numel * dtype.itemsize for handle, dtype in pairs]
            self._offsets, self.nbytes = byte_offsets(sizes_bytes, alignment_bytes)
            if may_lie_elsewhere:
                self.nbytes = nbytes_for_later(self.nbytes, len(pairs))
            return
        trained = {handle for handle, _ in self.trained}
        tensors = [FlatTensor(h.numel, dtype.itemsize, (dtype, h in trained)) for h, dtype in pairs]
        gradients = [FlatTensor(h.numel, GRADIENT_DTYPE.itemsize, dtype) for h, dtype in self.trained]
        self.rank = ranks.rank
        self.layout = shard_layout(tensors, ranks.world_size)
        self.gradient_layout = shard_layout(gradients, ranks.world_size)
        self.nbytes = self.layout.shard_nbytes

    def place(self, index: int) -> Place:
        """Where the weight of a parameter will lie."""
        return self._offsets[index] if self.layout is None else TensorCut(self.layout, index, self.rank)

    def own_run(self, index: int, rank: int) -> tuple[int, int]:
        """Where the elements of a parameter begin that a rank owns, and how many these are."""
        if self.layout is None:
            return 0, self.handles[index].numel
        run = self.layout.run_of(rank, index)
        return (0, 0) if run is None else (run.start, run.numel)

    def range_numels(self) -> dict[torch.dtype, int]:
        """By type of trained parameters, how many elements of these a rank owns. With padding, so that all ranks own as
        many; nothing with one rank, which needs none."""
        layout = self.gradient_layout
        if layout is None:
            return {}
        sections = {dtype: layout.section_of[index] for index, (_, dtype) in enumerate(self.trained)}
        return {dtype: layout.sections[at].range_nbytes // GRADIENT_DTYPE.itemsize for dtype, at in sections.items()}

    def block_name(self, kind: BlockKind, piece: int = 0) -> str:
        """``piece``: the number of a piece of state."""
        return block_name(self.name, kind, piece)

    def make(
        self,
        pager: Pager,
        gradients: Gradients,
        piece_bytes: int,
        state_format: StateFormat,
        typical_bytes: int | None,
    ) -> Unit:
        """Declare the unit's blocks."""
        tiers = pager.tiers
        owner = WeightView(pager)
        weights = self._block(tiers, BlockKind.WEIGHT, self.nbytes, self.layout, owner)
        self.unit = unit = Unit(self.index, self.name, self.handles, weights, owner, self.layout, self.rank)
        if self.trained:
            self._make_gradients(tiers, gradients)
            padding = alignment_numel(state_format)
            unit.pieces = make_pieces(
                tiers, unit, self.trained, piece_bytes, state_format, padding, typical_bytes, self.range_numels()
            )
            equalise_room(unit.blocks())
        return unit

    def _make_gradients(self, tiers: TierManager, gradients: Gradients) -> None:
        layout, handles = self.gradient_layout, [handle for handle, _ in self.trained]
        places: Sequence[Place]
        if layout is None:
            landing = [gradients.landing_dtype(dtype) for _, dtype in self.trained]
            places, nbytes = byte_offsets([h.numel * d.itemsize for h, d in zip(handles, landing, strict=True)])
        else:
            landing = [GRADIENT_DTYPE] * len(handles)
            places, nbytes = cuts_of(layout, self.rank), layout.shard_nbytes
        block = self._block(tiers, BlockKind.GRADIENT, nbytes, layout)
        self.unit.gradients, self.unit.gradient_layout = block, layout
        gradients.give_block(block, handles, places, landing)

    def _block(
        self,
        tiers: TierManager,
        kind: BlockKind,
        nbytes: int,
        layout: ShardLayout | None,
        owner: WeightView | None = None,
    ) -> Block:
        if layout is None:
            return tiers.create(self.block_name(kind), kind, nbytes, owner)
        forms = tuple(cut.form() for cut in cuts_of(layout, self.rank))
        return tiers.create(self.block_name(kind), kind, nbytes, owner, forms, layout.whole_nbytes)


def draft_unit(pager: Pager, types: ComputeTypes, name: str, handles: list[ParamHandle]) -> UnitDraft:
    params = [handle.tensor for handle in handles]
    dtypes = [h.dtype if p is None else types.of(p) for h, p in zip(handles, params, strict=True)]
    ranks = None if pager.link is None else pager.link.ranks
    may_lie_elsewhere = pager.inference and pager.memory.on_host
    return UnitDraft(
        pager.life.new_unit_index(),
        name,
        handles,
        dtypes,
        ranks,
        may_lie_elsewhere=may_lie_elsewhere,
        alignment_bytes=pager.alignment_bytes,
    )


def alignment_numel(state_format: StateFormat) -> int:
    """Elements that a tensor's part of a piece is padded to."""
    return STATE_BLOCK if state_format.dtype is StateDType.EIGHT_BIT else ALIGNMENT_NUMEL


def _trainable(handle: ParamHandle) -> bool:
    param = handle.tensor
    return param is not None and param.requires_grad and not handle.pager.inference
