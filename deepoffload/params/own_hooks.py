"""Hooks of ours on tensors and nodes, counted, so that they can be left out by a question whether the program has put a
hook on anything meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


class OwnHooks:
    """torch numbers the hooks of all kinds in one row."""

    def __init__(self) -> None:
        self._count = 0

    def put_on(self, there: Any, hook: Callable[..., Any]) -> None:
        """Have ``hook`` called with the gradient of a tensor, or when a node has run."""
        there.register_hook(hook)
        self._count += 1

    def put_before(self, node: Any, hook: Callable[..., Any]) -> None:
        """Have ``hook`` called when a node is about to run."""
        node.register_prehook(hook)
        self._count += 1

    def others(self) -> int:
        """How many hooks there have been in this process, of any kind and put there by anybody, but for these."""
        return RemovableHandle.next_id - self._count
