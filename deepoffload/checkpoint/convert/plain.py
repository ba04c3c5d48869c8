"""What a foreign file says that is no large tensor, as values that a checkpoint of ours holds."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from typing import Any

from deepoffload.checkpoint.convert.pickle_reader import Name, Record
from deepoffload.checkpoint.convert.torch_reader import TorchTensor
from deepoffload.errors import UsageError

log = logging.getLogger("deepoffload")

VALUES_MAX = 200_000
TENSOR_BYTES_MAX = 16 << 20
_DEPTH_MAX = 32
_INTEGER_MAX = 1 << 63
_LEFT_OUT = object()


class PlainValues:
    """Copies values, without what is of an unknown class. What was left out is in ``left_out``."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._count = 0
        self.left_out: list[str] = []

    def of(self, value: Any, name: str) -> Any:
        """A copy; None where nothing of it can be kept.

        Raises:
            UsageError: it is too large, or contains itself.
        """
        made = self._copied(value, name, 0)
        return None if made is _LEFT_OUT else made

    def report(self) -> None:
        """Say what was left out."""
        if self.left_out:
            log.warning(
                "%s: left out what is of a class that only its program knows: %s%s",
                self._where,
                ", ".join(self.left_out[:10]),
                f" and {len(self.left_out) - 10} more" if len(self.left_out) > 10 else "",
            )

    def _copied(self, value: Any, name: str, depth: int) -> Any:
        self._count += 1
        if self._count > VALUES_MAX or depth > _DEPTH_MAX:
            raise UsageError(f"{self._where} is damaged: {name[:80]} contains itself, or more than {VALUES_MAX} values")
        kind = type(value)
        if value is None or kind in (bool, str, float, bytes):
            return value
        if kind is int:
            return value if -_INTEGER_MAX <= value < _INTEGER_MAX else self._leave_out(name)
        if kind is TorchTensor:
            nbytes = math.prod(value.shape) * value.dtype.itemsize
            if nbytes > TENSOR_BYTES_MAX:
                return self._leave_out(name)
            return value.read(0, math.prod(value.shape)).view(value.shape)
        if kind in (list, tuple):
            items = [self._copied(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)]
            return kind(None if item is _LEFT_OUT else item for item in items)
        if kind in (dict, OrderedDict):
            copied = {key: self._copied(item, f"{name}[{key!r}]"[:200], depth + 1) for key, item in value.items()}
            return kind((key, item) for key, item in copied.items() if item is not _LEFT_OUT and _is_key(key))
        if isinstance(value, (Record, Name)):
            return self._leave_out(f"{name} ({value.kind if isinstance(value, Record) else value})")
        return self._leave_out(name)

    def _leave_out(self, name: str) -> Any:
        self.left_out.append(name[:160])
        return _LEFT_OUT


def _is_key(key: Any) -> bool:
    return isinstance(key, (str, int, float, bool, bytes, tuple, type(None)))
