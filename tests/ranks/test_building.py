"""Models that several ranks build in parts: the values of one process, in a rank's share of memory and disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepoffload.config.units import parse_bytes
from tests.ranks.building import (
    Looked,
    build_load_train_save,
    build_otherwise,
    large,
    look_back,
    moved_and_said,
    registered_bytes,
    share_bytes,
)
from tests.ranks.saving import digests
from tests.support.rank_processes import values_of


def little(path: Path, host: str) -> dict[str, Any]:
    path.mkdir()
    return {"host_budget": host, "nvme_budget": "256MiB", "nvme_path": str(path), "debug": {"poison": True}}


def test_a_model_eight_times_one_ranks_memory(tmp_path: Path) -> None:
    """Four ranks build, load, train and save it, with the files of one process."""
    torch.manual_seed(8)
    state = large().state_dict()
    save_file({name: value for name, value in state.items() if name != "head.weight"}, tmp_path / "model.safetensors")
    source, each_bytes = str(tmp_path / "model.safetensors"), registered_bytes() // 8
    config = {**little(tmp_path / "swap", "8MiB")}
    alone = values_of(build_load_train_save, 1, config, source, str(tmp_path / "one"))
    config["host_budget"] = str(4 * each_bytes)
    four = values_of(build_load_train_save, 4, config, source, str(tmp_path / "four"))
    for built, norms in four:
        assert norms == alone[0][1]
        assert built["host_peak_bytes"] <= each_bytes
        assert built["nvme_bytes"] + built["host_bytes"] <= share_bytes(4) + each_bytes
    one, all_four = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "four"))
    assert len(one) > 2
    assert one == all_four


@pytest.mark.parametrize("host", ["64MiB", "6MiB"])
def test_the_table_says_what_comes_from_other_ranks(host: str, tmp_path: Path) -> None:
    for line, moved in values_of(moved_and_said, 2, {**little(tmp_path / "swap", host), "debug": {}}):
        text = "from other ranks per step: weights (.*), gradients (.*), (.*) s at the rate of the link"
        said = re.fullmatch(text, line)
        assert said is not None, line
        weights, gradients = (parse_bytes(text) for text in said.groups()[:2])
        assert float(said[3]) > 0
        assert (
            0.5 * weights < moved[0] <= 1.02 * weights if host == "6MiB" else abs(moved[0] - weights) < 0.02 * weights
        )
        assert abs(moved[1] - gradients) <= 0.02 * gradients


@pytest.mark.parametrize("transport", ["group", "memory"])
def test_looks_at_what_was_put_away(transport: str, tmp_path: Path) -> None:
    torch.manual_seed(6)
    plain = digests(Looked().state_dict())
    config = {**little(tmp_path / "swap", "1MiB"), "ranks": {"transport": transport}}
    assert values_of(look_back, 2, config) == [plain, plain]


def test_without_nvme_memory_holds_a_part_each(tmp_path: Path) -> None:
    torch.manual_seed(6)
    plain = digests(Looked().state_dict())
    assert values_of(look_back, 2, {"host_budget": "5MiB"}) == [plain, plain]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("values", "the checksum of the model's values differs between ranks"),
        ("looks", "rank 1 was at edit of 'Linear"),
    ],
)
def test_ranks_that_build_otherwise_are_told(how: str, said: str, tmp_path: Path) -> None:
    for text in values_of(build_otherwise, 2, little(tmp_path / "swap", "1MiB"), how):
        assert said in text
