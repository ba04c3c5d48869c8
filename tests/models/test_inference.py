"""Models that are loaded with ``inference=True`` compute the bits of plain ``from_pretrained``, in every budget."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepoffload import stats
from tests.models.zoo import TRANSFORMERS, Family, Inputs
from tests.support.generation import Generation
from tests.support.models import llama
from tests.support.paging import PLENTY_BYTES

EVERY = [pytest.param(family, id=family.name) for family in TRANSFORMERS]

NOT_AS_WANTED = ("Mixtral", "BERT")
"""Families of which transformers merges weights while it loads them, or makes one that no checkpoint has."""


ALL = os.environ.get("INFERENCE") == "all"
"""The long form: both types, more budgets, batches of 1 and 3, caches, beams and samples."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 3},
    "sample": {"do_sample": True, "top_k": 20},
    "sampling beams": {"do_sample": True, "num_beams": 2, "top_p": 0.9},
}


def prompts(family: Family, dtype: torch.dtype) -> list[Inputs]:
    """Of several sequences, of which one is padded on its left; in the long form of one sequence, and of three."""
    first, other = family.prompt(7), family.prompt(8)
    found = [first]
    if ALL:
        found = [
            {key: value[:1].clone() for key, value in first.items()},
            {key: torch.cat([value, other[key][:1]]) for key, value in first.items()},
        ]
    for prompt in found:
        if "attention_mask" in prompt and len(prompt["attention_mask"]) > 1:
            prompt["attention_mask"][0, :2] = 0
    return [{key: _of_type(value, dtype) for key, value in prompt.items()} for prompt in found]


def _of_type(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def generated(model: Any, prompt: Inputs, way: dict[str, Any]) -> torch.Tensor | type[Exception]:
    """Tokens; or what plain PyTorch raises, where a model cannot be asked so."""
    torch.manual_seed(5)
    try:
        tokens: torch.Tensor = model.generate(**prompt, max_new_tokens=5, **way)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        if not ALL:
            raise
        return type(error)
    return tokens


def outcome(model: Any, family: Family) -> dict[str, torch.Tensor | type[Exception]]:
    """Logits with and without a graph, and tokens."""
    dtype = next(model.parameters()).dtype
    given = {key: _of_type(value, dtype) for key, value in family.inputs(5).items()}
    found: dict[str, torch.Tensor | type[Exception]] = {}
    with torch.no_grad():
        found["logits"] = model(**given).logits
    found["logits with a graph"] = model(**given).logits.detach()
    if family.generates:
        for prompt in prompts(family, dtype):
            for name, way in WAYS.items() if ALL else [("greedy", WAYS["greedy"])]:
                found[f"{name}, {len(next(iter(prompt.values())))} sequences"] = generated(model, prompt, way)
    return found


def same(ours: torch.Tensor | type[Exception], theirs: torch.Tensor | type[Exception]) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    return ours is theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ALL else [None])
@pytest.mark.parametrize("family", EVERY)
def test_families_compute_the_bits_of_plain(family: Family, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """``INFERENCE=all`` asks more of each."""
    dtype = dtype or (torch.float32 if family.name in ("Llama", "T5") else torch.bfloat16)
    generation = Generation.of(family.build, dtype, tmp_path)
    # Frozen, too: where a weight wants a gradient, torch computes attention by other kernels.
    expected = outcome(generation.plain().requires_grad_(False), family)
    tokens = [value for name, value in expected.items() if "sequences" in name]
    assert not family.generates or sum(isinstance(each, torch.Tensor) for each in tokens) > len(tokens) // 2
    least = generation.least_bytes()
    for budget in (least, 2 * least, 4 * least, PLENTY_BYTES) if ALL else (least, PLENTY_BYTES):
        paged = generation.paged(budget)
        for name, value in outcome(paged, family).items():
            assert same(value, expected[name]), (name, budget)
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
    build = partial(llama, max_position_embeddings=32_768, rope_parameters=rotary)
    generation = Generation.of(build, torch.bfloat16, tmp_path)
    positions = torch.tensor([[0, 1, 4097, 16_000, 30_001, 32_766, 32_767]])
    tokens = torch.arange(3, 10)[None]
    found = [
        each(input_ids=tokens, position_ids=positions).logits
        for each in (generation.plain(), generation.paged(generation.least_bytes()))
    ]
    assert torch.equal(*found)
    assert not torch.equal(found[0], generation.plain()(input_ids=tokens).logits), "positions mean nothing here"
