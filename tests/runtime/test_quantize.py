"""Weights in 8 and 4 bits: paged, they compute the bits of the same quantised model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepoffload import offload_context, quantize_weights, stats
from deepoffload.errors import UsageError
from tests.support.models import llama

TOKENS = torch.arange(3, 15).view(2, 6)


def model() -> Any:
    torch.manual_seed(0)
    return llama(hidden_size=64, intermediate_size=128, num_hidden_layers=4).to(torch.bfloat16).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_paged_model_has_the_bits_of_one_in_memory(kind: str, tmp_path: Path) -> None:
    expected = quantize_weights(model().requires_grad_(False), kind, group_size=32, head=True)
    exact = model()
    with offload_context(inference=True, host_budget="64KiB", nvme_path=str(tmp_path), debug={"poison": True}):
        paged = model()
        quantize_weights(paged, kind, group_size=32, head=True)
    for each in (expected, paged, exact):
        each.generation_config.pad_token_id = 0
    assert torch.equal(paged(TOKENS).logits, expected(TOKENS).logits)
    say = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(paged.generate(TOKENS, **say), expected.generate(TOKENS, **say))
    assert stats(paged)["evictions"] > 0
    far = (expected(TOKENS).logits - exact(TOKENS).logits).float().norm() / exact(TOKENS).logits.float().norm()
    assert far < (0.03 if kind == "int8" else 0.3), "quantised badly"
    assert sum(param.nbytes for param in paged.parameters()) < 0.8 * sum(param.nbytes for param in exact.parameters())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_within_half_a_step(dtype: torch.dtype) -> None:
    """Where a weight is what the format can say, the product is what nn.Linear computes of it."""
    linear = nn.Sequential(nn.Linear(128, 32, dtype=dtype)).requires_grad_(False)
    x = torch.eye(128, dtype=dtype)
    weight = linear[0].weight.float().clone()
    bias = linear[0].bias.float()
    quantize_weights(linear, "int8")
    error = (linear(x).float() - bias).t() - weight
    assert (error.abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.51 + 2**-8 * weight.abs() + 0.004).all()


def test_mistakes_are_refused_before_anything_changes() -> None:
    trained = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(UsageError, match=r"0\.weight is trained"):
        quantize_weights(trained, "int8")
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    tied[1].weight = tied[0].weight
    with pytest.raises(UsageError, match="tied"):
        quantize_weights(tied, "int8")
    narrow = nn.Sequential(nn.Linear(64, 64), nn.Linear(48, 64)).requires_grad_(False)
    with pytest.raises(UsageError, match=r"\[64, 48\].*group_size = 32"):
        quantize_weights(narrow, "int4", group_size=32)
    assert type(narrow[0]) is nn.Linear
    for kind, group in (("int2", 128), ("int4", 100)):
        with pytest.raises(UsageError):
            quantize_weights(narrow, kind, group)
