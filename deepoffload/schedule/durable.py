"""What durable steps cost: disk space for two of them, and the writes of what stays in memory."""

from __future__ import annotations

import math
from dataclasses import replace

from deepoffload.schedule.cost_model import UPDATE_BYTES_PER_BYTE, Bandwidths, BlockKind, update_seconds
from deepoffload.schedule.placement import KIND_NUMBERS, BlockColumns, Placement
from deepoffload.schedule.table import Row

PAGE_BYTES = 4096
"""Disk space comes in whole pages."""

COST_MAX = 0.05
"""Writes that only durability needs may take this part of the steps, where the user does not say how often."""

DURABLE_COPIES = 2
"""The last durable step, and the one that is being made."""


RECORDS, RECORD_BYTES, BYTES_PER_RECORDED_BYTE = 3, 1 << 20, 4096
"""Of each copy there is a record, and of the one that is being written: names, settings and random states, and for
every 256 KiB a checksum."""


def with_durable_steps(placement: Placement, columns: BlockColumns) -> Placement:
    """The placement with disk space for two durable steps of all weights and optimizer state in ``columns``."""
    durable = columns.kinds != KIND_NUMBERS[BlockKind.GRADIENT]
    step_bytes = int(columns.nbytes[durable].sum())
    record_bytes = RECORD_BYTES + -(-step_bytes // BYTES_PER_RECORDED_BYTE // PAGE_BYTES) * PAGE_BYTES
    wanted_bytes = DURABLE_COPIES * step_bytes + RECORDS * record_bytes
    rows = {row.name: row.nvme_bytes for row in placement.rows}
    there_bytes = sum(rows.get(kind.value, 0) for kind in (BlockKind.WEIGHT, BlockKind.STATE))
    more_bytes = wanted_bytes - there_bytes
    row = Row("durable steps", nvme_bytes=more_bytes, reason="so that weights and state are there twice")
    return replace(placement, nvme_bytes=placement.nvme_bytes + more_bytes, rows=(*placement.rows, row))


def written_for_durability(placement: Placement) -> int:
    """Bytes that a durable step writes, and the step itself would not: what stays in memory."""
    kinds = (BlockKind.WEIGHT, BlockKind.STATE)
    return sum(block.nbytes for block in placement.blocks if block.kind in kinds and block.id in placement.resident)


def least_every(extra_s: float, step_s: float) -> int:
    """The least number of steps between two durable ones for which the extra writes cost at most ``COST_MAX``."""
    return max(1, math.ceil(extra_s / (COST_MAX * step_s))) if step_s > 0 else 1


def every_of(placement: Placement, bandwidths: Bandwidths) -> int:
    """How often a step is made durable before any was timed: 1 where all optimizer state passes through NVMe, else by
    the least time that a step can take."""
    state = [block for block in placement.blocks if block.kind is BlockKind.STATE]
    if not any(block.id in placement.resident for block in state):
        return 1
    changed = sum(block.nbytes for block in placement.blocks if block.kind is not BlockKind.GRADIENT)
    step_s = max(placement.disk_seconds, update_seconds(UPDATE_BYTES_PER_BYTE * changed, bandwidths))
    return least_every(written_for_durability(placement) / bandwidths.write_bytes_per_s, step_s)
