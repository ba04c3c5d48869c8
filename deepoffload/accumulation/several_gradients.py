"""Hooks that wait for the gradients of several tensors (``torch.autograd.graph.register_multi_grad_hook``).

Such a hook counts the gradients of one backward. Where the last unit and the loss have an early one, it would be called
twice, with a part of the gradients each time. torch does not tell which nodes have one. But each is a function that
``register_multi_grad_hook`` has made, and a function refers to its code. So the references to this code tell whether
there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType

from torch.autograd.graph import register_multi_grad_hook


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of functions that it makes, and of those that these make."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes_in(inner)


def _references(codes: tuple[CodeType, ...]) -> int:
    return sum(sys.getrefcount(code) for code in codes)


def _makes_one() -> None:
    def never() -> None:
        """Is never made: nothing but the code around it refers to its code."""


_CODES = tuple(_codes_in(register_multi_grad_hook.__code__))
_WITHOUT = len(_CODES) * _references(tuple(_codes_in(_makes_one.__code__)))


def wait_for_several() -> bool:
    """Whether there are such hooks in this process."""
    return _references(_CODES) > _WITHOUT
