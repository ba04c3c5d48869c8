"""Memory that micro-batches have freed goes back to the system when they stop."""

from __future__ import annotations

from deepoffload import machine


class FreedMemory:
    """Gives freed memory back during one call in vertical order.

    glibc keeps freed blocks of up to 32 MiB in a heap of the thread, and each micro-batch has a thread. Only one
    micro-batch runs at a time, but the working memory of all of them would stay.

    What counts is how much the process has grown, since it costs little to ask for. Tensors that stay make it grow,
    too: they cause one attempt for each ``FREED_BYTES_MAX``. Where forwards keep their activations nearly all growth is
    theirs. Then nothing is given back before backward: what is given back is soon used again, and the system has to
    clear it first.
    """

    def __init__(self) -> None:
        self._settled_bytes: int | None = machine.resident_bytes()

    def expect_growth(self) -> None:
        """A micro-batch stops in a forward that keeps its activations."""
        self._settled_bytes = None

    def look(self) -> None:
        """A micro-batch stops: give back what it pays to give back."""
        now_bytes = machine.resident_bytes()
        if self._settled_bytes is None:
            self._settled_bytes = now_bytes
        elif now_bytes > self._settled_bytes + machine.FREED_BYTES_MAX:
            machine.return_free_memory()
            self._settled_bytes = machine.resident_bytes()
        else:
            self._settled_bytes = min(self._settled_bytes, now_bytes)
