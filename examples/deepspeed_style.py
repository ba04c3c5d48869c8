"""For those who come from DeepSpeed: the same calls, the same JSON, and a budget instead of buffer counts.

python examples/deepspeed_style.py --deepspeed_config examples/ds_config.json
"""

from __future__ import annotations

import argparse

import torch
from gpt.data import Batches, load_text
from gpt.model import GPT, SIZES
from torch import Tensor
from torch.utils.data import Dataset

import deepoffload

SEQ = 64


class Stretches(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of the standard library's source: inputs and targets."""

    def __init__(self, count: int) -> None:
        self._batches = Batches(load_text(None), batch=1, seq=SEQ, seed=0)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._batches[number]
        return tokens[0], targets[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a 10 M GPT the way DeepSpeed scripts do.")
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE", help="JSON with DeepSpeed's keys or ours")
    said = parser.parse_args()

    torch.manual_seed(0)
    with deepoffload.offload_context(said.deepspeed_config):  # optional: a model built before is taken, too
        model = GPT(SIZES["10m"], SEQ)
    engine, _, loader, _ = deepoffload.initialize(args=said, model=model, training_data=Stretches(80))

    for tokens, targets in loader:
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.was_step_applied():
            print(
                f"step {engine.global_steps}  loss {loss.item():.4f}  lr {engine.get_lr()[0]:.1e}  "
                f"gradient norm {engine.get_global_grad_norm():.3f}",
                flush=True,
            )
    engine.close()


if __name__ == "__main__":
    main()
