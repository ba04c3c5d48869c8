"""``load_pretrained`` on several ranks: the bits of one process, each rank its own ranges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.ranks.loading import Turned, load, load_what_is_wrong
from tests.ranks.training_programs import digest
from tests.support.models import TinyGPT
from tests.support.rank_processes import values_of

Values = dict[str, torch.Tensor]


def weights(dtype: torch.dtype, make: Callable[[], nn.Module] = lambda: TinyGPT(dropout=0.0)) -> Values:
    torch.manual_seed(8)
    model = make()
    return {name: value.to(dtype).contiguous().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("inside", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)])
def test_values_are_those_of_the_file(inside: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    path = tmp_path / "model.safetensors"
    stored = weights(dtype, Turned)
    save_file({name: value for name, value in stored.items() if name != "head.weight"}, path)
    config = {"host_budget": "6MiB", "nvme_budget": "64MiB", "nvme_path": str(tmp_path / "swap"), "precision": "bf16"}
    for found, _ in values_of(load, 2, str(path), config, inside):
        assert found == {name: digest(value.bfloat16()) for name, value in stored.items()}


def test_wrong_files_are_errors_on_all_ranks_and_change_nothing(tmp_path: Path) -> None:
    for kind in ("right", "other values", "damaged"):
        (tmp_path / kind).mkdir()
        values = weights(torch.float32)
        if kind == "other values":
            values["blocks.0.ln1.weight"] = values["blocks.0.ln1.weight"] + 1
        save_file(values, tmp_path / kind / "model.safetensors")
    with open(tmp_path / "damaged" / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    first, last = values_of(load_what_is_wrong, 2, str(tmp_path))
    for errors in (first, last):
        assert "model.safetensors is another file on rank 1 than on rank 0" in errors[0]
    assert "rank 1 has failed at load_pretrained" in first[1]
    assert "is cut off" in first[1]
    assert "is cut off" in last[1]
