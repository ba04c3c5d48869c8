"""``model.to(device)``: a paged model stays where it computes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import MODULE_APPLY
from deepoffload.params.unit import ParamHandle

MOVES = ("to", "cpu", "cuda", "xpu", "ipu")
"""Functions of tensors that may move them."""


def of_moved_model(tensor: Any, result: Any) -> Any:
    """What one of :data:`MOVES` returns for ``tensor``, whose copy ``result`` is.

    ``model.to(device)`` would replace every paged parameter by an ordinary one; ``param.to(device)`` is a copy. A model
    that is still being built goes to its device when the context ends: until then it stays where it is.

    Raises:
        UnsupportedError: the call is one of a whole model.
    """
    if not isinstance(result, Tensor) or result.device == tensor.device:
        return result
    slot = tensor._slot
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is MODULE_APPLY:
            building = isinstance(slot, ParamHandle) and slot.unit is None and slot.pager.life.closed_because is None
            if building and result.device == slot.pager.memory.device:
                return tensor if result.dtype is tensor.dtype else result.to(tensor.device)
            raise UnsupportedError(
                f"a paged model stays on its device ({tensor.device}), it cannot be moved to {result.device}: its "
                "bytes come and go by themselves. Save it with deepoffload.save_pretrained and load it elsewhere, or "
                "copy.deepcopy it"
            )
        frame = frame.f_back
    return result
