"""New fake tensors, of which it is known what they are like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepoffload.params.torch_private import make_subclass, no_dispatch, refuse_writes


class FakeMaker:
    """Makes tensors as operations under :func:`fake_tensors` do, a few times faster: what they are like is known.

    torch itself makes the first one on each device. The others get the same attributes, none of which depends on the
    tensor, and skip its checks of arguments.
    """

    def __init__(self, mode: Any, kind: type[Tensor]) -> None:
        self._mode, self._kind = mode, kind
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def is_fake(self, value: object) -> bool:
        """Whether it is such a tensor, and none of which torch remembers the values."""
        return type(value) is self._kind and getattr(value, "constant", None) is None

    def fake(self, shape: Any, stride: Any, dtype: Any, device: torch.device, base: Tensor | None, offset: int) -> Any:
        """A new tensor; with ``base`` a view of its storage, from the element ``offset`` on."""
        guard = no_dispatch()
        size = (shape, stride) if base is None else ((0,), (1,))
        plain = torch.empty_strided(*size, dtype=dtype, device="meta")
        if base is not None:
            plain.set_(base.untyped_storage(), offset, shape, stride)
        del guard
        attributes = self._attributes.get(device)
        if attributes is None:
            first = self._kind(self._mode, plain, device)
            self._attributes[device] = dict(vars(first))
            return first
        made = make_subclass(self._kind, plain, False, dispatch_device=True, device_for_backend_keys=device)
        refuse_writes(made)
        vars(made).update(attributes)
        return made
