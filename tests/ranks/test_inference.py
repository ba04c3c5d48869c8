"""``inference=True`` with several ranks: each keeps its part of the weights, and generates what it likes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import generating
from tests.support.rank_processes import values_of

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"host_budget": "1200KiB", "nvme_budget": "64MiB", "ranks": {"transport": "memory"}}),
    ("mixtral", {"host_budget": "64MiB", "ranks": {"transport": "group"}}),
]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_ranks_generate_other_lengths(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    generating.MODELS[name]().to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    for found in values_of(generating.generate, 2, name, str(tmp_path), config):
        assert found["differ"] == []
        assert not any(found["state"]) and found["state"]
        assert len(found["refused"]) == 2 and all("inference = true" in text for text in found["refused"])
        if name == "llama":  # the other one is smaller than the pages of its blocks
            assert found["stored"] < 0.6
            assert found["stats"]["disk_bytes_read"] > 0
