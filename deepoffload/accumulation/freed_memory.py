"""Memory that micro-batches have freed goes back to the system when they stop."""

from __future__ import annotations

from deepoffload import machine


class FreedMemory:
    """Gives freed memory back during one call in vertical order.

    glibc keeps freed blocks of up to 32 MiB in a heap of the thread, and each micro-batch has a thread. Only one
    micro-batch runs at a time, but the working memory of all of them would stay.

    What counts is how much the process has grown, since it costs little to ask for. Tensors that stay make it grow,
    too: they cause one attempt for each ``FREED_BYTES_MAX``.
    """

    def __init__(self) -> None:
        self._settled_bytes = machine.resident_bytes()

    def look(self) -> None:
        """A micro-batch stops: give back what it pays to give back."""
        now_bytes = machine.resident_bytes()
        if now_bytes > self._settled_bytes + machine.FREED_BYTES_MAX:
            machine.return_free_memory()
            self._settled_bytes = machine.resident_bytes()
        else:
            self._settled_bytes = min(self._settled_bytes, now_bytes)
