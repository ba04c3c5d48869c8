"""``save_pretrained`` of models of transformers: as transformers' own, and readable by it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import deepoffload
from deepoffload.errors import UnsupportedError

Paged = Callable[..., Any]
Make = Callable[[str], nn.Module]

MODELS = ("llama", "gpt2", "mixtral")


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by name; a name that stands twice fails."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in tensors
                tensors[name] = file.get_tensor(name)
    return tensors


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype is value.dtype, name
        assert torch.equal(got[name], value), name


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    named = dict(reference.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(named)
    for name, param in model.named_parameters():
        assert torch.equal(param.data, named[name]), name


@pytest.mark.parametrize("shard", ["5GB", "60KB"])
@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_transformers(name: str, shard: str, make_model: Make, paged: Paged, tmp_path: Path) -> None:
    plain = make_model(name)
    plain.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    deepoffload.save_pretrained(paged(lambda: make_model(name)), tmp_path / "ours", max_shard_size=shard)
    assert_same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / file).read_text()) == json.loads(
            (tmp_path / "theirs" / file).read_text()
        )
    index = tmp_path / "ours" / "model.safetensors.index.json"
    assert index.exists() == (shard == "60KB")
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map.keys() == stored(tmp_path / "ours").keys()
        for tensor, file in weight_map.items():
            with safe_open(tmp_path / "ours" / file, "pt") as opened:
                assert tensor in opened.keys()  # noqa: SIM118


@pytest.mark.parametrize("shard", ["5GB", "60KB"])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_reads_it_inside_and_outside_the_context(
    name: str, shard: str, make_model: Make, paged: Paged, tmp_path: Path
) -> None:
    plain = make_model(name).eval()
    deepoffload.save_pretrained(paged(lambda: make_model(name)), tmp_path / "out", max_shard_size=shard)
    outside = type(plain).from_pretrained(tmp_path / "out")
    assert_same_parameters(outside, plain)
    inside = paged(lambda: type(plain).from_pretrained(tmp_path / "out"))
    assert_same_parameters(inside, plain)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = plain(tokens).logits
        assert torch.equal(outside(tokens).logits, expected)
        assert torch.equal(inside(tokens).logits, expected)
    deepoffload.save_pretrained(inside, tmp_path / "again")
    assert_same(stored(tmp_path / "again"), stored(tmp_path / "out"))


@pytest.mark.parametrize("name", MODELS)
def test_bf16_models_are_saved_in_bf16_after_training(
    name: str, make_model: Make, paged: Paged, tmp_path: Path
) -> None:
    model = paged(lambda: make_model(name), precision="bf16")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        tokens = torch.randint(0, 256, (2, 12))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {key: param.data.clone() for key, param in model.named_parameters()}
    deepoffload.save_pretrained(model, tmp_path / "out", max_shard_size="60KB")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {torch.bfloat16}
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.dtype is torch.bfloat16
    for key, param in loaded.named_parameters():
        assert torch.equal(param.data, values[key]), key
    loss = model(input_ids=tokens, labels=tokens).loss
    assert torch.isfinite(loss), "training goes on after a save"
    loss.backward()
    optimizer.step()


def test_tied_weights_are_stored_once_and_tied_again(make_model: Make, paged: Paged, tmp_path: Path) -> None:
    deepoffload.save_pretrained(paged(lambda: make_model("gpt2")), tmp_path / "out")
    names = stored(tmp_path / "out").keys()
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    loaded = paged(lambda: type(make_model("gpt2")).from_pretrained(tmp_path / "out"))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_experts_are_stored_one_by_one(make_model: Make, paged: Paged, tmp_path: Path) -> None:
    deepoffload.save_pretrained(paged(lambda: make_model("mixtral")), tmp_path / "out")
    assert stored(tmp_path / "out")["model.layers.1.block_sparse_moe.experts.3.w2.weight"].shape == (64, 96)


def test_models_that_are_not_paged_and_engines_are_saved_too(make_model: Make, tmp_path: Path) -> None:
    plain = make_model("llama")
    plain.save_pretrained(tmp_path / "theirs")
    deepoffload.save_pretrained(plain, tmp_path / "ours")
    assert_same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    engine, *_ = deepoffload.initialize(model=plain, config={"host_budget": "16MiB", "step_overlap": "none"})
    deepoffload.save_pretrained(engine, tmp_path / "engine")
    engine.close()
    assert_same(stored(tmp_path / "engine"), stored(tmp_path / "theirs"))


def test_adapters_are_left_to_peft(make_model: Make, paged: Paged, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(paged(lambda: make_model("llama")), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="adapters"):
        deepoffload.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_log_says_what_was_saved(
    make_model: Make, paged: Paged, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = paged(lambda: make_model("llama"))
    with caplog.at_level(logging.INFO, "deepoffload"):
        deepoffload.save_pretrained(model, tmp_path / "out")
    size = sum(tensor.nbytes for tensor in stored(tmp_path / "out").values())
    assert f"saved {size / 1024:.2f} KiB in 1 file" in caplog.messages[-1]
