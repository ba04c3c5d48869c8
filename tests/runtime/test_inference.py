"""``inference=True``: nothing is trained, weights are read where the checkpoint has them, and only what is used."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

import deepoffload
from deepoffload import stats
from deepoffload.errors import IoFailure, UsageError
from deepoffload.memory.block import is_backed
from tests.support.generation import Generation, weight_bytes
from tests.support.inspect import tiers_of, units_of
from tests.support.models import llama, mixtral
from tests.support.paging import PLENTY_BYTES

TOKENS = torch.arange(3, 15).view(2, 6)


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    """A Llama in bf16 whose vocabulary is much larger than a prompt."""
    build = partial(llama, vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=12)
    return Generation.of(build, torch.bfloat16, tmp_path)


def tokens_of(model: Any, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(TOKENS, max_new_tokens=6, do_sample=False, **more)
    return found


def test_training_is_refused_by_the_name_of_the_key(generation: Generation) -> None:
    model = generation.paged(PLENTY_BYTES)
    assert not any(param.requires_grad for param in model.parameters())
    with pytest.raises(UsageError, match="inference = true"):
        model.requires_grad_(True)
    assert not any(param.requires_grad for param in model.parameters())
    for make in (torch.optim.AdamW, deepoffload.CPUAdamW):
        with pytest.raises(UsageError, match="inference = true"):
            make(model.parameters())
    with pytest.raises(UsageError, match="inference = true"):
        model(TOKENS, labels=TOKENS).loss.backward()
    with pytest.raises(UsageError, match="inference = true"):
        model(TOKENS, return_dict=False)[0].sum().backward()


def test_gradients_of_inputs_flow_through_frozen_weights(generation: Generation) -> None:
    plain, paged = generation.plain(), generation.paged(generation.least_bytes())
    found = []
    for model in (plain, paged):
        inputs = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
        model(inputs_embeds=inputs).logits.float().square().sum().backward()
        found.append(inputs.grad)
    assert torch.equal(found[0], found[1])


@torch.no_grad()
def test_weights_are_read_where_they_lie(generation: Generation) -> None:
    before = generation.file.read_bytes()
    plain = generation.plain()
    model = generation.paged(generation.least_bytes())
    assert all(is_backed(unit.weights) for unit in units_of(model))
    assert stats(model)["nvme_capacity_bytes"] == 0, "room was reserved"
    assert torch.equal(tokens_of(model), tokens_of(plain))
    found = stats(model)
    assert found["disk_bytes_written"] == 0 and found["disk_bytes_read"] > 0
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    table = generation.context.engine.placement.table()  # type: ignore[union-attr]
    assert "checkpoint" in table and "expected per forward pass" in table
    assert generation.file.read_bytes() == before


@torch.no_grad()
def test_a_prompt_in_the_order_of_registration_has_no_faults(generation: Generation) -> None:
    for budget in (3 * generation.least_bytes(), PLENTY_BYTES):
        model = generation.paged(budget)
        model(TOKENS)
        assert stats(model)["faults"] == 0
        for _ in range(3):
            model(TOKENS[:, :1])
        assert stats(model)["faults"] == 0


@torch.no_grad()
def test_a_forward_reads_each_weight_once_whatever_the_batch(generation: Generation) -> None:
    model = generation.paged(generation.least_bytes())
    model(TOKENS)
    read = []
    for count in (1, 8, 64):
        for _ in range(2):
            model(torch.full((count, 1), 5))
        before = stats(model)["disk_bytes_read"]
        for _ in range(4):
            model(torch.full((count, 1), 5))
        read.append((stats(model)["disk_bytes_read"] - before) / 4)
    assert max(read) <= 1.02 * min(read) + 8192
    assert max(read) <= weight_bytes(model) + 8192 * len(units_of(model))


@torch.no_grad()
def test_layers_that_are_cut_between_files_are_read_once_at_every_budget(tmp_path: Path) -> None:
    """Such a layer takes a page more than others, unless all take the same: with room for two layers, each would take
    the place of the one that was read ahead for it, and every layer would be read twice."""
    build = partial(llama, vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=12)
    generation = Generation.of(build, torch.bfloat16, tmp_path)
    generation.plain().save_pretrained(generation.checkpoint, max_shard_size="300KB")
    generation.file.unlink()
    layer_bytes = weight_bytes(generation.plain().model.layers[0])
    for layers in (6.2, 8.4):
        model = generation.paged(int(layers * layer_bytes))
        for _ in range(3):
            model(TOKENS)
        before = stats(model)
        model(TOKENS)
        found = stats(model)
        read_bytes = found["disk_bytes_read"] - before["disk_bytes_read"]
        resident = [unit.weights for unit in units_of(model) if unit.weights.id in tiers_of(model).static]
        left_bytes = weight_bytes(model) - sum(block.nbytes for block in resident)
        assert read_bytes <= 1.25 * left_bytes, "a page at each end is much of such small layers"


@torch.no_grad()
def test_a_weight_that_is_written_to_moves_and_the_checkpoint_stays(generation: Generation) -> None:
    before = generation.file.read_bytes()
    plain, model = generation.plain(), generation.paged(generation.least_bytes())
    for each in (plain, model):
        tokens_of(each)
        each.model.layers[2].mlp.up_proj.weight.mul_(2)
        each.model.layers[4].self_attn.q_proj.weight.data = torch.ones(64, 64, dtype=torch.bfloat16)
    assert torch.equal(tokens_of(model), tokens_of(plain))
    assert torch.equal(tokens_of(model), tokens_of(plain))
    assert stats(model)["disk_bytes_written"] > 0
    assert generation.file.read_bytes() == before


@torch.no_grad()
def test_a_checkpoint_that_is_deleted_or_replaced_is_still_read(generation: Generation, tmp_path: Path) -> None:
    plain, model = generation.plain(), generation.paged(generation.least_bytes())
    expected = tokens_of(plain)
    other = {"model.norm.weight": torch.zeros(64)}
    save_file(other, tmp_path / "other.safetensors")
    os.replace(tmp_path / "other.safetensors", generation.file)
    assert torch.equal(tokens_of(model), expected)
    generation.file.unlink()
    assert torch.equal(tokens_of(model), expected)


@torch.no_grad()
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_checkpoint_that_is_written_to_is_an_error(generation: Generation, damage: str) -> None:
    model = generation.paged(generation.least_bytes())
    tokens_of(model)
    with open(generation.file, "r+b") as file:
        if damage == "truncated":
            file.truncate(10_000)
        else:
            file.seek(-3000, os.SEEK_END)
            file.write(bytes(3000))
    with pytest.raises(IoFailure, match=r"embed_tokens\.weight.*written to after the model was loaded") as caught:
        tokens_of(model)
    assert str(generation.file) in str(caught.value)


def test_a_checkpoint_that_is_written_to_inside_the_context_is_an_error_when_that_ends(generation: Generation) -> None:
    context = deepoffload.offload_context(inference=True, host_budget="64MiB", nvme_path=str(generation.nvme_path))
    with pytest.raises(IoFailure, match=r"model\.embed_tokens\.weight.* more: .*written to") as caught, context:
        model = generation.plain()
        with open(generation.file, "ab") as file:
            file.write(b"?")
    assert model is not None and str(generation.file) in str(caught.value)


@torch.no_grad()
def test_of_a_table_only_the_rows_are_read_that_are_looked_up(generation: Generation) -> None:
    plain, model = generation.plain(), generation.paged(generation.least_bytes())
    table = weight_bytes(model.model.embed_tokens)
    tokens = torch.tensor([[7, 2047, 0, 7]])
    ours = model.model.embed_tokens(tokens)
    assert torch.equal(ours, plain.model.embed_tokens(tokens))
    assert 0 < stats(model)["disk_bytes_read"] - 0 < table * 6, "what was fetched ahead is more than the table"
    assert stats(model)["partial_reads"] == 1
    with pytest.raises(IndexError):
        model.model.embed_tokens(torch.tensor([2048]))
    many = torch.arange(2048)
    assert torch.equal(model.model.embed_tokens(many), plain.model.embed_tokens(many))


@torch.no_grad()
def test_of_stacked_experts_only_the_routed_ones_are_read(tmp_path: Path) -> None:
    build = partial(mixtral, num_local_experts=8, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    generation = Generation.of(build, torch.bfloat16, tmp_path)
    plain, paged = generation.plain(), generation.paged(generation.least_bytes())
    assert torch.equal(tokens_of(paged), tokens_of(plain))
    paged(TOKENS[:1, :1])
    before, parts = stats(paged)["disk_bytes_read"], stats(paged)["partial_reads"]
    paged(TOKENS[:1, :1])
    read = stats(paged)["disk_bytes_read"] - before
    assert stats(paged)["partial_reads"] > parts
    assert read < 0.45 * weight_bytes(paged)
    assert torch.equal(paged(TOKENS).logits, plain(TOKENS).logits)


@torch.no_grad()
def test_after_a_prompt_that_needed_every_expert_tokens_read_only_theirs(tmp_path: Path) -> None:
    """What one pass needed as a whole is not fetched ahead for passes that need parts of it."""
    build = partial(mixtral, num_local_experts=8, hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    generation = Generation.of(build, torch.bfloat16, tmp_path)
    plain, paged = generation.plain(), generation.paged(2 * generation.least_bytes())
    prompt = torch.arange(3, 21).view(3, 6)
    for number in range(4):
        found = paged(prompt).logits
        assert torch.equal(found, plain(prompt).logits)
        for _ in range(4):
            token = found[:1, -1:].argmax(-1)
            found = paged(token).logits
            assert torch.equal(found, plain(token).logits)
            assert stats(paged)["forward_bytes_read"] < 0.3 * weight_bytes(paged), number


@torch.no_grad()
def test_two_engines_read_one_checkpoint(generation: Generation) -> None:
    least = generation.least_bytes()
    one, other = generation.paged(least), generation.paged(least)
    assert torch.equal(tokens_of(one), tokens_of(other))
    generation.context.engine.close()  # type: ignore[union-attr]
    assert torch.equal(tokens_of(one), tokens_of(generation.plain()))


class Counts(nn.Module):
    """Weights in a buffer, as quantised checkpoints have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.arange(1 << 18, dtype=torch.int32))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.packed.sum() + self.weight


