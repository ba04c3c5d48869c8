"""Places blocks that are given one by one, as tests write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepoffload.schedule.nvme_room import within_nvme
from deepoffload.schedule.placement import BlockColumns, BlockSpec, Placement, place_columns


def plan_placement(
    blocks: Iterable[BlockSpec], *, spare_nvme_bytes: int = 0, set_up_nvme_bytes: int = 0, **options: Any
) -> Placement:
    """As :func:`deepoffload.schedule.placement.place_columns`, with its options; refused where NVMe is too
    small for what is placed there, or for the set-up."""
    specs = tuple(blocks)
    columns = BlockColumns.of(specs)
    return within_nvme(
        lambda frugal: place_columns(columns, lambda: specs, frugal=frugal, **options),
        spare_nvme_bytes,
        set_up_nvme_bytes,
        durable=False,
    )
