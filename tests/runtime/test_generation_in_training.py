"""Loops that generate and train in turns, as reinforcement learning does: a policy, a frozen reference, a sampler that
gets the policy's weights."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepoffload import CPUAdamW, load_pretrained, offload_context, save_pretrained, stats
from deepoffload.memory.block import is_backed
from tests.support.generation import Generation
from tests.support.inspect import units_of
from tests.support.models import llama
from tests.support.paging import QUICK_BACKEND

PROMPTS = torch.arange(3, 15).view(2, 6)


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    build = partial(llama, hidden_size=64, intermediate_size=128, num_hidden_layers=4, attention_dropout=0.0)
    return Generation.of(build, torch.float32, tmp_path)


def checksum(generation: Generation) -> str:
    return hashlib.sha256(generation.file.read_bytes()).hexdigest()


def sampled(model: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    found: torch.Tensor = model.generate(PROMPTS, max_new_tokens=6, do_sample=True, top_k=20)
    return found


def learn(policy: Any, reference: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    """A step towards the tokens that the policy has sampled, held near the reference."""
    with torch.no_grad():
        near = reference(tokens).logits.log_softmax(-1)
    logits = policy(tokens).logits.log_softmax(-1)
    chosen = logits[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
    loss: torch.Tensor = -chosen + 0.1 * (near.exp() * (near - logits)).sum(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_a_policy_generates_between_its_steps(generation: Generation, tmp_path: Path) -> None:
    before = checksum(generation)
    with offload_context(
        host_budget="1MiB", nvme_path=str(tmp_path / "swap"), aio={"backend": QUICK_BACKEND}, debug={"poison": True}
    ):
        policy = generation.plain()
    plain_policy, plain_reference = generation.plain(), generation.plain().requires_grad_(False)
    reference, sampler = generation.paged(generation.least_bytes()), generation.paged(generation.least_bytes())
    optimizer = CPUAdamW(policy.parameters(), lr=1e-2)
    plain_optimizer = CPUAdamW(plain_policy.parameters(), lr=1e-2)
    tokens = []
    for step in range(4):
        tokens.append(sampled(plain_policy, step))
        assert torch.equal(sampled(policy, step), tokens[-1]), step
        assert torch.equal(sampled(sampler, step), tokens[-1]), step
        expected = learn(plain_policy, plain_reference, plain_optimizer, tokens[-1])
        assert torch.equal(learn(policy, reference, optimizer, tokens[-1]), expected), step
        save_pretrained(policy, tmp_path / f"policy {step}")
        load_pretrained(sampler, tmp_path / f"policy {step}")
        assert all(is_backed(unit.weights) for unit in units_of(sampler)), "the sampler has copied the policy"
    assert not torch.equal(tokens[0], tokens[-1]), "nothing was learned"
    assert all(is_backed(unit.weights) for unit in units_of(reference))
    assert stats(reference)["disk_bytes_written"] == stats(sampler)["disk_bytes_written"] == 0
    assert checksum(generation) == before


@torch.no_grad()
def test_weights_of_a_checkpoint_that_are_trained_by_hand_move(generation: Generation) -> None:
    """``inference = true`` refuses an optimizer. A program may still write steps of its own to every weight."""
    before = checksum(generation)
    plain, model = generation.plain(), generation.paged(generation.least_bytes())
    for step in range(3):
        for each in (plain, model):
            torch.manual_seed(step)
            for param in each.parameters():
                param.sub_(torch.randn(param.shape), alpha=0.02)
        assert torch.equal(sampled(model, step), sampled(plain, step)), step
    assert not any(is_backed(unit.weights) for unit in units_of(model))
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert stats(model)["disk_bytes_written"] > 0 and checksum(generation) == before
