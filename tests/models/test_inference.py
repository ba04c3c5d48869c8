"""Models that are loaded with ``inference=True`` compute the bits of plain ``from_pretrained``, in every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepoffload import stats
from tests.models.zoo import TRANSFORMERS, Family
from tests.support.generation import Generation, save
from tests.support.models import llama
from tests.support.paging import PLENTY_BYTES

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
    for budget in (generation.least_bytes(), PLENTY_BYTES):
        paged = generation.paged(budget)
        for ours, theirs in zip(outcome(paged, family), expected, strict=True):
            assert torch.equal(ours, theirs), budget
        if family.name not in NOT_AS_WANTED:
            assert stats(paged)["disk_bytes_written"] == 0, budget


ROTARY: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8192},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


@torch.no_grad()
@pytest.mark.parametrize("rotary", ROTARY, ids=[str(rotary["rope_type"]) for rotary in ROTARY])
def test_positions_up_to_32_k(rotary: dict[str, Any], tmp_path: Path) -> None:
    """Rotary frequencies stay fp32: in bf16 the angles at such positions would be noise."""
    torch.manual_seed(0)
    model = llama(max_position_embeddings=32_768, rope_parameters=rotary)
    (tmp_path / "swap").mkdir()
    generation = Generation(type(model), save(model, tmp_path / "checkpoint", torch.bfloat16), tmp_path / "swap")
    positions = torch.tensor([[0, 1, 4097, 16_000, 30_001, 32_766, 32_767]])
    tokens = torch.arange(3, 10)[None]
    found = [
        each(input_ids=tokens, position_ids=positions).logits
        for each in (generation.plain(), generation.paged(generation.least_bytes()))
    ]
    assert torch.equal(*found)
    assert not torch.equal(found[0], generation.plain()(input_ids=tokens).logits), "positions mean nothing here"
