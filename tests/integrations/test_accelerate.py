"""Accelerate as it is: preparing, accumulating, clipping and saving; its own offloading is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model, init_empty_weights
from torch import nn

import deepoffload
from deepoffload.errors import UnsupportedError, UsageError
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, llama, next_token_loss
from tests.support.paging import EVICTING, TIGHT, Paging


def build() -> nn.Module:
    return TinyGPT(dropout=0.0)


def test_a_loop_that_accumulates_clips_and_resumes(same: Any, tmp_path: Path) -> None:
    def program(model: nn.Module) -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
        seen: list[Any] = []

        def train(seeds: range) -> None:
            for seed in seeds:
                with accelerator.accumulate(model):
                    loss = next_token_loss(model, batch(seed))
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).clone())
                    prepared.step()
                    schedule.step()
                    prepared.zero_grad()
                seen.append(loss.detach().clone())

        train(range(4))
        folder = tmp_path / f"state{len(list(tmp_path.iterdir()))}"
        accelerator.save_state(str(folder))
        train(range(4, 6))
        expected = weights_of(accelerator.unwrap_model(model))
        accelerator.load_state(str(folder))
        train(range(4, 6))
        assert_same_bits(expected, weights_of(model))
        return seen, expected, schedule.get_last_lr()

    same(build, program)


def test_empty_weights_inside_a_context(paging: Paging) -> None:
    torch.manual_seed(0)
    plain = llama()
    with paging.context(TIGHT, 1 << 20):
        with init_empty_weights():
            model = llama()
        assert all(param.is_meta for param in model.parameters())
        model.to_empty(device="cpu")
        model.load_state_dict(plain.state_dict())
    assert_same_bits(weights_of(plain), weights_of(model))


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "cpu_offload": lambda model, folder: cpu_offload(model),
    "disk_offload": lambda model, folder: disk_offload(model, folder),
    "dispatch_model": lambda model, folder: dispatch_model(
        model, {"model": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_offloading_by_accelerate_is_refused(way: str, paging: Paging, tmp_path: Path) -> None:
    model = paging.build(llama, EVICTING)
    before = weights_of(model)
    with pytest.raises(UnsupportedError, match="is paged already.*without device_map"):
        WAYS[way](model, str(tmp_path))
    assert_same_bits(before, weights_of(model))


def test_a_device_map_inside_a_context_is_refused(paging: Paging, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    kind = type(llama())
    with pytest.raises(UsageError, match="lm_head.weight. Load .*from_pretrained without device_map"):
        with paging.context(TIGHT, 1 << 20):
            kind.from_pretrained(
                tmp_path / "model",
                device_map={"model": "cpu", "lm_head": "disk"},
                offload_folder=str(tmp_path / "offload"),
            )
    with paging.context(TIGHT, 1 << 20):
        model = kind.from_pretrained(tmp_path / "model", device_map="cpu")
    assert deepoffload.stats(model)["units"] > 1
