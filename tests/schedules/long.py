"""``python -m tests.schedules.long [STEPS]``: layer drop and a curriculum at once, for long, against plain PyTorch.

Prints JSON: how far the losses are apart, by how much memory grew, what was left out, and the faults. Losses are those
of the plain model within the rounding of the update; there is at most one fault for each layer left out.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor

import deepoffload
from tests.schedules.models import DroppingGPT
from tests.support.loops import PlainAdamW
from tests.support.memory_watch import resident_bytes
from tests.support.models import CONTEXT, batch, next_token_loss

THETA, GAMMA = 0.5, 0.05
SETTLED_SHARE = 0.3
"""Of the steps, after which memory must not grow."""
LEARNING_STEPS = 2
"""Nothing is left out in these; the order of updates is known after them."""
CURRICULUM = {
    "enabled": True,
    "min_difficulty": 4,
    "max_difficulty": CONTEXT,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 300, "difficulty_step": 4},
}


def config_of(nvme_path: str) -> dict[str, Any]:
    return {
        "host_budget": "256KiB",
        "nvme_path": nvme_path,
        "step_overlap": "deferred",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 0.0,
        "progressive_layer_drop": {"enabled": True, "theta": THETA, "gamma": GAMMA},
        "curriculum_learning": CURRICULUM,
        "debug": {"poison": True},
    }


def trained(steps: int, nvme_path: str) -> dict[str, float]:
    """What both runs have shown."""
    torch.manual_seed(0)
    model = DroppingGPT()
    torch.manual_seed(0)
    engine, *_ = deepoffload.initialize(model=DroppingGPT(), config=config_of(nvme_path))
    optimizer = PlainAdamW(model, lr=1e-4, weight_decay=0.0)
    settled, found, learned = 0, {"apart": 0.0}, engine.stats()
    for step in range(steps):
        length, theta = engine.curriculum_seqlen(), engine.get_pld_theta()
        short = batch(step)[:, :length]
        torch.manual_seed(step)
        loss = next_token_loss(engine, short)
        engine.backward(loss)
        engine.step()
        torch.manual_seed(step)
        logits = model(short, progressive_layer_drop=True, pld_theta=theta)
        expected = next_token_loss(lambda _, logits=logits: logits, short)  # type: ignore[arg-type]
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["apart"] = max(found["apart"], _apart(loss, expected))
        if step == LEARNING_STEPS - 1:
            learned = engine.stats()
        if step == int(SETTLED_SHARE * steps):
            gc.collect()
            settled = resident_bytes()
    gc.collect()
    stats = engine.stats()
    found |= {name: stats[name] - learned[name] for name in ("faults", "order_mismatches", "disk_bytes_read")}
    found |= {"growth_bytes": resident_bytes() - settled, "left_out": engine.left_out}
    found["left_out_by_plain"] = model.left_out
    engine.close()
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    return abs(one.item() - other.item()) / abs(other.item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(trained(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, directory)))
