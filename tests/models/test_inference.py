"""Models that are loaded with ``inference=True`` compute the bits of plain ``from_pretrained``, in every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepoffload import stats
from tests.models.zoo import TRANSFORMERS, Family
from tests.support.generation import Generation, save

EVERY = [pytest.param(family, id=family.name) for family in TRANSFORMERS]

NOT_AS_WANTED = ("Mixtral", "BERT")
"""Families of which transformers merges weights while it loads them, or makes one that no checkpoint has."""


def outcome(model: Any, family: Family) -> list[torch.Tensor]:
    """Logits with and without a graph, and greedy tokens of two prompts of which one is padded."""
    dtype = next(model.parameters()).dtype
    given = {k: value.to(dtype) if value.is_floating_point() else value for k, value in family.inputs(5).items()}
    with torch.no_grad():
        found = [model(**given).logits]
    found.append(model(**given).logits.detach())
    if family.generates:
        prompt = family.prompt(7)
        prompt = {key: value.to(dtype) if value.is_floating_point() else value for key, value in prompt.items()}
        if "attention_mask" in prompt:
            prompt["attention_mask"][0, :2] = 0
        found.append(model.generate(**prompt, max_new_tokens=5, do_sample=False))
    return found


@pytest.mark.parametrize("family", EVERY)
def test_families_compute_the_bits_of_plain(family: Family, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = family.build()
    dtype = torch.float32 if family.name in ("Llama", "T5") else torch.bfloat16
    (tmp_path / "swap").mkdir()
    generation = Generation(type(model), save(model, tmp_path / "checkpoint", dtype), tmp_path / "swap")
    # Frozen, too: where a weight wants a gradient, torch computes attention by other kernels.
    expected = outcome(generation.plain().requires_grad_(False), family)
    for budget in generation.budgets():
        paged = generation.paged(budget)
        for ours, theirs in zip(outcome(paged, family), expected, strict=True):
            assert torch.equal(ours, theirs), budget
        if family.name not in NOT_AS_WANTED:
            assert stats(paged)["disk_bytes_written"] == 0, budget
