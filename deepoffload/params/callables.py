"""Functions of torch that run a function of the program's: a distance, a tracker, the implementation of an operator.

The doors stay open in them, so that what the program runs finds every weight that it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepoffload.params.torch_private import lobpcg, triplet_loss

UNASKED: dict[Any, Callable[..., Any]] = {
    F.triplet_margin_with_distance_loss: triplet_loss,
    torch.lobpcg: lobpcg,
}
"""Those written in Python, without their own check for ``__torch_function__``: what they call comes to the doors."""

BY_ELEMENT = frozenset({Tensor.apply_, Tensor.map_, Tensor.map2_})
"""Those of native code. They take tensors as they are: ours have to look plain meanwhile."""


def with_open_doors(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call one of :data:`UNASKED`. Nothing is pinned: each operation inside brings what it takes."""
    return UNASKED[func](*args, **kwargs)
