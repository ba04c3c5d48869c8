"""Tiles of a layer in a checkpoint: stored under the layer's names, each at its place in the layer's tensors.

So a checkpoint does not depend on tiles: a model without them, or with others, loads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from deepoffload.checkpoint.block_reader import FileSpan
from deepoffload.checkpoint.manifest import TensorRecord
from deepoffload.checkpoint.source import StoredTensor
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.native.cpu_adam import STATE_BLOCK
from deepoffload.optim.eight_bit import num_blocks
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.tiling.linear import FIELDS, LinearInTiles


class StoredPlace(NamedTuple):
    """Where a parameter's values are: in the tensor called ``name``, from element ``start`` on."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    def start_of(self, key: str, *, is_tile: bool) -> int:
        """The first element in an array of the parameter's state.

        Raises:
            UnsupportedError: scales of 8-bit state, whose blocks begin elsewhere.
        """
        if not is_tile or not key.endswith(SCALE_SUFFIX):
            return self.start
        if self.start % STATE_BLOCK:
            raise UnsupportedError(
                f"8-bit state of a tile of {self.name} begins within a block of {STATE_BLOCK} elements, and a "
                "checkpoint has it under the layer's name: give tile_linear a larger max_bytes, so that tiles are "
                "whole blocks"
            )
        return self.start // STATE_BLOCK

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Of an array of state, for the whole tensor."""
        return (num_blocks(self.numel),) if key.endswith(SCALE_SUFFIX) else self.shape


StoredPlaces = Mapping[int, StoredPlace]
"""By ``id`` of the parameter."""


def places_of(module: nn.Module, *, apart: bool = False) -> dict[int, StoredPlace]:
    """Where every parameter of a model is stored. ``apart``: tiles are separate tensors."""
    found = {id(param): StoredPlace(name, tuple(param.shape), 0) for name, param in module.named_parameters()}
    for prefix, layer in module.named_modules():
        if not isinstance(layer, LinearInTiles) or apart:
            continue
        for field in FIELDS:
            parts, start = layer.parts(field), 0
            for part in parts:
                shape = (layer.out_features, *part.shape[1:])
                found[id(part)] = StoredPlace(f"{prefix}.{field}" if prefix else field, shape, start)
                start += part.numel()
    return found


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Names in the state dict of parameters that are not trained; all of their names, where they are tied."""
    places = places_of(module)
    named = module.named_parameters(remove_duplicate=False)
    frozen = [(name, param) for name, param in named if not param.requires_grad]
    return frozenset(
        name if places[id(param)].shape == tuple(param.shape) else places[id(param)].name for name, param in frozen
    )


class StoredTile(StoredTensor):
    """A tile's part of a stored tensor.

    Raises:
        UsageError: the tensor has another shape than the layer, or its elements lie in another order.
    """

    def __init__(self, whole: StoredTensor, place: StoredPlace, shape: tuple[int, ...], key: str) -> None:
        expected = place.shape_of(key)
        if whole.shape != expected or whole.record.order is not None:
            raise UsageError(
                f"{place.name}.{key} has shape {whole.shape} in the checkpoint, or another order; the layer, which is "
                f"in tiles, has {expected}. Load it into a model without tiles"
            )
        self._whole = whole
        self._first = place.start_of(key, is_tile=True)
        mine = (num_blocks(math.prod(shape)),) if key.endswith(SCALE_SUFFIX) else shape
        size, begin = whole.dtype.itemsize, whole.record.begin
        begin += self._first * size
        record = TensorRecord(
            whole.record.dtype, mine, (0,) * len(mine), mine, begin, begin + math.prod(mine) * size, None
        )
        super().__init__(whole.file, whole.name, record)

    def span(self, start: int, numel: int) -> FileSpan:
        return self._whole.span(self._first + start, numel)

    def read_into(self, address: int, start: int, numel: int) -> None:
        self._whole.read_into(address, self._first + start, numel)
