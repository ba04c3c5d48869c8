"""Disk space for updates on a guess: what blocks held before stays there until the step is known."""

from __future__ import annotations

from dataclasses import replace

from deepoffload.schedule.cost_model import BlockKind
from deepoffload.schedule.placement import Placement
from deepoffload.schedule.speculation import FIRST_SHARE
from deepoffload.schedule.table import Row

PAGE_BYTES = 4096
"""Disk space comes in whole pages."""

GUESSES = "updates on a guess"
"""The row of that space."""


def guess_bytes(placement: Placement) -> int:
    """What the units that are guessed at first keep on disk. 0 where no state moves, and where it would take more than
    half of what is left: nothing is refused for want of it, and a unit without is deferred."""
    rows = {row.name: row for row in placement.rows}
    state, weights = rows.get(BlockKind.STATE.value), rows.get(BlockKind.WEIGHT.value)
    if state is None or weights is None or not state.nvme_bytes or placement.nvme_capacity_bytes is None:
        return 0
    changed_bytes = state.nvme_bytes + weights.host_bytes + weights.nvme_bytes
    more_bytes = int(FIRST_SHARE * changed_bytes) // PAGE_BYTES * PAGE_BYTES
    left_bytes = placement.nvme_capacity_bytes - placement.nvme_bytes
    return more_bytes if more_bytes <= left_bytes // 2 else 0


def kept_bytes(placement: Placement) -> int:
    """What guesses keep on disk of a model with this placement, whether it has the row or not."""
    rows = (row.nvme_bytes for row in placement.rows if row.name == GUESSES)
    return next(rows, None) or guess_bytes(placement)


def with_guess_room(placement: Placement) -> Placement:
    """The placement with disk space for the old bytes of the units that are guessed at first, as far as there is."""
    more_bytes = guess_bytes(placement)
    if not more_bytes:
        return placement
    row = Row(GUESSES, nvme_bytes=more_bytes, reason="what these change, kept until the step is known")
    return replace(placement, nvme_bytes=placement.nvme_bytes + more_bytes, rows=(*placement.rows, row))
