"""PEFT on a paged model: the numbers of plain PyTorch for its methods, and what QLoRA leaves in memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.params.parameter import OffloadedParameter
from tests.support.loops import assert_same_bits
from tests.support.models import VOCABULARY, llama
from tests.support.paging import TIGHT, Paging, plain

peft = pytest.importorskip("peft")

METHODS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}
MERGED = ("LoRA", "IA3")


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))


def train(model: Any, seeds: range) -> list[Any]:
    optimizer = deepoffload.CPUAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen = []
    for seed in seeds:
        torch.manual_seed(seed)
        loss = model(input_ids=tokens(seed), labels=tokens(seed)).loss
        loss.backward()
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).clone())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_training_saving_loading_and_merging(method: str, paging: Paging, tmp_path: Path) -> None:
    def program(model: nn.Module, again: nn.Module, folder: Path) -> Any:
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, METHODS[method]())
        seen = train(adapted, range(3))
        adapted.save_pretrained(folder)
        adapted.eval()
        with torch.no_grad():
            seen.append(adapted(input_ids=tokens(9)).logits.clone())
        loaded = peft.PeftModel.from_pretrained(again, folder).eval()
        with torch.no_grad():
            assert_same_bits(seen[-1], loaded(input_ids=tokens(9)).logits.clone())
            if method in MERGED:
                seen.append(adapted.merge_and_unload()(input_ids=tokens(9)).logits.clone())
        return seen

    expected = program(plain(llama), plain(llama), tmp_path / "plain")
    models = [paging.build(llama, TIGHT, key="llama") for _ in range(2)]
    assert_same_bits(expected, program(models[0], models[1], tmp_path / "paged"))
    assert type(models[0].lm_head.weight) is OffloadedParameter


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_base_in_4_bits_stays_as_it_is(paging: Paging, tmp_path: Path) -> None:
    """QLoRA: the packed weights stay in memory, everything else is paged, and the losses are those of plain PyTorch."""
    from transformers import BitsAndBytesConfig

    llama().save_pretrained(tmp_path)
    kind: Any = type(llama())
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)

    def program() -> Any:
        torch.manual_seed(2)
        model = kind.from_pretrained(tmp_path, quantization_config=quantized)
        adapted = peft.get_peft_model(peft.prepare_model_for_kbit_training(model), METHODS["LoRA"]())
        return adapted

    expected = train(program(), range(3))
    with paging.context(TIGHT, 1 << 20):
        adapted = program()
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer.base_layer.weight).__name__ == "Params4bit"
    assert type(layer.lora_A["default"].weight) is OffloadedParameter
    assert_same_bits(expected, train(adapted, range(3)))
