"""Memory while saving: the budget and a window, however large the model is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
WINDOW_BYTES = 10 * MIB
"""What saving may take beside the budget: a copy window, and Python's own objects."""

PROGRAM = """
import ctypes, gc, json, sys, threading, time
import torch, transformers
from torch import nn
import deepoffload
from deepoffload.checkpoint import pretrained

kind, directory, swap, budget = sys.argv[1:]

def own_bytes():
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))

class Watch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.on = 0, True
        self.start()
    def run(self):
        while self.on:
            self.peak = max(self.peak, own_bytes())
            time.sleep(0.001)
    def end(self):
        self.on = False
        self.join()
        return max(self.peak, own_bytes())

def build():
    if kind == "linear":
        return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)])
    config = transformers.MixtralConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=5,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=8)
    return transformers.MixtralForCausalLM(config).requires_grad_(False)

torch.manual_seed(0)
warm = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2))
with deepoffload.offload_context(host_budget="8MiB", nvme_path=swap, step_overlap="none") as small:
    tiny = nn.Linear(64, 64)
deepoffload.save_pretrained(tiny, directory + "/warm")
deepoffload.save_pretrained(warm, directory + "/warm")
small.engine.close()
del small, tiny, warm
gc.collect()
start = own_bytes()
with deepoffload.offload_context(host_budget=int(budget), nvme_path=swap, step_overlap="none") as context:
    model = build()
arena = context.engine.pager.tiers.arena
MADV_POPULATE_WRITE = 23  # since Linux 5.14: all of the budget counts as used from here on, its contents stay
populated = ctypes.CDLL(None).madvise(
    ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.capacity_bytes), MADV_POPULATE_WRITE)
before = own_bytes()
watch = Watch()
deepoffload.save_pretrained(model, directory + "/out", max_shard_size="50MB")
print(json.dumps({
    "populated": populated, "start": start, "before": before, "peak": watch.end(),
    "model": sum(p.numel() * p.element_size() for p in model.parameters()),
    "largest": max(p.numel() * p.element_size() for p in model.parameters()),
}))
context.engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "budget_bytes"), [("linear", 48 * MIB), ("mixtral", 96 * MIB)])
def test_memory_while_saving_stays_within_the_budget_and_a_window(
    kind: str, budget_bytes: int, tmp_path: Path, nvme_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, kind, str(tmp_path), str(nvme_path), str(budget_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    if seen.pop("populated"):
        pytest.skip("the kernel cannot populate a mapping, so what saving takes cannot be told from the budget")
    assert seen["model"] > 2 * budget_bytes
    assert seen["largest"] > 1.5 * WINDOW_BYTES, "a copy of a parameter would show"
    assert seen["before"] >= seen["start"] + budget_bytes
    assert seen["peak"] <= seen["before"] + WINDOW_BYTES
    saved = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert saved >= seen["model"]
