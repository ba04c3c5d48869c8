"""Builds models under a budget on one of several ranks: as ``Paging`` does, but all ranks end each engine together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepoffload import offload_context
from tests.support.paging import Paging, Setting
from tests.support.rank_processes import LONG_S


class RankPaging(Paging):
    """Makes paged models of this rank. All ranks make the same ones, in the same order.

    Args:
        nvme_path: of all ranks.
        transport: how bytes get from rank to rank.
    """

    def __init__(self, nvme_path: Path, transport: str) -> None:
        super().__init__(nvme_path)
        self._ranks = {"timeout_s": LONG_S, "transport": transport}
        self._open: list[offload_context] = []

    @contextmanager
    def context(self, setting: Setting, host_budget: int, **config: Any) -> Iterator[offload_context]:
        with super().context(setting, host_budget, ranks=self._ranks, **config) as context:
            self._open.append(context)
            yield context

    def close(self) -> None:
        """End all engines that are open, together with the other ranks."""
        while self._open:
            engine = self._open.pop().engine
            if engine is not None:
                engine.close()
        gc.collect()

    def _enough_bytes(self, build: Callable[[], Any], setting: Setting, budget: int, seed: int) -> int | None:
        enough = super()._enough_bytes(build, setting, budget, seed)
        self.close()
        return enough
