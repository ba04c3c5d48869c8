"""What is kept of ranges that were given back."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

from deepoffload.copies.cpu_device import CpuDevice
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.native.aio import PAGE_BYTES


class Event:
    """What a device may still do with a range."""

    def __init__(self, *, over: bool) -> None:
        self.over = over

    def query(self) -> bool:
        return self.over


def test_events_that_are_over_are_let_go() -> None:
    arena = DeviceArena(CpuDevice(), 4 * PAGE_BYTES, outside_user_modes=nullcontext, poison=False)
    late = Event(over=False)
    offset = arena.allocate(PAGE_BYTES)
    assert offset is not None
    arena.free(offset, [late])
    kept = []
    for _ in range(8):
        offset = arena.allocate(PAGE_BYTES)
        assert offset is not None
        event = Event(over=True)
        kept.append(weakref.ref(event))
        arena.free(offset, [event])
    del event
    assert [reference() for reference in kept] == [None] * 8
    assert arena.allocate(PAGE_BYTES) == offset and arena.events_before(offset) == [late]
