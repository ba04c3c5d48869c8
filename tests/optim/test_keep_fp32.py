"""Weights that compute in fp32 in a bf16 or fp16 model: named, listed by transformers, or converted by their module."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepoffload
from deepoffload.config import Config, Precision, parse_config
from deepoffload.errors import ConfigError, UsageError
from deepoffload.estimate.blocks import Planner
from deepoffload.runtime.context import engine_of
from deepoffload.schedule.cost_model import Bandwidths
from tests.models.zoo import t5
from tests.optim.kinds import KINDS, STORED, VARIANTS, Kind
from tests.support.loops import assert_same_bits, in_dtype, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, plain

BF16 = {"precision": "bf16"}


class Gate(nn.Linear):
    """Computes in its own type."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


class Block(nn.Module):
    """Weights of both types in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.gate = Gate(32, 32)
        self.scale = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x)) * self.gate(x) * self.scale.to(x.dtype)


def blocks() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(6)])


KEPT = [Gate, "scale"]


def loaded() -> nn.Sequential:
    """In bf16, but for what is kept."""
    model = blocks().bfloat16()
    for block in model:
        block.gate.float()
        block.scale.data = block.scale.data.float()
    return model


def build(paging: Paging, make: Any, setting: Any, **config: Any) -> Any:
    budget = paging.least_bytes(make, setting, key=("keep_fp32", make))
    room = 64 << 20 if setting.room is None else int(setting.room * budget) + (64 << 10)
    with paging.context(setting, room, **config):
        torch.manual_seed(0)
        return make()


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[Tensor]:
    losses = []
    for step in range(steps):
        loss = model(rows(4, 32, seed=step).bfloat16()).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def types_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", (*KINDS, *STORED, VARIANTS[len(KINDS)]), ids=str)
def test_every_optimizer_has_the_bits_of_ordinary_parameters(paging: Paging, kind: Kind) -> None:
    """Converted from fp32 with ``keep_fp32``: weights and state as of ordinary parameters of these types."""
    for setting in (RESIDENT, EVICTING):
        model = build(paging, blocks, replace(setting, **BF16), keep_fp32=KEPT)
        exact, twin = plain(blocks), loaded()
        assert types_of(model) == types_of(twin)
        assert_same_bits(exact[0].gate.weight.detach(), model[0].gate.weight.detach().clone())
        twin.load_state_dict(weights_of(model))
        optimizer, reference = kind.ours(model.parameters()), kind.ours(twin.parameters())
        reference.load_state_dict(copy_of(optimizer.state_dict()))
        assert_same_bits(train(twin, reference), train(model, optimizer), "losses")
        assert_same_bits(weights_of(twin), weights_of(model))
        expected, got = reference.state_dict()["state"], optimizer.state_dict()["state"]
        for number, entry in expected.items():
            assert_same_bits(dict(sorted(entry.items())), dict(sorted(got[number].items())), str(number))
        assert (deepoffload.stats(model)["evictions"] > 0) == (setting.room is not None)


def test_every_overlap_and_a_model_that_came_with_both_types(paging: Paging) -> None:
    settings = [replace(TIGHT, step_overlap=overlap) for overlap in ("deferred", "none", "in_backward")]
    twin = plain(loaded)
    wanted = train(twin, deepoffload.CPUAdamW(twin.parameters(), lr=1e-2)), weights_of(twin)
    for setting in settings:
        model = build(paging, loaded, setting)
        assert types_of(model) == types_of(twin)
        assert_same_bits(wanted, (train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2)), weights_of(model)))


def test_they_are_saved_and_loaded_in_fp32(paging: Paging, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build(paging, blocks, replace(EVICTING, **BF16), keep_fp32=KEPT)
    train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2))
    values = weights_of(model)
    deepoffload.save_pretrained(model, tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    assert_same_bits(values, {name: on_disk[name] for name in values})
    other = build(paging, blocks, replace(EVICTING, **BF16), keep_fp32=KEPT)
    other.load_state_dict(copy_of(dict(model.state_dict())))
    assert_same_bits(values, weights_of(other))


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (Gate, {"gate.weight", "gate.bias"}),
        ("Gate", {"gate.weight", "gate.bias"}),
        ("Linear", {"up.weight", "up.bias", "gate.weight", "gate.bias"}),
        ("gate", {"gate.weight", "gate.bias"}),
        ("gate.bias", {"gate.bias"}),
        ("3.scale", {"scale"}),
        ([nn.Linear], {"up.weight", "up.bias", "gate.weight", "gate.bias"}),
        (["scale", "up.bias"], {"scale", "up.bias"}),
    ],
)
def test_what_a_name_means(nvme_path: Path, said: Any, kept: set[str]) -> None:
    for make in (blocks, lambda: blocks().bfloat16()):  # converted, and loaded in bf16: both compute in fp32
        config = {"host_budget": "8MiB", "nvme_path": str(nvme_path), "keep_fp32": said, **BF16}
        model = make()
        deepoffload.initialize(model=model, config=config)
        assert {name for name, dtype in types_of(model[3]).items() if dtype is torch.float32} == kept


def test_a_name_that_nothing_has_is_an_error_and_changes_nothing(nvme_path: Path) -> None:
    for said, shown in (
        ("classifier", "'classifier'"),
        ("gat", "'gat'"),
        (nn.Conv2d, "'Conv2d'"),
        (["up", "x"], "'x'"),
    ):
        model = plain(blocks)
        config = {"host_budget": "8MiB", "nvme_path": str(nvme_path), "keep_fp32": said, **BF16}
        with pytest.raises(UsageError, match="keep_fp32 names") as caught:
            deepoffload.initialize(model=model, config=config)
        assert shown in str(caught.value) and "0.up.weight" in str(caught.value)
        assert all(type(param) is nn.Parameter for param in model.parameters())
        assert_same_bits(weights_of(plain(blocks)), weights_of(model))
    for wrong in (3, [None], ""):
        with pytest.raises(ConfigError, match="keep_fp32"):
            parse_config(keep_fp32=wrong)
    assert parse_config({"data_types": {"keep_in_fp32_modules": ["a", "b"]}}).keep_fp32 == ("a", "b")


def test_the_estimators_count_them(paging: Paging) -> None:
    model = build(paging, blocks, replace(RESIDENT, **BF16), keep_fp32=KEPT)
    config = Config(precision=Precision.BF16, keep_fp32=(Gate, "scale"))
    rates = Bandwidths(1e9, 1e9, 1e9, 1e10)
    plan = Planner(blocks(), config).plan(capacity_bytes=60 << 20, nvme_bytes=None, bandwidths=rates)
    placement = engine_of(model).placement
    assert placement is not None
    blocks_of = [[(b.kind, b.name, b.nbytes) for b in each.blocks] for each in (plan.placement, placement)]
    assert blocks_of[0] == blocks_of[1]


# -- transformers ------------------------------------------------------------------------------------------------------


def switch() -> Any:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "num_experts": 4}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **sparse, **tokens))


def nllb_moe() -> Any:
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_experts": 4, "expert_capacity": 16}
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "router_dtype": "float32"}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return NllbMoeForConditionalGeneration(
        NllbMoeConfig(**layers, **heads, **sizes, **tokens, max_position_embeddings=64)
    )


@pytest.mark.parametrize("make", [switch, nllb_moe, t5])
def test_routers_and_lists_of_transformers_train_as_in_plain_pytorch(paging: Paging, make: Any, tmp_path: Path) -> None:
    """Loaded in 16 bits: routers that convert themselves in the first call, and ``wo`` of T5, which fp16 leaves."""
    dtype = torch.float16 if make is t5 else torch.bfloat16
    plain(make).save_pretrained(tmp_path)

    def load() -> Any:
        return make_kind.from_pretrained(tmp_path, dtype=dtype)

    def trained(model: Any) -> Any:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        model.train()
        torch.manual_seed(3)
        ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(3))
        losses = []
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids[:, :8].contiguous()).loss
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses, weights_of(model)

    make_kind = type(make())
    wanted = trained(load())
    assert {value.dtype for value in wanted[1].values()} == {dtype, torch.float32}
    for setting in (RESIDENT, EVICTING):
        assert_same_bits(wanted, trained(build(paging, load, setting)), str(setting))


def test_lists_of_transformers_count_where_the_model_is_converted(paging: Paging) -> None:
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        model = build(paging, t5, replace(RESIDENT, precision=precision))
        assert types_of(model) == types_of(in_dtype(plain(t5), dtype))


def test_a_dtype_attribute_alone_converts_nothing(paging: Paging) -> None:
    def make() -> nn.Sequential:
        model = mlp(64, 4)
        for layer in model:
            layer.dtype = torch.float32  # type: ignore[assignment]
        return model

    model = build(paging, make, replace(RESIDENT, **BF16))
    assert set(types_of(model).values()) == {torch.bfloat16}
