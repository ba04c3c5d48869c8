"""Memory while a training state is saved and loaded: that of training and a few MiB, however large the state is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.training import ALL

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
WINDOW_BYTES = 32 * MIB
"""At most 24 blocks of 1 MiB for each file or four for reading, and a few MiB for what is converted at a time."""

PROGRAM = """
import json, sys
import torch
from torch import nn
import deepoffload
from tests.support.memory_watch import MemoryWatch, populate

directory, swap, saved, loading, budget = sys.argv[1:]  # loading "train": trains on while it saves

def build(precision):
    torch.manual_seed(0)
    with deepoffload.offload_context(host_budget=int(budget), nvme_path=swap, precision=precision) as context:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(14)])
    return context.engine, model, deepoffload.CPUAdamW(model.parameters(), lr=1e-3)

def step(model, optimizer):
    model(torch.ones(2, 1024, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

tiny = nn.Linear(8, 8)
state = deepoffload.TrainingState(tiny, deepoffload.CPUAdamW(tiny.parameters()))
state.save(directory + "/warm")
state.load(directory + "/warm")
engine, model, optimizer = build(loading if saved == "no" else saved)
populated = populate(engine.pager.tiers.arena)
watch = MemoryWatch()
step(model, optimizer)
step(model, optimizer)
training = watch.take_peak()
state = deepoffload.TrainingState(model, optimizer)
if saved == "no":
    state.load(directory + "/out")
    step(model, optimizer)
else:
    handle = state.save(directory + "/out", wait=loading != "train")
    if loading == "train":
        for _ in range(3):
            step(model, optimizer)
        handle.wait()
numel = sum(p.numel() for p in model.parameters())
print(json.dumps({"populated": populated, "training": training, "peak": watch.take_peak(), "state": numel * 10}))
engine.close()
"""


@pytest.mark.slow
def test_memory_while_saving_and_loading(tmp_path: Path, nvme_path: Path) -> None:
    budget = 16 * MIB
    loads = [("no", "bf16"), ("no", "fp32")] if ALL else [("no", "fp32")]
    for saved, loading in (("bf16", "train"), *([("bf16", "")] if ALL else []), *loads):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(nvme_path), saved, loading, str(budget)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        seen = json.loads(done.stdout.splitlines()[-1])
        print(saved, loading, {key: value / MIB for key, value in seen.items()})
        if not seen["populated"]:
            pytest.skip("the kernel cannot populate a mapping, so what saving takes cannot be told from the budget")
        assert seen["state"] > 8 * budget
        assert seen["peak"] <= seen["training"] + WINDOW_BYTES
