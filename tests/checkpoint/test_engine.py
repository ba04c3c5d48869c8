"""``engine.save_checkpoint`` and ``engine.load_checkpoint`` as DeepSpeed's scripts call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepoffload
from deepoffload.errors import UnsupportedError, UsageError
from tests.checkpoint.training import gpt, snapshot
from tests.support.loops import assert_same_bits
from tests.support.models import batch, next_token_loss
from tests.support.programs import Programs

CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
}
FP16 = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 2, "hysteresis": 1}


def engine_of(nvme_path: Path, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = {**CONFIG, "host_budget": "512KiB", "nvme_path": str(nvme_path), **changes}
    return deepoffload.initialize(model=gpt(), config=config)[0]


def train(engine: Any, first: int, count: int) -> list[Any]:
    seen: list[Any] = []
    for step in range(first, first + count):
        for micro in range(2):
            loss = next_token_loss(engine, batch(10 * step + micro))
            engine.backward(loss)
            engine.step()
            seen.append(loss.detach())
        seen += [engine.global_steps, engine.skipped_steps, engine.loss_scale, engine.get_lr()]
    return seen


@pytest.mark.parametrize(
    "precision", [{}, {"bf16": {"enabled": True}}, {"fp16": FP16}], ids=["fp32", "bf16", "fp16_with_overflows"]
)
def test_a_resumed_engine_has_the_same_bits(precision: dict[str, Any], nvme_path: Path, tmp_path: Path) -> None:
    first = engine_of(nvme_path, **precision)
    torch.manual_seed(4)
    before = train(first, 0, 12 if "fp16" in precision else 3)
    if "fp16" in precision:
        assert 0 < first.skipped_steps < 12, "overflows, and steps"
    assert first.save_checkpoint(str(tmp_path), client_state={"epoch": 3, "best": torch.ones(2)}) is True
    step = first.global_steps
    expected = [train(first, step, 4), snapshot(first.module, first.optimizer)]
    second = engine_of(nvme_path, seed=1, **precision)
    torch.manual_seed(5)
    path, client_state = second.load_checkpoint(str(tmp_path))
    assert path == str(tmp_path / f"global_step{step}")
    assert_same_bits({"epoch": 3, "best": torch.ones(2)}, client_state)
    assert_same_bits(expected, [train(second, step, 4), snapshot(second.module, second.optimizer)])
    assert first.load_checkpoint(str(tmp_path))[0] == path, "an engine loads what it has saved itself"
    assert_same_bits(expected, [train(first, step, 4), snapshot(first.module, first.optimizer)])
    assert before
    for engine in (first, second):
        engine.close()


def test_arguments_and_results_of_deepspeed(nvme_path: Path, tmp_path: Path) -> None:
    engine = engine_of(nvme_path)
    assert engine.load_checkpoint(str(tmp_path / "none")) == (None, None)
    with pytest.raises(UsageError, match="no checkpoint 'x'"):
        engine.load_checkpoint(str(tmp_path), tag="x")
    train(engine, 0, 1)
    next_token_loss(engine, batch(1)).backward()
    with pytest.raises(UsageError, match="between backward and step"):
        engine.save_checkpoint(str(tmp_path))
    assert not list(tmp_path.iterdir())
    engine.zero_grad()
    engine.save_checkpoint(str(tmp_path), tag=7, save_latest=False)
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)
    assert engine.load_checkpoint(str(tmp_path), 7)[1] == {}
    with pytest.raises(UsageError, match="a TrainingState already"):
        deepoffload.TrainingState(engine.module)
    with pytest.raises(UsageError, match=r"engine\.save_checkpoint"):
        deepoffload.TrainingState(engine)
    engine.close()


def test_a_function_that_puts_the_weights_in(nvme_path: Path, tmp_path: Path) -> None:
    first = engine_of(nvme_path, bf16={"enabled": True})
    train(first, 0, 2)
    first.save_checkpoint(str(tmp_path))
    expected = {name: value.clone() for name, value in first.module.state_dict().items()}
    second = engine_of(nvme_path, seed=1, bf16={"enabled": True})
    seen: list[str] = []

    def halved(src: dict[str, Tensor], dst: torch.nn.Module) -> None:
        assert dst is second.module
        seen.extend(src)
        assert_same_bits(dict(expected), dict(src))
        for value in {value.data_ptr(): value for value in src.values()}.values():
            value.mul_(0.5)  # the program's own: the files stay as they are
        dst.load_state_dict(src)

    second.load_checkpoint(str(tmp_path), custom_load_fn=halved)
    assert sorted(seen) == sorted(expected)
    loaded, saved = snapshot(second.module, second.optimizer), snapshot(first.module, first.optimizer)
    assert_same_bits({name: value * 0.5 for name, value in expected.items()}, dict(second.module.state_dict()))
    for number, state in loaded["state"].items():
        assert "remainder" not in state or not bool(state["remainder"].any()), "the weights are their own masters"
        assert_same_bits(saved["state"][number]["exp_avg"], state["exp_avg"])
    train(second, 2, 1)

    for wrong in (3, lambda a, b: None):
        with pytest.raises(UsageError, match=r"custom_load_fn\(src=state_dict, dst=module\)"):
            second.load_checkpoint(str(tmp_path), custom_load_fn=wrong)  # type: ignore[arg-type]
    train(second, 3, 1)  # and nothing has changed

    def fails(src: dict[str, Tensor], dst: torch.nn.Module) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        second.load_checkpoint(str(tmp_path), custom_load_fn=fails)
    with pytest.raises(UsageError, match="half loaded"):
        second(batch(0))
    second.load_checkpoint(str(tmp_path))
    assert_same_bits(expected, dict(second.module.state_dict()))
    for engine in (first, second):
        engine.close()


def test_parts_of_a_checkpoint(nvme_path: Path, tmp_path: Path) -> None:
    first = engine_of(nvme_path)
    train(first, 0, 2)
    first.save_checkpoint(str(tmp_path))
    second = engine_of(nvme_path, seed=1)
    second.load_checkpoint(str(tmp_path), load_module_only=True)
    assert second.global_steps == 0 and not second.optimizer.state_dict()["state"]
    second.load_checkpoint(str(tmp_path), load_optimizer_states=False, load_lr_scheduler_states=False)
    assert second.global_steps == 2 and second.lr_scheduler.last_epoch == 0
    for name, param in first.module.named_parameters():
        assert torch.equal(param, second.module.get_parameter(name))
    for engine in (first, second):
        engine.close()


def test_frozen_weights_may_be_left_out(nvme_path: Path, tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = gpt()
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        config = {**CONFIG, "host_budget": "1MiB", "nvme_path": str(nvme_path)}
        return deepoffload.initialize(model=model, config=config)[0]

    first = build(0)
    train(first, 0, 1)
    first.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    second = build(1)
    kept = second.module.blocks[0].mlp[0].weight.detach().clone()
    second.load_checkpoint(str(tmp_path))
    assert torch.equal(second.module.blocks[0].mlp[0].weight, kept)
    assert torch.equal(second.module.blocks[1].mlp[0].weight, first.module.blocks[1].mlp[0].weight)
    for engine in (first, second):
        engine.close()


def test_save_16bit_model(nvme_path: Path, tmp_path: Path) -> None:
    engine = engine_of(nvme_path, bf16={"enabled": True})
    assert engine.save_16bit_model(str(tmp_path)) is True
    found = torch.load(tmp_path / "pytorch_model.bin")
    expected = engine.module.state_dict()
    assert list(found) == list(expected)
    for name, value in found.items():
        assert type(value) is Tensor and torch.equal(value, expected[name])
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr(), "tied weights are stored once"
    for name in ("", "a/b", "..", ".x", "a\0b", "x" * 256):
        with pytest.raises(UsageError, match="no name of a file"):
            engine.save_16bit_model(str(tmp_path), name)
    with pytest.raises(UnsupportedError, match="save_pretrained"):
        engine.save_16bit_model(str(tmp_path), "model.safetensors")
    engine.close()


CHILD = """
import json, sys
from pathlib import Path
import torch
from tests.checkpoint.test_engine import engine_of, train
directory, swap, first, count = sys.argv[1:]
engine = engine_of(Path(swap), seed=1, bf16={"enabled": True})
torch.manual_seed(9)
engine.load_checkpoint(directory)
seen = train(engine, int(first), int(count))
print(json.dumps([value.item() if hasattr(value, "item") else value for value in seen]))
"""


def test_in_a_new_process(programs: Programs, nvme_path: Path, tmp_path: Path) -> None:
    engine = engine_of(nvme_path, bf16={"enabled": True})
    train(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path))
    expected = [value.item() if isinstance(value, Tensor) else value for value in train(engine, 2, 2)]
    engine.close()
    done = programs.run(CHILD, str(tmp_path), str(nvme_path), "2", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
