"""A host budget that is enough for what the program keeps, where one turns out to be too small in training.

A larger budget cuts a model into larger units, and a view of a weight holds all of its unit. So the budget that an
error names is tried before: what is kept is counted in the units that the model would have with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from deepoffload.config import Config, Precision
from deepoffload.memory.block import Block
from deepoffload.memory.no_room import BudgetFor, EnoughBytes
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.runtime.choice import Room, least_bytes
from deepoffload.runtime.cuts import Cutter
from deepoffload.runtime.device import with_ring
from deepoffload.runtime.plan import cutter_of, dry_pager
from deepoffload.schedule.cost_model import BlockKind

Kept = dict[BlockKind, set[int]]
"""``id`` of each parameter whose weights, or gradients, are kept."""


def budget_for_kept(pager: Pager, config: Config, roots: Sequence[nn.Module], room: Room) -> BudgetFor:
    """What finds the budget for models: from blocks that are kept or in use, further bytes that are kept, and a budget
    that is needed in any case. ``room``: that of the models. It keeps neither ``pager`` nor ``roots`` alive."""
    return partial(_budget, weakref.ref(pager), config, [weakref.ref(root) for root in roots], room)


def _budget(
    pager_ref: weakref.ref[Pager],
    config: Config,
    root_refs: Iterable[weakref.ref[nn.Module]],
    room: Room,
    blocks: Collection[Block],
    kept_bytes: int,
    budget_bytes: int,
) -> EnoughBytes:
    pager = pager_ref()
    if pager is None:
        return EnoughBytes(budget_bytes, budget_bytes)
    with outside_user_modes():
        kept = _kept(pager.units, blocks)
        every = {id(handle.tensor) for unit in pager.units for handle in unit.handles}
        cutter = _cutter(config, [root for ref in root_refs if (root := ref()) is not None], pager)
        found = []
        for held in (kept, {**kept, BlockKind.WEIGHT: every}):
            while (needed_bytes := kept_bytes + _needed_bytes(cutter, config, room, held, budget_bytes)) > budget_bytes:
                budget_bytes = needed_bytes
            has_ring = not pager.memory.on_host and pager.link is None
            found.append(with_ring(budget_bytes) if has_ring else budget_bytes)
        return EnoughBytes(*found)


def _kept(units: Iterable[Unit], blocks: Collection[Block]) -> Kept:
    """Of a unit's weights, which of its parameters have views; all of them where none has, because it is in use."""
    ids = {block.id for block in blocks}
    kept: Kept = {BlockKind.WEIGHT: set(), BlockKind.GRADIENT: set()}
    for unit in units:
        if unit.weights.id in ids:
            handles = [handle for handle in unit.handles if handle.aliased()] or unit.handles
            kept[BlockKind.WEIGHT].update(id(handle.tensor) for handle in handles)
        gradients = [*unit.late_gradients, *([] if unit.gradients is None else [unit.gradients])]
        if any(block.id in ids for block in gradients):
            kept[BlockKind.GRADIENT].update(id(handle.tensor) for handle in unit.handles)
    return kept


def _cutter(config: Config, roots: Sequence[nn.Module], pages: Pager) -> Cutter:
    """Cuts the models as when they are built again. They have the types now that they compute in, and may have been
    registered in fp32."""
    alive = [(handle.name, handle.tensor) for unit in pages.units for handle in unit.handles]
    others = [(name, tensor) for name, tensor in alive if tensor is not None]
    pager, gradients, handles = dry_pager(*roots, others=others, link=pages.link, alignment_bytes=pages.alignment_bytes)
    for handle in handles:
        if config.precision is not Precision.KEEP and handle.dtype.is_floating_point:
            handle.dtype = torch.float32
    return cutter_of(pager, gradients, config, roots, handles)


def _needed_bytes(cutter: Cutter, config: Config, room: Room, kept: Kept, budget_bytes: int) -> int:
    """With the cut for ``budget_bytes``."""
    cut = next(cutter.cuts(budget_bytes))
    needed = least_bytes(cutter, cut, config, room)
    if room.nvme_bytes is None:
        return needed  # of everything
    for draft, sizes in zip(cut.division.drafts, cutter.sizes(cut, budget_bytes), strict=True):
        needed += sum(sizes.room_bytes(kind) for kind, ids in kept.items() if _is_among(draft.handles, ids))
    return needed


def _is_among(handles: Iterable[ParamHandle], ids: Collection[int]) -> bool:
    return any(id(handle.tensor) in ids for handle in handles)
