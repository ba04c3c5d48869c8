"""Places blocks that are given one by one, as tests write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepoffload.schedule.placement import BlockColumns, BlockSpec, Placement, place_columns


def plan_placement(blocks: Iterable[BlockSpec], **options: Any) -> Placement:
    """As :func:`deepoffload.schedule.placement.place_columns`, with its options."""
    specs = tuple(blocks)
    return place_columns(BlockColumns.of(specs), lambda: specs, **options)
