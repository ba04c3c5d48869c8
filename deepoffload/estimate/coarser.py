"""Fewer and larger pieces of optimizer state, for the clock: one use of many pieces takes as long as many uses.

A unit's pieces are of one size, and pass one after the other through the memory that its weights and gradients leave.
Pieces that are so many times larger take the same time where a few of them have room at once; only the ends of the
stream are less exact. Where they have none, they count for less memory than bytes of disk: with more memory instead,
weights and gradients would find room that the machine does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from deepoffload.estimate.blocks import BlockPlan
from deepoffload.schedule.cost_model import BlockKind
from deepoffload.schedule.placement import BlockSpec, Placement

PIECES_MAX = 2000
"""Pieces that are played: benchmarks/results/estimate_pieces.json compares their seconds with those of 16,000."""
SLOTS = 3
"""Larger pieces that have room at once: one that is used, one that is read, and one that is written."""


def coarser(blocks: BlockPlan, most: int = PIECES_MAX) -> tuple[BlockPlan, dict[int, int]]:
    """``blocks`` with at most about ``most`` pieces of state, and how many pieces are in each that was put together."""
    placement = blocks.placement
    count = sum(block.kind is BlockKind.STATE for block in placement.blocks)
    factor = -(-count // most)
    if factor == 1:
        return blocks, {}
    window = placement.window
    piece_bytes = -(-window.ring_bytes // max(window.ring_pieces, 1))
    share = min(1.0, _room_of_pieces(placement) / max(SLOTS * factor * piece_bytes, 1))
    content = dict(blocks.content_bytes)
    kept: list[BlockSpec] = []
    pieces_in_one: dict[int, int] = {}
    for unit in _by_unit(placement.blocks):
        for resident in (True, False):
            mine = [block for block in unit if (block.id in placement.resident) is resident]
            kept += [block for block in mine if block.kind is not BlockKind.STATE]
            pieces = [block for block in mine if block.kind is BlockKind.STATE]
            for first in range(0, len(pieces), factor):
                group = pieces[first : first + factor]
                nbytes = sum(block.nbytes for block in group)
                kept.append(replace(group[0], nbytes=nbytes if resident else max(int(nbytes * share), 1)))
                content[group[0].id] = sum(blocks.content_bytes[block.id] for block in group)
                pieces_in_one[group[0].id] = len(group)
    ids = frozenset(block.id for block in kept)
    return replace(
        blocks,
        content_bytes=content,
        placement=replace(
            placement,
            blocks=tuple(kept),
            resident=placement.resident & ids,
            paged=placement.paged & ids,
        ),
    ), pieces_in_one


def _room_of_pieces(placement: Placement) -> int:
    """What the largest unit leaves to pieces of state while it is updated: the ring at least."""
    largest = dict.fromkeys(BlockKind, 0)
    for block in placement.blocks:
        if block.id in placement.paged:
            largest[block.kind] = max(largest[block.kind], block.nbytes)
    in_use = largest[BlockKind.WEIGHT] + largest[BlockKind.GRADIENT]
    return max(placement.window.ring_bytes, placement.dynamic_bytes - in_use)


def _by_unit(blocks: Iterable[BlockSpec]) -> Iterator[list[BlockSpec]]:
    by_unit: dict[int, list[BlockSpec]] = {}
    for block in blocks:
        by_unit.setdefault(block.unit, []).append(block)
    yield from by_unit.values()
