"""What an engine does otherwise where nothing is trained."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from deepoffload.io.extents import SourceExtent
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
            pager.tiers.space.sources.check_all(partial(_tensors_in, pager))
        pager.expect(window.expected_units() for window in windows)


def _tensors_in(pager: Pager, number: int) -> list[str]:
    """Names of the tensors that are read from a file, by its number."""
    found: list[str] = []
    for unit in pager.units:
        extent = unit.weights.extent
        if isinstance(extent, SourceExtent) and any(piece.path_index == number for piece in extent.pieces):
            found += extent.tensors
    return found
