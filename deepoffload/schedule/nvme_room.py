"""How much NVMe a placement takes at most, from the end of construction on, and the refusal of less.

[Note: room on NVMe] A block leaves memory for its extent, and its extent is given back when it is in memory for good.
So once all blocks that stay are in memory, those that pass need no more than one extent each: ``Placement.nvme_bytes``.

Before that, blocks that are to stay may be on NVMe, and blocks that are to pass in memory without an extent. To
exchange two of them, either memory or NVMe needs room for one of them. With E bytes of blocks in existence, and x and
y bytes in the two blocks, that is certain where ::

    E + x + y <= memory + NVMe

If it does not hold, free memory may be less than x, and free NVMe less than y: then nothing can move any more.
"""

from __future__ import annotations

from collections.abc import Callable

from deepoffload.errors import PlacementError
from deepoffload.schedule.placement import Placement
from deepoffload.schedule.table import human_bytes

EXCHANGED = 2
"""Blocks that change places between memory and NVMe."""


def set_up_nvme_bytes(capacity_bytes: int, most_bytes: int, largest_bytes: int) -> int:
    """NVMe with which every block finds room while a model is set up. See [Note: room on NVMe].

    Args:
        capacity_bytes: of memory.
        most_bytes: that exist at once.
        largest_bytes: of one block.
    """
    return 0 if most_bytes <= capacity_bytes else most_bytes + EXCHANGED * largest_bytes - capacity_bytes


def within_nvme(place: Callable[[bool], Placement], spare_bytes: int, set_up_bytes: int, *, durable: bool) -> Placement:
    """The placement that saves most time, or the one that needs least of NVMe where that one does not fit there.

    The least decides what is refused. It follows from sizes alone, so a budget that was accepted once always is; the
    time that a placement saves follows from the measured rates of a disk, and these differ from run to run.

    Args:
        place: makes the placement; True for the one that needs least.
        spare_bytes: of NVMe, for what is there for a moment only, where anything is there.
        set_up_bytes: of NVMe, that the set-up needs.
        durable: with durable steps.

    Raises:
        PlacementError: NVMe is too small; with ``enough_nvme_bytes``.
    """
    placement = place(False)
    has_bytes = placement.nvme_capacity_bytes
    most_bytes = max(sum(row.host_bytes + row.nvme_bytes for row in placement.rows) + spare_bytes, set_up_bytes)
    if has_bytes is None or most_bytes <= has_bytes:
        return placement
    least = place(True)
    needed_bytes = max(_with(spare_bytes, least), set_up_bytes)
    if needed_bytes > has_bytes:
        raise PlacementError(_message(least, needed_bytes, has_bytes, durable=durable), enough_nvme_bytes=needed_bytes)
    return placement if _with(spare_bytes, placement) <= has_bytes else least


def _with(spare_bytes: int, placement: Placement) -> int:
    return placement.nvme_bytes + spare_bytes if placement.paged else placement.nvme_bytes


def _message(placement: Placement, needed_bytes: int, has_bytes: int, *, durable: bool) -> str:
    at_times = " at times" if needed_bytes > placement.nvme_bytes else ""
    directory = "name a directory with more free space (durability.path or nvme_path)"
    if not durable:
        directory = "give nvme_path a file system with more free space"
    instead = "leave durability out" if durable else "raise host_budget so that less goes there"
    return (
        f"{'With durability ' if durable else ''}NVMe must hold {human_bytes(needed_bytes)} ({needed_bytes} bytes)"
        f"{at_times} but has {human_bytes(has_bytes)} ({has_bytes} bytes). Raise nvme_budget to at least "
        f"{needed_bytes} bytes, {directory}, or {instead}.\n{placement.table()}"
    )
