"""Memory while saving: the budget and a window, however large the model is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs import Programs

MIB = 1 << 20
WINDOW_BYTES = 10 * MIB
"""What saving may take in addition to the budget: a copy window, and Python's own objects."""

PROGRAM = """
import json, sys
import torch, transformers
from torch import nn
import deepoffload
from tests.support.memory_watch import MemoryWatch, give_back, populate, resident_bytes
from tests.support.inspect import tiers_of

kind, directory, swap, budget = sys.argv[1:]

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
give_back()
start = resident_bytes()
with deepoffload.offload_context(host_budget=int(budget), nvme_path=swap, step_overlap="none") as context:
    model = build()
populated = populate(tiers_of(context.engine).arena)
before = resident_bytes()
watch = MemoryWatch()
deepoffload.save_pretrained(model, directory + "/out", max_shard_size="50MB")
print(json.dumps({
    "populated": populated, "start": start, "before": before, "peak": watch.take_peak(),
    "model": sum(p.numel() * p.element_size() for p in model.parameters()),
    "largest": max(p.numel() * p.element_size() for p in model.parameters()),
}))
context.engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "budget_bytes"), [("linear", 48 * MIB), ("mixtral", 96 * MIB)])
def test_memory_while_saving_stays_within_the_budget_and_a_window(
    kind: str, budget_bytes: int, programs: Programs, tmp_path: Path, nvme_path: Path
) -> None:
    done = programs.run(PROGRAM, kind, str(tmp_path), str(nvme_path), str(budget_bytes), timeout_s=250)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    if not seen.pop("populated"):
        pytest.skip("the kernel cannot populate a mapping, so what saving takes cannot be told from the budget")
    assert seen["model"] > 2 * budget_bytes
    assert seen["largest"] > 1.5 * WINDOW_BYTES, "a copy of a parameter would show"
    assert seen["before"] >= seen["start"] + 0.9 * budget_bytes, "the budget is counted before anything is saved"
    assert seen["peak"] <= seen["before"] + WINDOW_BYTES
    saved = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert saved >= seen["model"]
