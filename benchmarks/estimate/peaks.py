"""Peak memory of small models of transformers against what is predicted.

    python -m benchmarks.estimate.peaks --path /mnt/nvme

Each trains in a separate process, forked before torch has started a thread: twelve steps on 4 sequences of 256 tokens
with a host budget of 64 MiB. The peak is the most of RssAnon + RssShmem, looked at every two milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch._dynamo  # checkpointing loads it: it is part of the process, not of what is predicted
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import deepoffload
from deepoffload.config import Config, Precision
from deepoffload.estimate import Batch, MachineSpec, estimate, from_module
from tests.estimate.child import warm_up
from tests.support.memory_watch import MemoryWatch, give_back, resident_bytes

BATCH, LENGTH, STEPS = 4, 256, 12
BUDGET_BYTES = 64 << 20
ROWS: tuple[dict[str, Any], ...] = (
    {"kind": "llama"},
    {"kind": "llama", "checkpointing": True},
    {"kind": "llama", "inner": 2048},
    {"kind": "llama", "vocabulary": 4000},
    {"kind": "llama", "vocabulary": 16000},
    {"kind": "llama", "precision": "fp32"},
    {"kind": "gpt2"},
    {"kind": "gpt2", "checkpointing": True},
    {"kind": "gpt2", "precision": "fp32"},
    {"kind": "qwen2"},
    {"kind": "qwen2", "checkpointing": True},
    {"kind": "qwen2", "checkpointing": True, "precision": "fp32"},
)


def build(row: dict[str, Any]) -> nn.Module:
    hidden, layers, vocabulary, inner = 512, 8, row.get("vocabulary", 8000), row.get("inner", 1376)
    model: Any
    if row["kind"] == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=hidden, n_layer=layers, vocab_size=vocabulary, n_head=8))
    else:
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocabulary}
        if row["kind"] == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=inner, num_attention_heads=8))
        else:
            heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
            model = Qwen2ForCausalLM(Qwen2Config(**sizes, intermediate_size=4 * hidden, **heads))
    if row.get("checkpointing"):
        model.gradient_checkpointing_enable()
    built: nn.Module = model.train()
    return built


def measured(row: dict[str, Any], path: str) -> dict[str, int]:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    warm_up()
    give_back()
    process_bytes, watch = resident_bytes(), MemoryWatch()
    settings = {"precision": row.get("precision", "bf16"), "host_budget": BUDGET_BYTES}
    with deepoffload.offload_context(settings, nvme_path=path):
        model = build(row)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, row.get("vocabulary", 8000), (BATCH, LENGTH))
    for _ in range(STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"process_bytes": process_bytes, "peak_bytes": watch.take_peak()}


def predicted_bytes(row: dict[str, Any], process_bytes: int) -> int:
    with torch.device("meta"):
        model = build(row)
    machine = MachineSpec(nvme_bytes=10**11, host_memory_bytes=16 << 30, process_bytes=process_bytes)
    config = Config(precision=Precision(row.get("precision", "bf16")), host_budget=BUDGET_BYTES)
    found = estimate(from_module(model, Batch(BATCH, LENGTH)), machine, config)
    if found.memory is None:
        raise SystemExit(found.problem)
    return found.memory.host_bytes


def in_a_process(row: dict[str, Any], path: str) -> dict[str, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found = measured(row, path)
            found["predicted_bytes"] = predicted_bytes(row, found["process_bytes"])
            os.write(writing, json.dumps(found).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"{row} ended with status {status}")
    result: dict[str, int] = json.loads(text)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", required=True, help="directory on the disk")
    path = parser.parse_args().path
    for row in ROWS:
        found = in_a_process(row, path)
        peak, predicted = found["peak_bytes"], found["predicted_bytes"]
        print(f"{row}: {peak / 2**20:.0f} MiB, predicted {predicted / peak - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
