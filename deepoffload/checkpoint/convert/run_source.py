"""A :class:`TrainingRun` of another library as what a training state is loaded from, without a copy on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deepoffload.checkpoint.block_reader import FileSpan
from deepoffload.checkpoint.convert.own_writer import training_values
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.convert.values_tensor import ValuesTensor
from deepoffload.checkpoint.source import TrainingSource


@dataclass(frozen=True)
class _Nothing:
    """Reads nothing ahead: the files are read through the page cache, which does."""

    def will_read(self, spans: Iterable[FileSpan]) -> None:
        pass


def source_of(run: TrainingRun, folder: str, progress: Callable[[int], None]) -> TrainingSource:
    """What a training state loads.

    Args:
        folder: which checkpoint it is, for messages. progress: told the bytes that were read.

    Raises:
        UnsupportedError: a type of tensor that a checkpoint does not hold.
    """
    source = TrainingSource(folder, run.step, _Nothing())
    for name in run.weights:
        source.weights[name] = ValuesTensor(name, len(source.weights), run.exact(name), progress)
    for param, held in run.arrays.items():
        for key, values in held.items():
            full = f"{param}.{key}"
            source.arrays[full] = ValuesTensor(full, len(source.weights) + len(source.arrays), values, progress)
    source.training.update(training_values(run))
    return source
