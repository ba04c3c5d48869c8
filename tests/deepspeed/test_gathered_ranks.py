"""``GatheredParameters`` with two real ranks: edits of one rank reach all, and all have the same weights."""

from __future__ import annotations

import pytest
import torch

from tests.deepspeed import gathered_ranks
from tests.support.loops import assert_same_bits
from tests.support.models import mlp, rows
from tests.support.paging import plain
from tests.support.rank_processes import values_of


def expected() -> list[torch.Tensor]:
    model = plain(mlp)
    for part in gathered_ranks.parts_of(model):
        gathered_ranks.edit(part)
    with torch.no_grad():
        return [model(rows()), *(param.detach() for param in model.parameters())]


@pytest.mark.parametrize("host_budget", ["4MiB", "600KiB"])
@pytest.mark.parametrize("modifier_rank", [0, 1])
def test_edits_of_one_rank_reach_all(nvme_path, host_budget, modifier_rank):
    for found in values_of(gathered_ranks.edits_of_one, 2, str(nvme_path), host_budget, modifier_rank):
        assert_same_bits(expected(), [torch.from_numpy(value) for value in found])


@pytest.mark.parametrize(("host_budget", "how"), [("4MiB", "module"), ("480KiB", "context"), ("480KiB", "edited")])
def test_ranks_that_are_seeded_otherwise_build_rank_0s_values(nvme_path, host_budget, how):
    model = plain(gathered_ranks.noisy)
    with torch.no_grad():
        if how == "edited":
            model[0].weight.fill_(2.0)
        wanted = [model[-1].noise, model[:-1](rows()), *(param.detach() for param in model[:-1].parameters())]
    for found in values_of(gathered_ranks.built_in_init, 2, str(nvme_path), host_budget, how):
        assert_same_bits(wanted, [torch.from_numpy(value) for value in found])


def test_all_ranks_make_the_same_edits(nvme_path):
    for found in values_of(gathered_ranks.edits_of_all, 2, str(nvme_path), "4MiB"):
        assert_same_bits(expected(), [torch.from_numpy(value) for value in found])


def test_what_ranks_are_told(nvme_path):
    for said in values_of(gathered_ranks.refusals, 2, str(nvme_path)):
        assert len(said) == 3 and "the ranks are 0 to 1" in said[0]
        assert "0.weight: the local part has" in said[1]
        assert "0.weight has no such value on any rank yet" in said[2]


def test_models_and_tags_of_all_ranks_become_those_of_rank_0(tmp_path):
    ranks = values_of(gathered_ranks.built_by_each, 2, str(tmp_path))
    for before, untouched, _, _ in ranks:
        assert all((one == two).all() for one, two in zip(before, untouched, strict=True)), "a refusal changes nothing"
    (built, _, first, said), (other, _, second, also) = ranks
    assert all((mine != theirs).any() for mine, theirs in zip(built[:1], other[:1], strict=True))
    for found in (first, second):
        assert_same_bits([torch.from_numpy(value) for value in built], [torch.from_numpy(value) for value in found])
    for text in (said, also):
        assert "different tags for one checkpoint: 'of_0' on rank 0, 'of_1' on rank 1" in text
    assert sorted(path.name for path in (tmp_path / "warn").iterdir()) == ["latest", "of_0"]
    assert not (tmp_path / "fail").exists() or not list((tmp_path / "fail").iterdir())
