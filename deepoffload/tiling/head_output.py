"""What a linear head puts out where its loss is computed in tiles: logits that are made when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.params.metadata import METADATA
from deepoffload.params.torch_private import make_wrapper, past_doors, tree_map_only
from deepoffload.tiling.linear import LinearInTiles


class HeadOutput(Tensor):
    """``head(hidden)``, not computed yet. Every operation but ``float()`` and ``contiguous()`` makes the logits, and
    works on these.

    Attributes:
        hidden: ``[..., features]``.
    """

    hidden: Tensor
    head: Any
    _made: Tensor | None

    @classmethod
    def of(cls, head: nn.Module, hidden: Tensor, num_classes: int, dtype: torch.dtype) -> HeadOutput:
        """Shows the shape and type that the logits will have."""
        shape = (*hidden.shape[:-1], num_classes)
        made: HeadOutput = make_wrapper(cls, shape, dtype=dtype, device=hidden.device)
        made.hidden = hidden
        made.head = head
        made._made = None
        return made

    @property
    def is_made(self) -> bool:
        """Whether somebody has looked at the logits, and may have changed them."""
        return self._made is not None

    def logits(self) -> Tensor:
        """Them, with a graph; once made, they stay."""
        if self._made is None:
            self._made = self.head.logits(self.hidden).to(_plain(Tensor.dtype, self))
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float and args[0]._made is None:
            one = args[0]
            if _plain(Tensor.dtype, one) is torch.float32:
                return one
            return cls.of(one.head, one.hidden, _plain(Tensor.shape, one)[-1], torch.float32)
        if func is Tensor.contiguous and len(args) == 1 and not kwargs and args[0]._made is None:
            return args[0]  # as what a linear layer puts out is
        if func in METADATA:
            return past_doors(func, args, kwargs)
        args, kwargs = tree_map_only(HeadOutput, HeadOutput.logits, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UnsupportedError(
            f"{func} was called on logits that are not computed yet, past torch's functions; use "
            "outputs.logits.clone(), or do not call tile_loss"
        )


def _plain(attribute: Any, tensor: Tensor) -> Any:
    return past_doors(attribute.__get__, (tensor,))


class Lazily:
    """Stands before the class of a head."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() < 2 or input.shape[-2] == 1:
            return self.logits(input)  # of one token: what generates looks at it at once
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        head: Any = self
        return HeadOutput.of(head, input, head.out_features, dtype)

    def logits(self, input: Tensor) -> Tensor:
        """All of them."""
        found: Tensor = super().forward(input)  # type: ignore[misc]
        return found


class LossHead(Lazily, nn.Linear):
    """A head whose loss is computed in tiles."""


class TiledLossHead(Lazily, LinearInTiles):
    """The same of one that is split."""


LAZY: dict[type, type[nn.Module]] = {nn.Linear: LossHead, LinearInTiles: TiledLossHead}
