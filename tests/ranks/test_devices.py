"""Several ranks, each with its own device: the bits of one process on such a device, and no missing wait.

The device is simulated. It holds what is copied back until something waits for it, and fails where nothing orders two
accesses.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deepoffload
import deepoffload.deepspeed as deepspeed
from deepoffload.config import parse_config
from deepoffload.errors import UnsupportedError
from deepoffload.ranks.places import RankMap
from deepoffload.runtime.device import find_accelerator
from tests.ranks.matrix import cell
from tests.ranks.training_programs import LEAST, Job, check_all, digest
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.rank_processes import values_of

ROOMY: dict[str, Any] = {"host_budget": "64MiB"}
TIGHT = {"host_budget": LEAST, "nvme_budget": "64MiB", "device_budget": "320KiB", "precision": "bf16"}
EVICTED = {"host_budget": "16MiB", "nvme_budget": "64MiB", "debug": {"evict_always": True, "poison": True}}
VERTICAL = {"accumulation_order": "vertical", "activations": "recompute"}


def on_device(*jobs: Job) -> list[Job]:
    return [replace(job, device="simgpu") for job in jobs]


def test_a_gpt(tmp_path: Path) -> None:
    jobs = on_device(
        cell("gpt", "fp32", "memory", "memory", "none", micro_batches=3),
        cell("gpt", "bf16", "group", "least", "deferred", micro_batches=2),
        cell("gpt", "fp16", "memory", "evicted", "deferred"),
        cell("gpt", "bf16", "memory", "evicted", "in_backward", micro_batches=2),
        cell("gpt", "bf16", "memory", "least", "speculative"),
        Job(config={**TIGHT, **VERTICAL}, micro_batches=2, steps=2, accumulates=True, torch_clips=True),
    )
    found = check_all(jobs, tmp_path)
    assert all(rank.stats["device_evictions"] > 0 for rank in found[5])


def test_what_programs_do(tmp_path: Path) -> None:
    jobs = on_device(
        *(Job(config=EVICTED, between_steps=what, steps=3) for what in ("evaluation", "edits", "gradient looks")),
        Job(config=ROOMY, between_steps="views"),
        *(Job(config=ROOMY, before_step=what) for what in ("gradient looks", "gradient edits")),
        Job(config=ROOMY, before_step="looks", between_steps="drops", micro_batches=2),
        *(Job(config=ROOMY, uneven=how, micro_batches=micro) for how, micro in (("layer drop", 2), ("other order", 1))),
        Job(config=ROOMY, uneven="turns", before_step="turns", steps=2),
        Job(config={**ROOMY, "step_overlap": "speculative"}, clipped=(1, 3), steps=5),
        Job(config={**ROOMY, "precision": "fp16"}, overflows=(1,), scale=64.0, clip=None),
    )
    check_all(jobs, tmp_path)


def test_families(tmp_path: Path) -> None:
    models = ("llama", "t5", "gpt-checkpointed", "gpt-reentrant")
    check_all(on_device(*(Job(model=model, config=EVICTED) for model in models)), tmp_path)


def test_four_ranks(tmp_path: Path) -> None:
    """Other families than a GPT are trained on two devices, and by four ranks without devices."""
    job = cell("gpt", "bf16", "memory", "least", "deferred", data_ranks=4, micro_batches=2, steps=2)
    check_all(on_device(job), tmp_path, world_size=4)


def programs_that_name_devices(path: str) -> dict[str, Any]:
    """The model is built on the device, the default device is one, and one script is DeepSpeed's."""
    from tests.support.simulated_gpu import install

    install()
    rank, module = int(os.environ["RANK"]), torch.get_device_module("simgpu")
    found: dict[str, Any] = {"first": module.current_device()}
    for where in ("context", "default"):
        torch.manual_seed(3)
        if where == "default":
            torch.set_default_device("simgpu")
        context = deepoffload.offload_context(host_budget="64MiB", nvme_path=path, timeline=True)
        with context, torch.device("simgpu"):
            model = TinyGPT(dropout=0.0)
        found[f"{where}, as built"] = [digest(value) for value in model.parameters()]
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            with torch.device("cpu"):
                tokens = batch(10 * step + rank)
            next_token_loss(model, tokens.to("simgpu")).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[where] = {name: digest(value) for name, value in model.state_dict().items()}
        found["lanes"] = {span.lane.value for span in context.engine.timeline.spans()}
        context.engine.close()
        torch.set_default_device("cpu")
    torch.manual_seed(3)
    with torch.device("simgpu"):
        found["plain"] = [digest(value) for value in TinyGPT(dropout=0.0).parameters()]
    found["then"] = module.current_device()
    with pytest.raises(UnsupportedError, match="offload_optimizer"):
        deepoffload.offload_context(host_budget="64MiB", offload_optimizer="device").__enter__()
    return found


def add_a_layer(_: str) -> list[str]:
    """A layer is made on the device after the model was placed."""
    from tests.support.simulated_gpu import install

    install()
    torch.manual_seed(3)
    rank = int(os.environ["RANK"])
    with deepoffload.offload_context(host_budget="64MiB") as context:
        model = TinyGPT(dropout=0.0)
    model.head = torch.nn.Linear(model.head.in_features, model.head.out_features, device="simgpu")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        next_token_loss(model, batch(10 * step + rank).to("simgpu")).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [digest(value) for value in model.state_dict().values()]
    assert context.engine is not None
    context.engine.close()
    return found


def test_a_layer_that_is_made_on_the_device_later(tmp_path: Path) -> None:
    first, second = values_of(add_a_layer, 2, str(tmp_path))
    assert first == second


def values_of_rank_0(_: str) -> list[str]:
    """A model that is on the device already, and that each rank has built with other values and buffers."""
    from tests.support.simulated_gpu import install

    install()
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(f"simgpu:{rank}")
    model[1].running_mean.fill_(rank)
    torch.accelerator.set_device_index(rank)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "host_budget": "64MiB"}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    found = [digest(value) for value in engine.module.state_dict().values()]
    engine.close()
    return found


def test_values_of_rank_0_come_to_models_on_devices(tmp_path: Path) -> None:
    first, second = values_of(values_of_rank_0, 2, str(tmp_path))
    assert first == second


def processes_of_a_mesh(number: int) -> int:
    """Which device the process with this number on its host gets, next to one that is not among its ranks."""
    from tests.support.simulated_gpu import install

    install()
    os.environ |= {"WORLD_SIZE": "4", "RANK": str(number), "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": "4"}
    found = find_accelerator(parse_config(None, host_budget="64MiB"), RankMap(0, (0, 1)))
    assert found is not None
    return found.device.index


def test_ranks_of_a_mesh_take_the_devices_of_their_processes() -> None:
    (found,) = values_of(processes_of_a_mesh, 1, 1)
    assert found == 1


def test_devices_are_shared_out_and_named_as_programs_do(tmp_path: Path) -> None:
    ranks = values_of(programs_that_name_devices, 2, str(tmp_path))
    assert [rank["first"] for rank in ranks] == [0, 0]
    assert [rank["then"] for rank in ranks] == [0, 1]
    assert all(rank[f"{where}, as built"] == rank["plain"] for rank in ranks for where in ("context", "default"))
    assert all(rank["context"] == rank["default"] == ranks[0]["context"] for rank in ranks)
    assert {"to device", "from device"} <= ranks[0]["lanes"]
