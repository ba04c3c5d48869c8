"""Memory that was given back while the program still looks at it."""

from __future__ import annotations

from typing import Generic, TypeVar

from deepoffload.memory.block import Alias

Range = TypeVar("Range")


class Limbo(Generic[Range]):
    """Ranges, each with the questions whether somebody still refers to it."""

    def __init__(self) -> None:
        self._entries: list[tuple[Range, list[Alias]]] = []

    def put(self, what: Range, aliases: list[Alias]) -> None:
        self._entries.append((what, aliases))

    def take_free(self) -> list[Range]:
        """Those whose last alias has gone; they are in here no longer."""
        if not self._entries:
            return []
        free = [entry for entry in self._entries if not any(alias() for alias in entry[1])]
        self._entries = [entry for entry in self._entries if entry not in free]
        return [what for what, _ in free]

    def held(self) -> list[Range]:
        """All of them."""
        return [what for what, _ in self._entries]

    def clear(self) -> None:
        self._entries.clear()
