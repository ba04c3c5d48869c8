"""When updates run: as the user says, else deferred, and on a guess where that can pay."""

from __future__ import annotations

from dataclasses import replace

from deepoffload.schedule.cost_model import (
    UPDATE_BYTES_PER_BYTE,
    Bandwidths,
    BlockKind,
    StepOverlap,
    Traffic,
    update_seconds,
)
from deepoffload.schedule.guess_room import guess_bytes, with_guess_room
from deepoffload.schedule.placement import Placement
from deepoffload.schedule.table import human_bytes


def with_updates(
    placement: Placement, said: StepOverlap | None, bandwidths: Bandwidths, *, no_guesses: str | None
) -> Placement:
    """The placement that says when its updates run, and why.

    Args:
        said: what the configuration says.
        no_guesses: why there can be none; None where there can.
    """
    if said is not None:
        placement = with_guess_room(placement) if said is StepOverlap.SPECULATIVE else placement
        return replace(placement, step_overlap=said, updates=f"{said.value}, as step_overlap says")
    disk_s, update_s = _seconds(placement, bandwidths)
    more_bytes = guess_bytes(placement)
    why = no_guesses
    if why is None and not disk_s:
        why = "no optimizer state moves"
    if why is None and disk_s <= update_s:
        why = f"the disk moves state in {disk_s:.2f} s per step, its update takes {update_s:.2f} s"
    if why is None and not more_bytes:
        why = "NVMe has little room left for what guesses would keep"
    if why is not None:
        return replace(placement, step_overlap=StepOverlap.DEFERRED, updates=f"deferred: {why}")
    text = (
        "deferred, and some inside backward on a guess (speculative) as soon as steps wait long for the disk: it needs "
        f"{disk_s:.2f} s per step for state, whose update takes {update_s:.2f} s. Guesses take up to "
        f"{human_bytes(more_bytes)} more of NVMe"
    )
    return replace(placement, step_overlap=StepOverlap.SPECULATIVE, updates=text)


def _seconds(placement: Placement, bandwidths: Bandwidths) -> tuple[float, float]:
    """Of one step: what the disk needs for the state that moves, and what memory needs for the update of all state."""
    row = next((row for row in placement.rows if row.name == BlockKind.STATE.value), None)
    if row is None:
        return 0.0, 0.0
    state_bytes = row.host_bytes + row.nvme_bytes
    moved = Traffic(row.read_bytes, row.written_bytes)
    return bandwidths.seconds(moved), update_seconds(UPDATE_BYTES_PER_BYTE * state_bytes, bandwidths)
