"""Memory that micro-batches have freed goes back to the system when they stop."""

from __future__ import annotations

from deepoffload import machine


class FreedMemory:
    """Gives freed memory back during one call in vertical order.

    glibc keeps what was freed below something that is still in use. What lives on between two units (their inputs, of
    each micro-batch) lies between what the units have freed. A hole of the size of the next request is too small for it
    once its alignment is added. So the working memory of all micro-batches would stay, though one runs at a time.

    What counts is how much the process has grown, since it costs little to ask for. Tensors that stay make it grow,
    too: they cause one attempt for each ``FREED_BYTES_MAX``. It is for forwards that keep little. Where they keep their
    activations nearly all growth is theirs, and what is given back is soon used again: the system clears it first.
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
