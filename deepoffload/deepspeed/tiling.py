"""DeepSpeed's ``zero.TiledLinear``: a linear layer as a grid of smaller ones, which a program writes into its model.

Its tiles have DeepSpeed's names (``linears.<row>.<column>``), so that checkpoints of such models fit.
:func:`deepoffload.tile_linear` splits layers of a finished model, and keeps their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UsageError


class TiledLinear(nn.Module):
    """``out_splits`` x ``in_splits`` linear layers in the place of one.

    Args:
        in_splits, out_splits: how many parts of the input and output features; the first ones may be larger by one.
        input_is_already_split: the input is a list of ``in_splits`` tensors.
        combine_out_splits: False: the output is a list of ``out_splits`` tensors.
        linear_cls: makes a tile, called as ``nn.Linear`` is, with ``kwargs``.
        init_linear: a layer of the whole size whose values the tiles get.

    Raises:
        UsageError: splits that there are no features for, or a layer of another size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds("in", in_features, in_splits)
        self.out_parts = _bounds("out", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and column == in_splits - 1, **kwargs)
                for column, columns in enumerate(_sizes(self.in_parts))
            )
            for rows in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        inputs = self._inputs(input_)
        outputs = []
        for row in self.linears:
            output: Any = None
            for tile, part in zip(row, inputs, strict=True):  # type: ignore[call-overload]
                output = self._added(output, tile(part))
            outputs.append(output)
        return self._combined(outputs) if self.combine_out_splits else outputs

    def _inputs(self, input_: Any) -> Sequence[Tensor]:
        if self.in_splits == 1:
            return [input_]
        if not self.input_is_already_split:
            parts: Sequence[Tensor] = input_.split(_sizes(self.in_parts), dim=-1)
            return parts
        if len(input_) != self.in_splits:
            raise UsageError(f"TiledLinear takes an input in {self.in_splits} parts, not in {len(input_)}")
        given: Sequence[Tensor] = input_
        return given

    def _added(self, before: Any, new: Any) -> Any:
        return new if before is None else before + new

    def _combined(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Give the tiles the values of a layer of the whole size.

        Raises:
            UsageError: it has another size, or only one of the two has a bias.
        """
        shape = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != shape or (other.bias is not None) is not self.use_bias:
            raise UsageError(
                f"TiledLinear has a weight {list(shape)} and {'a' if self.use_bias else 'no'} bias, the given layer a "
                f"weight {list(other.weight.shape)} and {'no' if other.bias is None else 'a'} bias"
            )
        for row, rows in zip(self.linears, _ranges(self.out_parts), strict=True):
            for tile, columns in zip(row, _ranges(self.in_parts), strict=True):  # type: ignore[call-overload]
                tile.weight.copy_(other.weight[rows, columns])
                if tile.bias is not None:
                    tile.bias.copy_(other.bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """The same of layers that return their output and their bias, which somebody else adds."""

    def _added(self, before: Any, new: Any) -> Any:
        tensor, bias = new
        return super()._added(None if before is None else before[0], tensor), bias

    def _combined(self, outputs: list[Any]) -> Any:
        tensors, biases = zip(*outputs, strict=True)
        present = [bias for bias in biases if bias is not None]
        return super()._combined(list(tensors)), super()._combined(present) if present else None


def _bounds(which: str, features: int, splits: int) -> list[int]:
    """Where parts begin, and the end of the last one."""
    if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= features:
        raise UsageError(f"TiledLinear: {which}_splits={splits!r} has to be between 1 and {features}, the features")
    size, larger = divmod(features, splits)
    return [number * size + min(number, larger) for number in range(splits + 1)]


def _sizes(bounds: list[int]) -> list[int]:
    return [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]


def _ranges(bounds: list[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
