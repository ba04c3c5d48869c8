"""``python -m tests.schedules.long [STEPS]``: layer drop, a curriculum and tiles at once, for long, against the same in
memory.

Prints JSON: how far the losses are apart (not at all), by how much memory grew, what was left out, and the faults. For
each layer in tiles that is left out there are at most two: in forward, and in backward.
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
from tests.schedules.models import TiledDroppingGPT
from tests.support.memory_watch import resident_bytes
from tests.support.models import CONTEXT, batch

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
}


def config_of(nvme_path: str, total_curriculum_step: int, gamma: float) -> dict[str, Any]:
    length = {"total_curriculum_step": total_curriculum_step, "difficulty_step": 4}
    return {
        "host_budget": "256KiB",
        "nvme_path": nvme_path,
        "step_overlap": "deferred",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 0.0,
        "progressive_layer_drop": {"enabled": True, "theta": THETA, "gamma": gamma},
        "curriculum_learning": {**CURRICULUM, "schedule_config": length},
        "debug": {"poison": True},
    }


def trained(
    steps: int, nvme_path: str, total_curriculum_step: int = 300, gamma: float = GAMMA, depth: int = 8
) -> dict[str, float]:
    """What both runs have shown."""
    torch.manual_seed(0)
    model = TiledDroppingGPT(depth=depth)
    torch.manual_seed(0)
    config = config_of(nvme_path, total_curriculum_step, gamma)
    engine, *_ = deepoffload.initialize(model=TiledDroppingGPT(depth=depth), config=config)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    settled, found, learned = 0, {"apart": 0.0}, engine.stats()
    for step in range(steps):
        length, theta = engine.curriculum_seqlen(), engine.get_pld_theta()
        torch.manual_seed(step)
        loss = engine(batch(step))  # which cuts it
        engine.backward(loss)
        engine.step()
        torch.manual_seed(step)
        expected = model(batch(step)[:, :length], progressive_layer_drop=True, pld_theta=theta)
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
