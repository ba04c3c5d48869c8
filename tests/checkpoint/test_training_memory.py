"""Memory while a training state is saved, loaded and resumed: that of training and a few MiB, however large it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.training import ALL
from tests.support.programs import Programs

MIB = 1 << 20
WINDOW_BYTES = 32 * MIB
"""At most 24 blocks of 1 MiB for each file or four for reading, and a few MiB for what is converted at a time."""

PRELUDE = """
import json, sys
import torch
from torch import nn
import deepoffload
from tests.support.memory_watch import MemoryWatch, populate
from tests.support.inspect import tiers_of

def build(**said):
    torch.manual_seed(0)
    with deepoffload.offload_context(host_budget=int(sys.argv[1]), **said) as context:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(14)])
    return context.engine, model, deepoffload.CPUAdamW(model.parameters(), lr=1e-3)

def step(model, optimizer):
    model(torch.ones(2, 1024, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def train(engine, model, optimizer):
    "Two steps: whether the budget counts as used now, and the peak."
    populated = populate(tiers_of(engine).arena)
    step(model, optimizer)
    step(model, optimizer)
    return {"populated": populated, "training": watch.take_peak()}

def tell(seen, model):
    numel = sum(p.numel() for p in model.parameters())
    print(json.dumps({**seen, "peak": watch.take_peak(), "state": numel * 10}))

watch = MemoryWatch()
"""

SAVING = """
directory, swap, saved, loading = sys.argv[2:]  # loading "train": trains on while it saves
tiny = nn.Linear(8, 8)
state = deepoffload.TrainingState(tiny, deepoffload.CPUAdamW(tiny.parameters()))
state.save(directory + "/warm")
state.load(directory + "/warm")
engine, model, optimizer = build(precision=loading if saved == "no" else saved, nvme_path=swap)
seen = train(engine, model, optimizer)
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
tell(seen, model)
engine.close()
"""

RESUMING = """
swap, precision, begun = sys.argv[2:]
engine, model, optimizer = build(precision=precision, durability={"every": 1, "path": swap})
state = deepoffload.TrainingState(model, optimizer)
seen = train(engine, model, optimizer)
assert state.resume() == int(begun)
for _ in range(2):
    step(model, optimizer)
    state.commit()
state.commit(wait=True)
tell(seen, model)
engine.close()
"""


def check(programs: Programs, program: str, *arguments: object) -> None:
    """What the program takes in addition to training is a window."""
    budget = 16 * MIB
    done = programs.run(PRELUDE + program, str(budget), *map(str, arguments), timeout_s=250)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(*arguments, {key: value / MIB for key, value in seen.items()})
    if not seen["populated"]:
        pytest.skip("the kernel cannot populate a mapping, so what saving takes cannot be told from the budget")
    assert seen["state"] > 8 * budget
    assert seen["peak"] <= seen["training"] + WINDOW_BYTES


@pytest.mark.slow
def test_memory_while_saving_and_loading(programs: Programs, tmp_path: Path, nvme_path: Path) -> None:
    loads = [("no", "bf16"), ("no", "fp32")] if ALL else [("no", "fp32")]
    for saved, loading in (("bf16", "train"), *([("bf16", "")] if ALL else []), *loads):
        check(programs, SAVING, tmp_path, nvme_path, saved, loading)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"] if ALL else ["bf16"])
def test_memory_while_steps_are_made_durable_and_resumed(precision: str, programs: Programs, tmp_path: Path) -> None:
    for begun in (0, 4):  # steps, of which the first process has made two before it commits
        check(programs, RESUMING, tmp_path, precision, begun)
