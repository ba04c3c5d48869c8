"""``load_pretrained`` with ``inference=True``: the values of ``load_state_dict``, and no copy of what needs none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepoffload import load_pretrained, offload_context, stats
from deepoffload.errors import IoFailure, UsageError
from deepoffload.memory.block import is_backed
from tests.checkpoint.test_load_pretrained import TYPES, Mixed, another, assert_same, bits
from tests.support.inspect import units_of
from tests.support.models import llama
from tests.support.paging import QUICK_BACKEND

TOKENS = torch.arange(3, 15).view(2, 6)
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}


def inference(nvme_path: Path, host_budget: str) -> offload_context:
    return offload_context(
        inference=True,
        host_budget=host_budget,
        nvme_path=str(nvme_path),
        aio={"backend": QUICK_BACKEND},
        debug={"poison": True},
    )


def in_bf16(make: Callable[[], Any]) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
@pytest.mark.parametrize(("tied", "inside"), [(False, True), (True, True), (False, False), (True, False)])
def test_nothing_is_copied_of_sharded_files(tied: bool, inside: bool, nvme_path: Path, tmp_path: Path) -> None:
    plain = in_bf16(lambda: llama(**SIZES, tie_word_embeddings=tied)).eval()
    plain.save_pretrained(tmp_path, max_shard_size="200KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    before = [file.read_bytes() for file in files]
    assert len(files) > 2
    with inference(nvme_path, "256KiB"):
        model = in_bf16(lambda: llama(**SIZES, tie_word_embeddings=tied)).eval()
        written = stats(model)["disk_bytes_written"]
        if inside:
            load_pretrained(model, tmp_path)
    if not inside:
        model.generate(TOKENS, max_new_tokens=2, do_sample=False)  # of what is replaced, most is in memory or comes
        written = stats(model)["disk_bytes_written"]
        load_pretrained(model, tmp_path)
    found = stats(model)
    assert all(is_backed(unit.weights) for unit in units_of(model))
    assert found["disk_bytes_written"] == written and found["nvme_bytes"] == 0, "something was copied"
    ways: list[dict[str, Any]] = [{}, {"num_beams": 3}]
    for way in ways:
        ours, theirs = (each.generate(TOKENS, max_new_tokens=4, do_sample=False, **way) for each in (model, plain))
        assert torch.equal(ours, theirs), way
        for each in (model, plain):  # the next round has another weight
            each.model.layers[3].mlp.down_proj.weight.mul_(-3)
            each.lm_head.weight[5:9] += 1
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert [file.read_bytes() for file in files] == before
    with open(files[-1], "r+b") as file:
        file.truncate(4096)
    with pytest.raises(IoFailure, match=rf"model\..*written to after the model was loaded.*{files[-1].name}"):
        for param in model.parameters():
            param.sum()


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("types", [{}, TYPES])
def test_odd_tensors_have_the_values_of_load_state_dict(
    types: dict[str, Any], inside: bool, nvme_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(another(Mixed, **types), path)

    def built(load: Callable[[nn.Module], object]) -> dict[str, Tensor]:
        torch.manual_seed(1)
        with inference(nvme_path, "256KiB"):
            model = nn.Sequential(Mixed())
            if inside:
                held = model[0].first.weight.detach()
                load(model[0])
                assert torch.equal(held, model[0].second.weight), "a view does not show what is loaded"
        if not inside:
            load(model[0])
        return bits(model)

    assert_same(built(lambda model: load_pretrained(model, path)), built(lambda m: m.load_state_dict(load_file(path))))


@torch.no_grad()
def test_names_that_only_one_side_has(nvme_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    state = another(Mixed)
    del state["wide"], state["first.bias"]
    save_file({**state, "more": torch.ones(3)}, path)
    torch.manual_seed(1)
    expected = Mixed()
    expected.load_state_dict(load_file(path), strict=False)
    torch.manual_seed(1)
    with inference(nvme_path, "256KiB"):
        model = Mixed()
        before = bits(model)
        with pytest.raises(UsageError, match=r"missing there: wide, first\.bias; unknown to the model: more"):
            load_pretrained(model, path)
        assert_same(bits(model), before)
        assert load_pretrained(model, path, strict=False) == (["wide", "first.bias"], ["more"])
    assert_same(bits(model), bits(expected))
    os.unlink(path)
    assert_same(bits(model), bits(expected))


@torch.no_grad()
def test_what_a_program_still_needs_is_copied(nvme_path: Path, tmp_path: Path) -> None:
    """After the context, where a unit cannot lie in a file: a view shows what is loaded, a type that differs is
    converted. The other units lie there all the same, also where the program has set a weight past the doors."""
    plain = in_bf16(lambda: llama(**SIZES)).eval()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    state["model.layers.4.mlp.up_proj.weight"] = state["model.layers.4.mlp.up_proj.weight"].float()
    save_file(state, tmp_path / "model.safetensors")
    with inference(nvme_path, "1MiB"):
        model = in_bf16(lambda: llama(**SIZES)).eval()
    held = model.model.layers[1].mlp.down_proj.weight.detach()
    with torch._C.DisableTorchFunctionSubclass():
        model.model.layers[3].mlp.down_proj.weight.set_(torch.ones(64, 128, dtype=torch.bfloat16))
    load_pretrained(model, tmp_path)
    copied = {unit.name for unit in units_of(model) if not is_backed(unit.weights)}
    assert copied == {f"model.layers.{number}" for number in (1, 4)}
    assert torch.equal(held, plain.model.layers[1].mlp.down_proj.weight), "a view does not show what is loaded"
    assert_same(bits(model), bits(plain))
    for _ in range(2):
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
