"""Layers that repeat are run a few times, and the answer is that of the whole model, to the byte."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepoffload.config import Config, Precision
from deepoffload.estimate import Batch, MachineSpec, Subject, estimate, from_config, from_counts
from deepoffload.estimate.blocks import UNBOUNDED_BYTES, Planner
from deepoffload.estimate.coarser import coarser
from deepoffload.estimate.decoder import Decoder
from deepoffload.estimate.dry_run import dry_run
from deepoffload.estimate.layers import find_stacks
from deepoffload.estimate.recording import DryRun
from deepoffload.estimate.repeats import dry_run_quickly
from deepoffload.estimate.step_time import estimate_step
from deepoffload.schedule.cost_model import StepOverlap, Workload

RATES = MachineSpec().bandwidths()
BF16 = Config(precision=Precision.BF16)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "hidden_act": "silu",
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **SIZES},
    "MixtralForCausalLM": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **SIZES, "num_experts": 8, "moe_intermediate_size": 16,
                            "head_dim": 8},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", **SIZES, **LATENT, "num_hidden_layers": 8,
                              "first_k_dense_replace": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
                              "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 16, "head_dim": 8,
                          "sliding_window": 8, "sliding_window_pattern": 3,
                          "layer_types": [*(["sliding_attention"] * 2 + ["full_attention"]) * 5, "sliding_attention"]},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_layer": 6, "n_head": 4, "vocab_size": 64},
    "T5ForConditionalGeneration": {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 7,
                                   "num_heads": 4, "vocab_size": 64, "is_encoder_decoder": True, "pad_token_id": 0,
                                   "decoder_start_token_id": 0},
    "BertForMaskedLM": {"model_type": "bert", **SIZES, "hidden_act": "gelu"},
    "FalconForCausalLM": {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 6,
                          "num_attention_heads": 4, "vocab_size": 64},
    "PhiForCausalLM": {"model_type": "phi", **SIZES, "num_key_value_heads": 4, "hidden_act": "gelu_new"},
    "ZambaForCausalLM": {"model_type": "zamba", **SIZES, "num_key_value_heads": 4, "num_hidden_layers": 19,
                         "attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 4, "mamba_d_conv": 2},
}  # fmt: skip


SPLIT = ("LlamaForCausalLM", "T5ForConditionalGeneration")
"""Families whose layers are cut into units, too, and recomputed."""

TOKENS = {"ZambaForCausalLM": 2}
"""Of a model that loops over them; 16 of others."""


def contents_of(model: nn.Module) -> list[object]:
    """Which modules and parameters there are, and where, and which have gradients."""
    return [
        *model.named_modules(remove_duplicate=False),
        *((name, id(param), param.grad) for name, param in model.named_parameters(remove_duplicate=False)),
    ]


def differences(subject: Subject, *, split: bool) -> list[str]:
    """What the two runs do not agree in. ``split``: in the least budget, which cuts layers into their own units."""
    capacity, planner = UNBOUNDED_BYTES, Planner(subject.module, BF16)
    if split:
        capacity = planner.smallest_capacity(nvme_bytes=UNBOUNDED_BYTES, bandwidths=RATES)
    blocks = planner.plan(capacity_bytes=capacity, nvme_bytes=UNBOUNDED_BYTES, bandwidths=RATES)
    contents = contents_of(subject.module)
    assert subject.loss_of is not None
    said = {"windows": blocks.modules, "unit_of": blocks.unit_of, "types": planner.types}
    fast = dry_run_quickly(subject.module, subject.loss_of, **said)
    assert contents_of(subject.module) == contents
    whole = dry_run(subject.module, subject.loss_of, **said)
    assert contents_of(subject.module) == contents
    names = [field.name for field in fields(DryRun) if field.name != "calls"]
    found = [name for name in names if getattr(fast, name) != getattr(whole, name)]
    return found + (["calls"] if set(fast.calls) != set(whole.calls) else [])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_of_few_layers_tells_what_the_whole_model_does(tmp_path: Path, checkpointing: bool) -> None:
    wrong = []
    for kind, settings in FAMILIES.items():
        if checkpointing and kind not in SPLIT:
            continue
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**settings, "architectures": [kind]}))
        subject = from_config(file, Batch(1, TOKENS.get(kind, 16)), checkpointing=checkpointing)
        assert find_stacks(subject.module), kind
        for split in (False, True) if kind in SPLIT else (False,):
            wrong += [f"{kind}, split {split}: {name}" for name in differences(subject, split=split)]
    assert not wrong, wrong


class Uneven(nn.Module):
    """Layers that look alike and do other things by their number: they must be run one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).sin().cos() if number % 2 else layer(x)
        return x.sum()


