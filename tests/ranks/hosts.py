"""What ranks do in the tests of several hosts: each says that it is alone on its host, as launchers say it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepoffload
from deepoffload import CPUAdamW
from deepoffload.errors import DeepOffloadError
from deepoffload.runtime.context import engine_of
from tests.ranks.saving import built, digests, rank, train


@contextmanager
def a_host_each() -> Any:
    """As torchrun starts one process on each of several hosts."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    yield


def trained(config: dict[str, Any]) -> dict[str, Any]:
    """Two steps: the weights after them, and what the engine found of its host."""
    with built(config) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        norms = train(model, optimizer, range(2))
        engine = engine_of(model)
        return {
            "norms": norms,
            "weights": digests(model.state_dict()),
            "hosts": engine.ranks.hosts,
            "local_rank": engine.ranks.local_rank,
            "host_budget_bytes": deepoffload.stats(model)["host_budget_bytes"],
        }


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except DeepOffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def on_two_hosts(folder: str) -> dict[str, Any]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepoffload").addHandler(handler)
    logging.getLogger("deepoffload").setLevel(logging.INFO)
    mine = Path(folder) / f"disk of host {rank()}"
    mine.mkdir()
    found = {"together": trained({"host_budget": "16MiB"})}
    with a_host_each():
        found["apart"] = trained({"host_budget": "16MiB"})
        found["on disk"] = trained({"host_budget": "2MiB", "nvme_path": str(mine)})
        found["by memory"] = error_of(lambda: trained({"host_budget": "16MiB", "ranks": {"transport": "memory"}}))
        missing = str(Path(folder) / "disk of host 0")
        if rank() == 1:
            missing = str(Path(folder) / "not mounted")
        found["missing"] = error_of(lambda: trained({"host_budget": "2MiB", "nvme_path": missing}))
        found["budgets"] = error_of(lambda: trained({"host_budget": ("16MiB", "8MiB")[rank()]}))
        found["after that"] = trained({"host_budget": "16MiB"})
    found["transports"] = [text for text in said if text.startswith("payload between ranks")]
    return found
