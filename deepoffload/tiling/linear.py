"""``LinearInTiles``: a linear layer whose output features several ``nn.Linear`` compute, under the names of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.tiling.joined import joined

FIELDS = ("weight", "bias")


class LinearInTiles(nn.Module):
    """``nn.Linear`` in tiles of output features. Each tile is a module, so that it can be a unit.

    Its state dict has ``weight`` and ``bias``, as the layer's that it stands for.

    Args:
        tiles: in the order of their features, all with the same input features, and all with a bias or none.
    """

    def __init__(self, tiles: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.in_features = tiles[0].in_features
        self.out_features = sum(tile.out_features for tile in tiles)
        self.tiles = nn.ModuleList(tiles)
        self.register_load_state_dict_pre_hook(_cut_for_tiles)

    def placed_tiles(self) -> Iterator[tuple[int, Any]]:
        """Each tile with its first output feature."""
        start = 0
        tile: Any
        for tile in self.tiles:
            yield start, tile
            start += tile.out_features

    @property
    def weight(self) -> Tensor:
        """The weights of all tiles. They come together only for an operation on this value, as an ordinary tensor."""
        return joined("weight", self.parts("weight"), with_graph=True)

    @property
    def bias(self) -> Tensor | None:
        """The same of their biases."""
        parts = self.parts("bias")
        return joined("bias", parts, with_graph=True) if parts else None

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([tile(input) for tile in self.tiles], dim=-1)

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` does it."""
        for _, tile in self.placed_tiles():
            tile.reset_parameters()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, tiles={len(self.tiles)}"

    # -- names -----------------------------------------------------------------------------------------------------

    def parts(self, field: str) -> list[Tensor]:
        """The tiles' weights, or their biases."""
        found = [getattr(tile, field) for tile in self.tiles]
        return [part for part in found if part is not None]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for field in FIELDS:
            parts = self.parts(field)
            for number in range(len(parts)):
                del found[f"{prefix}tiles.{number}.{field}"]
            if parts:
                found[prefix + field] = joined(prefix + field, parts)
        return found


def _cut_for_tiles(
    layer: LinearInTiles,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Cut what is given for the layer, so that the tiles find theirs."""
    for field in FIELDS:
        parts, name = layer.parts(field), prefix + field
        if not parts or f"{prefix}tiles.0.{field}" in state_dict:
            continue
        pieces: Sequence[Tensor] = parts  # which are then loaded from themselves
        value = state_dict.pop(name, None)
        shape = (layer.out_features, *parts[0].shape[1:])
        if value is None:
            missing_keys.append(name)
        elif tuple(value.shape) != shape:
            error_msgs.append(
                f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from checkpoint, the shape "
                f"in current model is {shape}."
            )
        else:
            pieces = value.split([len(part) for part in parts])
        for number, piece in enumerate(pieces):
            state_dict[f"{prefix}tiles.{number}.{field}"] = piece
