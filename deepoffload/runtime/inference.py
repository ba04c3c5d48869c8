"""What an engine does otherwise where nothing is trained."""

from __future__ import annotations

from collections.abc import Iterable

from deepoffload.io.mapped_origin import MappedOrigins
from deepoffload.params.pager import Pager
from deepoffload.params.window import Window


def read_in_place(pager: Pager) -> None:
    """From now on parameters are read where a checkpoint has them, as far as tensors show host memory."""
    space = pager.tiers.space
    if pager.inference and space is not None and pager.memory.on_host:
        pager.origins = MappedOrigins(space.sources)


def begin_inference(pager: Pager, windows: Iterable[Window]) -> None:
    """The models are there: see that checkpoints are still what was loaded, and begin to read.

    Raises:
        IoFailure: a checkpoint was written to while it was loaded.
    """
    if pager.inference:
        if pager.tiers.space is not None:
            pager.tiers.space.sources.check_all()
        pager.expect(window.expected_units() for window in windows)
