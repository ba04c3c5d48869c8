"""Checkpoints of small models, loaded in plain PyTorch and paged for inference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepoffload import offload_context
from deepoffload.errors import BudgetError
from tests.support.disks import folder_on_disk
from tests.support.paging import QUICK_BACKEND


class Generation:
    """Loads one checkpoint.

    Args:
        kind: the class of the model.
        checkpoint: its directory. nvme_path: for swap files.
    """

    def __init__(self, kind: type[Any], checkpoint: Path, nvme_path: Path) -> None:
        self.kind = kind
        self.checkpoint = checkpoint
        self.nvme_path = nvme_path

    @classmethod
    def of(cls, build: Callable[[], Any], dtype: torch.dtype, directory: Path) -> Generation:
        """A new checkpoint in a folder of ``directory``, and swap files in another one."""
        torch.manual_seed(0)
        model = build()
        model.to(dtype).save_pretrained(directory / "checkpoint")
        return cls(type(model), directory / "checkpoint", folder_on_disk(directory / "swap"))

    @property
    def file(self) -> Path:
        return self.checkpoint / "model.safetensors"

    def plain(self) -> Any:
        return self.kind.from_pretrained(self.checkpoint, dtype="auto").eval()

    def paged(self, host_budget: int, **config: Any) -> Any:
        said = {"aio": {"backend": QUICK_BACKEND}, "debug": {"poison": True}}
        with offload_context(
            host_budget=host_budget, nvme_path=str(self.nvme_path), inference=True, **(said | config)
        ) as self.context:
            return self.plain()

    def least_bytes(self) -> int:
        """The least budget with which the model is accepted."""
        budget = 16 << 10
        while True:
            try:
                self.paged(budget)
            except BudgetError as error:
                budget = max(error.enough_bytes or 0, budget + 4096)
                continue
            engine = self.context.engine
            if engine is None or engine.placement is None or engine.placement.minimum_bytes >= budget:
                return budget
            budget = engine.placement.minimum_bytes


def weight_bytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())