@torch.no_grad()
def test_large_integer_buffers_are_paged(tmp_path: Path) -> None:
    with deepoffload.offload_context(host_budget="3MiB", nvme_path=str(tmp_path), inference=True):
        model = nn.Sequential(*[Counts() for _ in range(6)])
    plain = nn.Sequential(*[Counts() for _ in range(6)])
    assert model.state_dict().keys() == plain.state_dict().keys()
    for _ in range(2):
        assert torch.equal(model(torch.ones(4)), plain(torch.ones(4)))
    assert stats(model)["evictions"] > 0


class Tables(nn.Module):
    """Two float buffers: one of a checkpoint, and one that is computed."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        with safe_open(checkpoint, framework="pt") as file:
            self.register_buffer("stored", file.get_slice("stored")[...])
            self.weight = nn.Parameter(file.get_slice("weight")[...])
        self.register_buffer("cache", torch.ones(600, 600))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache += 1
        return x * self.stored.sum() + self.cache.sum() + self.weight


@torch.no_grad()
def test_large_float_buffers_of_a_checkpoint_are_paged_and_others_stay(tmp_path: Path) -> None:
    save_file({"stored": torch.randn(600, 600), "weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with deepoffload.offload_context(host_budget="3MiB", nvme_path=str(tmp_path), inference=True):
        model = nn.Sequential(*[Tables(tmp_path / "model.safetensors") for _ in range(6)])
    plain = nn.Sequential(*[Tables(tmp_path / "model.safetensors") for _ in range(6)])
    assert model.state_dict().keys() == plain.state_dict().keys()
    for _ in range(2):
        assert torch.equal(model(torch.ones(4)), plain(torch.ones(4)))
    assert stats(model)["evictions"] > 0 and stats(model)["disk_bytes_written"] == 0
    assert [name for name, _ in model.named_buffers()] == [f"{number}.cache" for number in range(6)]


@torch.no_grad()
def test_caches_beams_samples_and_assistants(generation: Generation) -> None:
    plain, model = generation.plain(), generation.paged(generation.least_bytes())
    ways: list[dict[str, Any]] = [
        {"cache_implementation": "static"},
        {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
        {"num_beams": 3},
        {"do_sample": True, "top_k": 20},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": llama(vocab_size=2048, num_hidden_layers=1).eval()},
    ]
    for way in ways:
        found = []
        for each in (plain, model):
            torch.manual_seed(3)
            prompt = TOKENS[:1] if {"prompt_lookup_num_tokens", "assistant_model"} & way.keys() else TOKENS
            found.append(each.generate(prompt, max_new_tokens=5, **({"do_sample": False} | way)))
        assert torch.equal(*found), way


def test_auto_classes_load_in_place(generation: Generation) -> None:
    with deepoffload.offload_context(host_budget="64MiB", nvme_path=str(generation.nvme_path), inference=True):
        model = AutoModelForCausalLM.from_pretrained(generation.checkpoint, dtype=torch.bfloat16)
    assert all(is_backed(unit.weights) for unit in units_of(model))