class Backwards(nn.Module):
    """The list is used from its end, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*reversed(self.layers), *self.layers):
            x = layer(x).relu()
        return x.sum()


def test_layers_that_only_look_alike_are_run_one_by_one() -> None:
    for kind in (Uneven, Backwards):
        with torch.device("meta"):
            model = kind()
        subject = Subject(model, "", "", Batch(1, 4), lambda call: call(torch.zeros(4, 8)))
        assert find_stacks(model) and not differences(subject, split=False), kind


class Turns(nn.Module):
    """Layers of several sorts take turns. The model asks by number of what sort a layer is, and what layers of one sort
    share is let go behind the last of them."""

    def __init__(self, sorts: str) -> None:
        super().__init__()
        self.sorts = sorts
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=sort != "c") for sort in sorts)
        for layer, sort in zip(self.layers, sorts, strict=True):
            layer.sort = sort
        self.table = nn.Linear(8, 8)
        self.ran: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.append(len(self.layers))
        x = self.table(x)
        shared = x.detach().exp()
        for number, layer in enumerate(self.layers):
            y = layer(x * shared if self.sorts[number] == "b" else x)
            x = x + {"a": torch.sin, "b": torch.tanh, "c": torch.exp}[self.sorts[number]](y)
        return x.sum()


@pytest.mark.parametrize(
    ("sorts", "few", "fewest"),
    [("a" * 12, 4, 3), ("aaab" * 6, 12, 8), ("acacbcac" * 4, 16, 8), ("aab" * 6 + "aa", 8, 5), ("ca" + "b" * 9, 6, 5)],
)
def test_layers_that_take_turns(sorts: str, few: int, fewest: int) -> None:
    with torch.device("meta"):
        model = Turns(sorts)
    (stack,) = find_stacks(model)
    for times, expected in ((2, few), (1, fewest)):
        kept = stack.few(times, radius=1)
        assert len(kept) == expected and all(sorts[number] == sorts[at] for at, number in enumerate(kept))
    subject = Subject(model, "", "", Batch(1, 4), lambda call: call(torch.zeros(4, 8)))
    assert not differences(subject, split=False)
    assert model.ran == [few, len(sorts)]


class Sharing(nn.Module):
    """Layers that share parameters: those with the same capital letter have one block, and small ones have none.
    ``own``: layers that share have something else, too. All of them see the first layer's input again."""

    def __init__(self, sorts: str, own: bool) -> None:
        super().__init__()
        blocks = {sort: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for sort in sorts if sort.isupper()}
        self.table = nn.Linear(8, 8)
        self.also = self.again = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(
            nn.ModuleList([blocks[sort], *([nn.Linear(8, 8)] if own else [])]) if sort in blocks else nn.Linear(8, 8)
            for sort in sorts
        )
        self.ran: list[int] = []
        self.recompute = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.append(len(self.layers))
        x = first = self.table(x) * self.also + self.again

        def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(layer, nn.ModuleList):
                return x + layer(x).sin()
            y = torch.stack([x, first]).mean(0)
            for part in layer:
                y = part(y).sin()
            return x + y

        for layer in self.layers:
            x = checkpoint(run, layer, x, use_reentrant=False) if self.recompute else run(layer, x)
        return x.sum()


