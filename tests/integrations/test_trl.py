"""TRL's trainers on a paged policy: the losses and weights of the same run in plain PyTorch, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.params.parameter import OffloadedParameter
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import VOCABULARY, llama
from tests.support.paging import EVICTING, TIGHT, Paging, plain

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = [f"w{number}" for number in range(VOCABULARY - 3)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *WORDS]
    raw = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def text(seed: int, length: int) -> str:
    numbers = torch.randint(0, len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[number] for number in numbers)


def rows(*names: str) -> Any:
    return datasets.Dataset.from_list(
        [{name: text(10 * row + index, 6) for index, name in enumerate(names)} for row in range(8)]
    )


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
    }


def optimizers(model: nn.Module) -> Any:
    return deepoffload.CPUAdamW(model.parameters(), lr=1e-2), None


def sft(model: nn.Module, reference: nn.Module, folder: Path) -> Any:
    args = trl.SFTConfig(**settings(folder), max_length=16)
    return trl.SFTTrainer(
        model, args, train_dataset=rows("text"), processing_class=tokenizer(), optimizers=optimizers(model)
    )


def dpo(model: nn.Module, reference: nn.Module, folder: Path) -> Any:
    args = trl.DPOConfig(**settings(folder), max_length=24)
    data = rows("prompt", "chosen", "rejected")
    return trl.DPOTrainer(
        model, reference, args, train_dataset=data, processing_class=tokenizer(), optimizers=optimizers(model)
    )


def longer(completions: list[str], **others: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(model: nn.Module, reference: nn.Module, folder: Path) -> Any:
    args = trl.GRPOConfig(**settings(folder), num_generations=2, max_completion_length=6, beta=0.0)
    return trl.GRPOTrainer(
        model, longer, args, train_dataset=rows("prompt"), processing_class=tokenizer(), optimizers=optimizers(model)
    )


@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_the_numbers_of_plain_pytorch(make: Any, paging: Paging, tmp_path: Path) -> None:
    def program(model: nn.Module, reference: nn.Module) -> Any:
        torch.manual_seed(3)
        trainer = make(model, reference, tmp_path)
        trainer.train()
        kept = ("loss", "grad_norm", "rewards/margins", "reward", "completions/mean_length")
        history = [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]
        return history, weights_of(model)

    expected = program(plain(llama), plain(llama))
    models = [paging.build(llama, setting, key="llama") for setting in (TIGHT, EVICTING)]
    assert_same_bits(expected, program(*models))
    assert type(models[0].lm_head.weight) is OffloadedParameter
    assert any("loss" in entry for entry in expected[0])


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_by_the_trainer(paging: Paging, tmp_path: Path) -> None:
    """``peft_config`` is put on a model that is paged already."""
    import peft

    def program(model: nn.Module) -> Any:
        torch.manual_seed(3)
        trainer = trl.SFTTrainer(
            model,
            trl.SFTConfig(**settings(tmp_path), max_length=16),
            train_dataset=rows("text"),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]),
            optimizer_cls_and_kwargs=(deepoffload.CPUAdamW, {"lr": 1e-2}),
        )
        trainer.train()
        return [entry.get("loss") for entry in trainer.state.log_history], weights_of(trainer.model)

    assert_same_bits(program(plain(llama)), program(paging.build(llama, TIGHT, key="llama")))
