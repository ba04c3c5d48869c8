"""Hooks in torch's global registries that do not keep what they call alive."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch.utils.hooks import RemovableHandle


class WatchHook:
    """Calls a method of a watch, as long as that lives.

    The watch of an engine that nobody closes dies in any collection of garbage, also while torch goes through the
    registry. So its hooks stay, and do nothing, until a watch begins or ends: it calls :func:`remove_dead`.

    Attributes:
        watch: a weak reference to it.
        handles: of the hooks that end together; one of them has them.
    """

    handles: tuple[RemovableHandle, ...] = ()

    def __init__(self, watch: object, method: str) -> None:
        self.watch: weakref.ref[Any] = weakref.ref(watch)
        self._method = method

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __call__(self, *args: Any) -> None:
        watch = self.watch()
        if watch is not None:
            getattr(watch, self._method)(*args)


def remove_dead(registry: Mapping[int, Any]) -> None:
    """Remove the hooks of watches that have died from a registry of torch's."""
    for hook in list(registry.values()):
        if isinstance(hook, WatchHook) and hook.watch() is None:
            hook.remove()
