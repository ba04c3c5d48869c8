"""A loop over tokens is run for few of them, and the answer is that of the whole run, to the byte."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepoffload.config import Config, Precision
from deepoffload.estimate import Batch, MachineSpec, Subject, estimate, from_config
from deepoffload.estimate.lengths import CALLS_MAX
from deepoffload.estimate.recording import DryRun

BF16 = Config(precision=Precision.BF16)
LENGTH = CALLS_MAX + 16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 100, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {"model_type": "mamba", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5,
                         "state_size": 16, "time_step_rank": 8, "vocab_size": 100},
    "JambaForCausalLM": {"model_type": "jamba", **SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2,
                         "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2,
                         "expert_layer_offset": 1, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 8,
                         "use_mamba_kernels": False},
    "RecurrentGemmaForCausalLM": {"model_type": "recurrent_gemma", **SIZES, "num_hidden_layers": 3, "lru_width": 64,
                                  "num_key_value_heads": 1},
}  # fmt: skip


def run(subject: Subject, said: list[str] | None = None) -> DryRun:
    machine = MachineSpec(host_memory_bytes=1 << 34)
    found = estimate(subject, machine, BF16, progress=lambda what, *_: (said if said is not None else []).append(what))
    assert found.run is not None
    return found.run


def differences(subject: Subject, said: list[str] | None = None) -> list[str]:
    quick, whole = run(subject, said), run(replace(subject, loss_at=None))
    return [field.name for field in fields(DryRun) if getattr(quick, field.name) != getattr(whole, field.name)]


@pytest.mark.parametrize(("kind", "checkpointing"), zip(FAMILIES, (False, True, True), strict=True))
def test_few_tokens_tell_what_many_do(tmp_path: Path, kind: str, checkpointing: bool) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**FAMILIES[kind], "architectures": [kind]}))
    said: list[str] = []
    assert not differences(from_config(file, Batch(1, LENGTH), checkpointing=checkpointing), said)
    assert not said, "the short runs were to tell"


class Recurrent(nn.Module):
    """A loop over tokens; from ``late_from`` tokens on it does something that shorter ones do not tell of."""

    def __init__(self, late_from: int, rounds: int = 0) -> None:
        super().__init__()
        self.weight = nn.Linear(12, 12)
        self.late_from, self.rounds = late_from, rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(12, dtype=x.dtype)
        if len(x) >= self.late_from:
            x = x.sin()
        for number in range(self.rounds or len(x)):
            state = self.weight(x[number % len(x)] + state).tanh()
        return state.sum()


def recurrent(late_from: int, rounds: int = 0) -> Subject:
    with torch.device("meta"):
        model = Recurrent(late_from, rounds)

    def loss_at(length: int) -> Any:
        return lambda call: call(torch.zeros(length, 12, dtype=torch.bfloat16))

    return Subject(model, "", "", Batch(1, LENGTH), loss_at(LENGTH), loss_at=loss_at)


def test_what_the_short_runs_do_not_tell_is_run_whole() -> None:
    for late_from, rounds, whole in ((LENGTH + 1, 0, False), (LENGTH, 0, True), (8, 0, True), (LENGTH + 1, 99, True)):
        said: list[str] = []
        assert not differences(recurrent(late_from, rounds), said), (late_from, rounds)
        assert bool(said) is whole, (late_from, rounds)
        assert not whole or f"a loop over {LENGTH} tokens" in said[0]
