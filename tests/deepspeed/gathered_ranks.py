"""What ranks do with ``GatheredParameters``, in separate processes."""

from __future__ import annotations

from typing import Any

import torch

import deepoffload.deepspeed as deepspeed
from deepoffload.errors import ConfigError, UnsupportedError, UsageError
from tests.support.models import mlp, rows


def model_of(nvme_path: str, host_budget: str) -> Any:
    torch.manual_seed(0)
    deepspeed.init_distributed()
    config = {"host_budget": host_budget, "nvme_path": nvme_path, "device": "cpu", "debug": {"poison": True}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        return mlp()


def parts_of(model: Any) -> list[list[Any]]:
    """The weight and the bias of each layer."""
    params = list(model.parameters())
    return [params[start : start + 2] for start in range(0, len(params), 2)]


def edit(params: list[Any]) -> None:
    for index, param in enumerate(params):
        with torch.no_grad():
            param.mul_(index + 2.0)
            param.view(-1)[-1].add_(1.0)
        param.data[0] = 0.25


def results(model: Any) -> list[Any]:
    """What the model computes, and its weights; the ranks have to end together."""
    with torch.no_grad():
        computed = model(rows()).numpy()
    found = [computed, *(param.detach().clone().numpy() for param in model.parameters())]
    deepspeed.comm.barrier()
    return found


def edits_of_one(nvme_path: str, host_budget: str, modifier_rank: int) -> list[Any]:
    """One rank edits, all get its values."""
    model = model_of(nvme_path, host_budget)
    for part in parts_of(model):
        order = part if deepspeed.comm.get_rank() else part[::-1]
        with deepspeed.zero.GatheredParameters(order, modifier_rank=modifier_rank):
            if deepspeed.comm.get_rank() == modifier_rank:
                edit(part)
    return results(model)


def edits_of_all(nvme_path: str, host_budget: str) -> list[Any]:
    """All make the same edits."""
    model = model_of(nvme_path, host_budget)
    for part in parts_of(model):
        with deepspeed.zero.GatheredParameters(part):
            edit(part)
    return results(model)


def refusals(nvme_path: str) -> list[str]:
    """What each rank is told."""
    model = model_of(nvme_path, "4MiB")
    said = []
    for call in (
        lambda: deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=2),
        lambda: deepspeed.utils.safe_set_local_fp32_param(model[0].weight, torch.ones(3)),
        lambda: deepspeed.utils.safe_set_local_grad(
            model[0].weight, deepspeed.utils.safe_get_local_fp32_param(model[0].weight)
        ),
    ):
        try:
            call()
        except (UsageError, UnsupportedError) as error:
            said.append(str(error))
    deepspeed.comm.barrier()
    return said


def built_by_each(folder: str) -> list[Any]:
    """Each rank builds other values, and gives other tags to its saves."""
    deepspeed.init_distributed()
    mine = deepspeed.comm.get_rank()
    torch.manual_seed(mine)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model[0].weight = torch.nn.Parameter(torch.randn(4, 4).bfloat16().t())
    model[1].running_mean.fill_(mine + 1.0)
    before = [value.float().numpy() for value in model.state_dict().values()]
    refused = {"host_budget": "4MiB", "device": "cpu", "optimizer": {"type": "AdamW", "params": {"lr": -1.0}}}
    try:
        deepspeed.initialize(model=model, config=refused)
        said = "nothing"
    except ConfigError as error:
        said = str(error)
    assert "lr" in said
    untouched = [value.float().numpy() for value in model.state_dict().values()]
    engine = engine_that("Fail", model)
    after = [value.float().clone().numpy() for value in model.state_dict().values()]
    try:
        engine.save_checkpoint(f"{folder}/fail", tag=f"of_{mine}")
        said = ""
    except UsageError as error:
        said = str(error)
    engine.destroy()
    engine = engine_that("Warn", torch.nn.Linear(4, 4))
    engine.save_checkpoint(f"{folder}/warn", tag=f"of_{mine}")
    deepspeed.comm.barrier()
    engine.destroy()
    return [before, untouched, after, said]


def built_in_init(nvme_path: str, host_budget: str, how: str) -> list[Any]:
    """Each rank builds other values in ``zero.Init``, and all train with those of rank 0."""
    deepspeed.init_distributed()
    config = {"host_budget": host_budget, "nvme_path": nvme_path, "device": "cpu", "debug": {"poison": True}}
    torch.manual_seed(deepspeed.comm.get_rank())
    if how == "module":
        model = noisy()
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = noisy()
            if how == "edited":
                with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=1):
                    with torch.no_grad():
                        model[0].weight.fill_(deepspeed.comm.get_rank() + 1.0)
    return [model[-1].noise.numpy().copy(), *results(model[:-1])]


class Noise(torch.nn.Module):
    """A random buffer, one in pieces of memory, and a parameter that is too small to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(3, 5).t())
        self.scale = torch.nn.Parameter(torch.rand(1))


def noisy() -> torch.nn.Sequential:
    return mlp().append(Noise())


def engine_that(tag_validation: str, model: torch.nn.Module) -> Any:
    config = {"host_budget": "4MiB", "device": "cpu", "checkpoint": {"tag_validation": tag_validation}}
    return deepspeed.initialize(model=model, config=config)[0]