@pytest.mark.parametrize(
    ("sorts", "own", "few"),
    [
        ("aaA" * 7 + "a", True, 16),
        ("A" * 9, True, 7),
        ("aAaB" * 9 + "a", True, 25),
        ("A" * 9, False, None),
    ],
)
def test_layers_that_share_parameters(sorts: str, own: bool, few: int | None) -> None:
    """``few``: so many of them are run; None: all, since nothing says which of the layers runs."""
    with torch.device("meta"):
        model = Sharing(sorts, own)
    subject = Subject(model, "", "", Batch(1, 4), lambda call: call(torch.zeros(4, 8)))
    for model.recompute in (False, True):
        for split in (False, True):
            model.ran.clear()
            assert not differences(subject, split=split)
            if few is None:
                assert model.ran[-2:] == [len(sorts)] * 2
            else:
                assert model.ran == [few, len(sorts)]


def test_larger_pieces_of_state_take_about_as_long() -> None:
    subject = from_counts(400_000_000, 12, 1024, Batch(1, 64), vocabulary=1000)
    machine = MachineSpec(nvme_bytes=1 << 40)
    off = []
    for budget in (200 << 20, 1 << 30, 3 << 30):
        for overlap in StepOverlap:
            found = estimate(subject, machine, Config(precision=Precision.BF16, host_budget=budget))
            assert found.blocks is not None and found.run is not None
            count = len(found.blocks.placement.blocks)
            larger, pieces_in_one = coarser(found.blocks, most=100)
            assert len(larger.placement.blocks) < count and sum(pieces_in_one.values()) > 100
            seconds = [
                estimate_step(blocks, found.run, machine, Workload(1, overlap), tokens=64).seconds
                for blocks in (found.blocks, larger)
            ]
            off.append((seconds[1] / seconds[0] - 1, budget, overlap.value))
    # these are 100 pieces; what is played has 2000
    assert all(abs(deviation) < 0.05 for deviation, *_ in off), off


def test_larger_pieces_bring_no_memory_that_weights_could_take() -> None:
    """Units of a gigabyte with hundreds of pieces each: four larger pieces are as much as another unit's weights."""
    subject = from_counts(8_000_000_000, 12, 7424, Batch(1, 1024), vocabulary=1000)
    machine = MachineSpec(host_memory_bytes=1 << 40, nvme_bytes=1 << 42, nvme_read_bytes_per_s=3e9)
    off = []
    for budget in (6000 << 20, 9000 << 20):
        found = estimate(subject, machine, Config(precision=Precision.BF16, host_budget=budget))
        assert found.blocks is not None and found.run is not None and len(found.blocks.placement.paged) > 2000
        few, every = (
            estimate_step(
                found.blocks, found.run, machine, Workload(1, StepOverlap.DEFERRED), tokens=1024, pieces_max=most
            ).seconds
            for most in (200, 10**9)
        )
        off.append((few / every - 1, budget))
    # these are 16 pieces of a unit; with memory of their own they took 5 % less
    assert all(abs(deviation) < 0.03 for deviation, _ in off), off


def test_a_model_of_eight_billion_parameters_is_answered_soon(tmp_path: Path) -> None:
    """About a second when the machine has nothing else to do; it was twenty."""
    file = tmp_path / "config.json"
    settings = FAMILIES["LlamaForCausalLM"] | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    subject = from_config(file)
    begun = time.process_time()
    found = estimate(subject, MachineSpec(host_memory_bytes=1 << 36, nvme_bytes=1 << 42), BF16)
    assert found.fits and found.step is not None
    assert time.process_time() - begun < 15
    assert isinstance(from_counts(10**6, 2, 64, vocabulary=1000).module, Decoder)
