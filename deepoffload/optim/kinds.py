"""Which optimizers can take over each other's state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_TORCH_KINDS: Mapping[type, str] = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.Adagrad: "adagrad",
    torch.optim.SGD: "sgd",
}


def kind_of_class(made: type) -> str:
    """What has the same kind keeps the same arrays under the same names."""
    return _TORCH_KINDS.get(made, f"{made.__module__}.{made.__qualname__}")
