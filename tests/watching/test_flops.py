"""The profile of a step has the plain model's operations, and the table of DeepSpeed's profiler."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

import deepoffload
from deepoffload.config.tools import FlopsProfilerConfig
from deepoffload.watching.flops import ModuleCost, Profile
from deepoffload.watching.flops_table import table
from tests.support.models import FAMILIES, TinyGPT, batch, next_token_loss
from tests.support.paging import plain


def counted(model: Any) -> tuple[dict[str, int], int]:
    """Operations of each module's forward, and of the whole backward, of the plain model."""
    with FlopCounterMode(display=False) as forward:
        loss = next_token_loss(model, batch(0))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counts = {name: sum(by_operator.values()) for name, by_operator in forward.get_flop_counts().items()}
    return counts, backward.get_total_flops()


@pytest.mark.parametrize("family", ["gpt", "llama", "mixtral"])
def test_counts_are_those_of_the_plain_model(nvme_path: Path, tmp_path: Path, family: str) -> None:
    build = partial(TinyGPT, depth=2, checkpointing=False) if family == "gpt" else FAMILIES[family]
    flops, backward = counted(plain(build))
    found: list[Profile] = []
    said = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "tables" / "flops.txt")}
    engine, *_ = deepoffload.initialize(
        model=plain(build),
        config={
            "host_budget": "600KiB",
            "nvme_path": str(nvme_path),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "flops_profiler": said,
            "train_batch_size": 2,
        },
    )
    profiler = engine.tools.profiler
    finish = profiler.finish
    profiler.finish = lambda step_s: found.append(finish(step_s)) or found[-1]
    for step in range(3):
        if step == said["profile_step"]:
            with pytest.raises((IndexError, RuntimeError)):
                engine(batch(0) + 10_000)  # the profile is that of the next forward
        engine.backward(next_token_loss(engine, batch(0)))
        engine.step()
    (profile,) = found
    root = type(engine.module).__name__
    called = {name: cost for name, cost in profile.modules.items() if cost.kind != "ModuleList"}
    assert {f"{root}.{name}" if name else root: cost.flops for name, cost in called.items() if cost.flops} == {
        name: count for name, count in flops.items() if name != "Global" and count
    }
    for name in profile.modules.keys() - called.keys():
        layers = [cost.flops for other, cost in called.items() if other.rpartition(".")[0] == name]
        assert profile.modules[name].flops == sum(layers) > 0
    assert profile.backward_flops == backward
    whole = profile.modules[""]
    assert whole.parameters == sum(param.numel() for param in engine.module.parameters())
    assert 0 < whole.seconds and 0 <= whole.waited_s <= whole.seconds
    assert profile.bytes_known and whole.moved_bytes == max(cost.moved_bytes for cost in profile.modules.values())
    assert profile.read_bytes + profile.written_bytes + whole.moved_bytes > 0
    text = (tmp_path / "tables" / "flops.txt").read_text()
    assert "fwd MACs" in text and f"({'blocks' if family == 'gpt' else 'model'})" in text
    engine.close()


def test_the_table_has_what_is_asked_for() -> None:
    profile = Profile(
        {
            "": ModuleCost("Net", 1500, 4_000_000, 2.0, 0.5, 6000),
            "one": ModuleCost("Linear", 500, 1_000_000, 0.5, 0.25, 2000),
            "two": ModuleCost("Block", 1000, 3_000_000, 1.0, 0.25, 4000),
            "two.inner": ModuleCost("Linear", 1000, 3_000_000, 1.0, 0.0, 4000),
        },
        read_bytes=4000,
        written_bytes=2000,
        bytes_known=True,
    )
    text = table(profile, FlopsProfilerConfig(enabled=True, module_depth=1, recompute_fwd_factor=1.0), 8)
    assert "taken as 3 * fwd" in text and "12 M" in text
    assert "depth 1:" in text and "depth 2:" not in text
    assert "MACs        - {'Block': '1.5 MMACs'}" in text and "bytes       - {'Block': '4 KB'}" in text
    assert "    (inner): Linear(1 K = 66.67% Params, 1.5 MMACs = 75% MACs, 1 s = 50% latency, 3 MFLOPS" in text
    profile.backward_flops = 7_000_000
    short = table(profile, FlopsProfilerConfig(enabled=True, detailed=False, top_modules=2), None)
    assert "bwd flops:" in short and "7 M" in short and "Detailed" not in short and "batch size" not in short
    assert "depth 2:" in short and "{'Block': '1 K', 'Linear': '500'}" in short


def test_a_whole_step_in_one_call_is_profiled_one_micro_batch_after_the_other(
    nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, *_ = deepoffload.initialize(
        model=TinyGPT(depth=2),
        config={
            "host_budget": "400KiB",
            "nvme_path": str(nvme_path),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_accumulation_steps": 3,
            "accumulation_order": "vertical",
            "flops_profiler": {"enabled": True, "profile_step": 0, "detailed": False},
        },
    )
    for _ in range(2):
        engine.train_batch(iter([batch(micro) for micro in range(3)]), next_token_loss)
    shown = capsys.readouterr().out
    assert shown.count("deepoffload Flops Profiler") == 1 and "taken as 2 * fwd" in shown
    engine.close()
