"""What a forward leaves on the modules of a model, other than in buffers that it changes in place.

One unit may set an attribute, and another one read it: ``self.mean``, ``layer.aux_loss``, a list on the model. In
vertical order all micro-batches pass the first unit before any comes to the second, and would read what the last one
has left there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_VALUES = (int, float, complex, str, bytes, bool)
"""Types of which equal values are the same."""
_OWN_NAMES = frozenset(nn.Module().__dict__)
"""What every module has: parameters, buffers, hooks."""


class KeptAttributes:
    """The attributes of all modules as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = _attributes(model)

    def changed(self) -> str | None:
        """The first attribute that is another one now, such as "rev.mean"; None where all are the same."""
        for name, (value, length) in _attributes(self._model).items():
            before, length_before = self._before.get(name, (_Absent, 0))
            if length != length_before or not _is_same(before, value):
                return name
        return None


class _Absent:
    """Stands for the value of an attribute that was not there."""


def _attributes(model: nn.Module) -> dict[str, tuple[Any, int]]:
    """By name, the attributes that can hold what a forward computes, and how long each is where it is a container."""
    found: dict[str, tuple[Any, int]] = {}
    for prefix, module in model.named_modules():
        values: dict[str, Any] = {key: value for key, value in vars(module).items() if key not in _OWN_NAMES}
        values.update(module._buffers)
        for key, value in values.items():
            if isinstance(value, Tensor) or not callable(value):  # libraries wrap forward for the time of a call
                length = len(value) if isinstance(value, (list, set, Mapping)) else 0
                found[f"{prefix}.{key}".lstrip(".")] = value, length
    return found


def _is_same(before: Any, value: Any) -> bool:
    if before is value:
        return True
    return type(before) is type(value) and isinstance(value, _VALUES) and before == value
