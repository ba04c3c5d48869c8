"""What malloc keeps of freed activations, against measured training (``python -m benchmarks.estimate.peaks``).

Twelve steps of each model with 4 sequences of 256 tokens and a host budget of 64 MiB, on two cores with glibc 2.36,
torch 2.13 and transformers 5.23. Another run may take one or two of the largest tensor (31 MiB) less or more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepoffload.config import Config, Precision
from deepoffload.estimate import Batch, MachineSpec, estimate, from_module

transformers = pytest.importorskip("transformers")
MIB = 1 << 20
PROCESS_BYTES = 264 * MIB


def llama() -> Any:
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 8000, "intermediate_size": 1376}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=8))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=512, n_layer=8, vocab_size=8000, n_head=8))


@pytest.mark.parametrize(
    ("make", "precision", "checkpointing", "measured_mib"),
    [
        (llama, "bf16", False, 809),
        (llama, "bf16", True, 618),
        (llama, "fp32", False, 967),
        (gpt2, "bf16", False, 1079),
        (gpt2, "bf16", True, 730),
        (gpt2, "fp32", False, 1355),
    ],
)
def test_measured_peaks_are_predicted(make: Any, precision: str, checkpointing: bool, measured_mib: int) -> None:
    with torch.device("meta"):
        model = make()
    if checkpointing:
        model.gradient_checkpointing_enable()
    machine = MachineSpec(nvme_bytes=10**11, host_memory_bytes=16 << 30, process_bytes=PROCESS_BYTES)
    config = Config(precision=Precision(precision), host_budget=64 * MIB)
    found = estimate(from_module(model.train(), Batch(4, 256)), machine, config)
    assert found.memory is not None
    assert found.memory.host_bytes == pytest.approx(measured_mib * MIB, rel=0.06)
