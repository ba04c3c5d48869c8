"""A store of torch's whose calls end, also when its host does not answer any more.

The store is where ranks tell each other what has gone wrong. It lives in one process: the launcher's, or that of rank
0. When that process is stopped, torch's calls wait without a limit. So each runs in a separate thread, which is left
behind when it takes too long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from deepoffload.ranks.collectives import LinkError, first_line

ANSWERS_WITHIN_S = 10.0
"""How long the store's host may take: it may be a rank that writes a checkpoint."""


class LimitedStore:
    """The calls of a store that ranks use. After one that has failed all raise LinkError at once.

    Args:
        store: a connection of which all users make these calls only. One at a time goes through it: none waits for a
            key.
        limit_s: how long a call may take.
    """

    def __init__(self, store: dist.Store, limit_s: float = ANSWERS_WITHIN_S) -> None:
        self._store = store
        self._limit_s = limit_s
        self._lost: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether every call raises."""
        return self._lost is not None

    def set(self, key: str, value: str | bytes) -> None:
        self._call(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._call(self._store.get, key)
        return value

    def delete_key(self, key: str) -> None:
        self._call(self._store.delete_key, key)

    def check(self, key: str) -> bool:
        return bool(self._call(self._store.check, [key]))

    def add(self, key: str, amount: int) -> int:
        return int(self._call(self._store.add, key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        found: bytes = self._call(self._store.compare_set, key, expected, value)
        return found

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._lost is not None:
            raise LinkError(self._lost)
        ended: list[tuple[Any, RuntimeError | None]] = []
        over = threading.Event()

        def run() -> None:
            try:
                ended.append((call(*arguments), None))
            except RuntimeError as error:
                ended.append((None, error))
            over.set()

        threading.Thread(target=run, name="deepoffload store", daemon=True).start()
        if not over.wait(self._limit_s):
            self._lost = f"the store's host has not answered within {self._limit_s:g} s"
            raise LinkError(self._lost)
        (value, error), *_ = ended
        if error is not None:
            self._lost = f"the store's host has gone ({first_line(error)})"
            raise LinkError(self._lost) from error
        return value
