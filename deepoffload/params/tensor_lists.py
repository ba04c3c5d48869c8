"""``torch._foreach_`` and ``torch._fused_`` functions, which take lists of tensors: one of each list at a time.

That is what torch's own slow path does on the CPU, and it needs the bytes of one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def calls_of_one(args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """The arguments of a call with lists of tensors, as those of calls that take one of each list; None when it has no
    such list."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and len(a) and _has_tensor(a)]
    return _calls(args, kwargs, len(lists[0])) if lists else None


def _calls(args: Any, kwargs: dict[str, Any], count: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for index in range(count):

        def pick(value: Any, index: int = index) -> Any:
            if isinstance(value, (list, tuple)) and len(value) == count:
                return [value[index]]
            return value

        yield tuple(pick(a) for a in args), {key: pick(value) for key, value in kwargs.items()}


def _has_tensor(values: Any) -> bool:
    return any(isinstance(value, Tensor) for value in values)
