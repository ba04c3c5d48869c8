"""Fine-tune a causal language model of transformers that need not fit in memory: an ordinary loop, nothing else.

python examples/finetune_hf.py --out /tmp/tuned                          # a small Llama with new weights
python examples/finetune_hf.py --model /tmp/tuned --out /tmp/tuned2      # or one from a directory (or the hub)
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from gpt.data import load_text
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

import deepoffload

NEW_MODEL = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model from disk.")
    parser.add_argument("--model", help="a directory or a name; not said: a small Llama with new weights")
    parser.add_argument("--data", type=Path, help="a text file or a directory; not said: Python's standard library")
    parser.add_argument("--out", type=Path, required=True, help="where the weights go, in the Hugging Face layout")
    parser.add_argument("--host-budget", default="24MiB", help="memory for weights, gradients and optimizer state")
    parser.add_argument("--nvme-path", default=".", help="directory for the swap file")
    parser.add_argument("--steps", type=int, default=10)
    said = parser.parse_args()

    rank = int(os.environ.get("RANK", "0"))  # torchrun sets it: the ranks build one model and read other data
    torch.manual_seed(0)
    with deepoffload.offload_context(host_budget=said.host_budget, nvme_path=said.nvme_path, precision="bf16"):
        model = load(said.model)

    tokens = tokenize(said.model, load_text(said.data)[: 1 << 20])
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
    chooser = torch.Generator().manual_seed(rank)
    for step in range(said.steps):
        starts = torch.randint(len(tokens) - 128, (4,), generator=chooser).tolist()
        batch = torch.stack([tokens[start : start + 128] for start in starts]).to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}/{said.steps}  loss {loss.item():.4f}", flush=True)

    deepoffload.save_pretrained(model, said.out)
    if rank != 0:
        return
    stats = deepoffload.stats(model)
    print(
        f"saved in {said.out}; {stats['host_peak_bytes'] / 2**20:.0f} MiB of memory held "
        f"{stats['nvme_bytes'] / 2**20:.0f} MiB of weights, gradients and optimizer state"
    )


def load(name: str | None) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(NEW_MODEL) if name is None else AutoModelForCausalLM.from_pretrained(name)


def tokenize(name: str | None, text: bytes) -> torch.Tensor:
    """The model's own tokens, or bytes where it has no tokenizer."""
    if name is None or (Path(name).is_dir() and not any(Path(name).glob("tokenizer*"))):
        return torch.tensor(list(text))
    return AutoTokenizer.from_pretrained(name)(text.decode(errors="replace"), return_tensors="pt").input_ids[0]


if __name__ == "__main__":
    main()
