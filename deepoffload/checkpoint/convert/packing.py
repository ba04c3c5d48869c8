"""How the stored weights of a model of transformers make up its parameters, known from its configuration alone.

A checkpoint holds weights as on the hub, and a model may have them in another packing: Mixtral's experts are slices of
one parameter in memory, and single tensors in the file. The model is built without bytes (on the meta device), and its
own conversion is followed (:mod:`deepoffload.checkpoint.expressions`). No code of the folder is run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepoffload.checkpoint.weights import plan_weights
from deepoffload.errors import UnsupportedError

CONFIG_NAME = "config.json"
_RUNS_MAX = 4096
"""Of one stored tensor: more of them would be read slowly."""


class Run(NamedTuple):
    """Elements that follow one another both in a stored tensor and in a tensor of the model."""

    stored: str
    stored_start: int
    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class Packing:
    """Which elements of the stored tensors are which of the model's.

    Attributes:
        shapes: of the tensors of the model. runs: by stored tensor, in its order. aliases: tied names of the model.
    """

    shapes: Mapping[str, tuple[int, ...]]
    runs: Mapping[str, Sequence[Run]]
    aliases: Mapping[str, str]

    @cached_property
    def runs_of(self) -> Mapping[str, Sequence[Run]]:
        """By tensor of the model, in its order."""
        found: dict[str, list[Run]] = {name: [] for name in self.shapes}
        for runs in self.runs.values():
            for run in runs:
                found[run.name].append(run)
        return {name: sorted(runs, key=lambda run: run.start) for name, runs in found.items()}


class _Place:
    """Stands for a tensor of the model. Nobody reads it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> AbstractContextManager[Tensor]:
        raise RuntimeError(f"{self.name} has no bytes")


def packing_of(folder: str) -> Packing:
    """The packing of the model whose ``config.json`` is in a folder.

    Raises:
        UnsupportedError: transformers is missing, does not know the model, or its conversion cannot be followed.
    """
    model = _without_bytes(folder)
    names = {id(value): name for name, value in reversed(model.state_dict(keep_vars=True).items())}
    plan = plan_weights(model, hub_names=True, shapes_only=True, opener_of=lambda value: _Place(names[id(value)]))
    runs: dict[str, list[Run]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for stored, tensor in plan.tensors.items():
        done, mine = 0, []
        for part in plan.expressions.parts(tensor):
            base, view, place = part.source.base, part.view, part.source.open
            if not isinstance(place, _Place) or not base.is_contiguous():
                raise UnsupportedError(f"{folder}: {stored} is stored in another order than the model has it")
            for start, numel in _runs_in_memory(view, part.start, part.stop):
                mine.append(Run(stored, done, place.name, start - int(base.storage_offset()), numel))
                done += numel
                if len(mine) > _RUNS_MAX:
                    raise UnsupportedError(f"{folder}: {stored} is stored in another order than the model has it")
            shapes[place.name] = tuple(base.shape)
        runs[stored] = mine
    aliases = {name: kept for name, kept in plan.metadata.items() if kept in shapes}
    return Packing(shapes, runs, aliases)


def _runs_in_memory(view: Tensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where the elements ``start`` to ``stop`` of a view, in row-major order, follow one another in its storage."""
    run, dims = 1, view.dim()
    while dims and (view.stride(dims - 1) == run or view.shape[dims - 1] == 1):
        run *= view.shape[dims - 1]
        dims -= 1
    while start < stop:
        index, inside = divmod(start, run)
        numel = min(run - inside, stop - start)
        offset = int(view.storage_offset()) + inside
        for dim in reversed(range(dims)):
            index, at = divmod(index, view.shape[dim])
            offset += at * view.stride(dim)
        yield offset, numel
        start += numel


def _without_bytes(folder: str) -> nn.Module:
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(f"{folder} is packed as on the hub, which takes transformers to undo: install it")
    transformers: Any = importlib.import_module("transformers")
    try:
        with open(os.path.join(folder, CONFIG_NAME), encoding="utf-8") as file:
            architectures = json.load(file).get("architectures")
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, architectures[0])
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise TypeError(f"{architectures[0]} is no model")
        with torch.device("meta"):
            model: nn.Module = kind(config)
        importlib.import_module("transformers.core_model_loading")
        return model
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise UnsupportedError(
            f"{folder}: transformers cannot build the model of its configuration: {error}"
        ) from error
