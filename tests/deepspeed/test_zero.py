"""``zero.Init``, ``zero.GatheredParameters``, the ``ds_*`` names of parameters, and what is accepted around them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
import deepoffload.deepspeed as deepspeed
from deepoffload.deepspeed.zero import GatheredParameters, Init, ZeroParamStatus
from deepoffload.errors import ClosedError, ConfigError, UnsupportedError, UsageError
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.runtime.context import engine_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, plain


@pytest.fixture
def config(nvme_path: Path) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(nvme_path)}},
        "host_budget": "300KiB",
    }


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    """Engines that are closed when the test ends."""
    made: list[Any] = []
    yield made
    for engine in made:
        engine.close()


@pytest.fixture(params=(RESIDENT, TIGHT, EVICTING), ids=str)
def paged(request: pytest.FixtureRequest, shared_paging: Paging) -> Any:
    return shared_paging.build(mlp, request.param, key="mlp")


# -- Init ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dict", "file", "config=", "module=", "nested"])
def test_a_model_built_in_init_trains_as_plain_pytorch(config, tmp_path, closing, how):
    (tmp_path / "ds.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    if how == "module=":
        model = mlp()
        Init(module=model, config_dict_or_path=config)
        Init(module=model, config_dict_or_path=config)  # it is paged
    elif how == "nested":
        with Init(config_dict_or_path=config):
            with Init(config_dict_or_path=config), Init():
                model = mlp()
            assert not isinstance(model[0].weight, nn.UninitializedParameter)
    else:
        given = str(tmp_path / "ds.json") if how == "file" else config
        with Init(**{"config" if how == "config=" else "config_dict_or_path": given}):
            model = mlp()
    assert all(type(param) is OffloadedParameter for param in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    closing.append(engine)
    assert engine.core is engine_of(model)
    reference = plain(mlp)
    optimizer = deepoffload.CPUAdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(3):
        loss = engine(rows(seed=step)).square().mean()
        engine.backward(loss)
        engine.step()
        expected = reference(rows(seed=step)).square().mean()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_bits(expected.detach(), loss.detach())
    assert_same_bits(weights_of(reference), weights_of(model))
    assert engine.stats()["disk_bytes_read"] > 0


def test_init_with_a_type(config, closing):
    with Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = mlp()
    closing.append(engine_of(model))
    assert all(param.dtype is torch.bfloat16 for param in model.parameters())


def test_init_that_is_not_enabled():
    with Init(enabled=False, dtype=torch.int8, remote_device="moon"):  # nothing of it is looked at
        model = mlp()
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_one_init_for_two_models_one_after_the_other(config, closing):
    context = Init(config_dict_or_path=config)
    for _ in range(2):
        with context:
            closing.append(engine_of_built())
    assert closing[0] is not closing[1]


def engine_of_built() -> Any:
    return _Late(mlp())


class _Late:
    """Closes the engine of a model, which the model has when its context ends."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def close(self) -> None:
        engine_of(self.model).close()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"remote_device": "moon"}, ConfigError, "remote_device='moon'"),
        ({"remote_device": "nvme"}, ConfigError, "nvme_path"),
        ({"dtype": torch.float64}, ConfigError, "dtype=torch.float64"),
        ({"dtype": torch.float16, "config": {"bf16": {"enabled": True}}}, ConfigError, "says bf16"),
        ({"config": {"steps_per_print": 1}, "config_dict_or_path": {}}, ConfigError, "give one of them"),
        ({"config": "nowhere.json"}, ConfigError, "nowhere.json"),
        ({"mpu": object()}, UnsupportedError, r"zero.Init\(mpu=...\): .* says nothing"),
        (
            {"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 2)},
            UnsupportedError,
            r"get_model_parallel_world_size\(\) is 2",
        ),
        ({"sequence_data_parallel_group": object()}, UnsupportedError, "sequence_data_parallel_group"),
        ({"zero_quantized_weights": True}, UnsupportedError, "never quantised"),
        ({"module": "model"}, UsageError, "not str"),
    ],
)
def test_wrong_arguments_of_init(arguments, error, said):
    with pytest.raises(error, match=said):
        Init(**arguments)


def test_init_without_a_configuration_and_initialize_with_one(config, closing):
    with Init():
        model = mlp()
    closing.append(engine_of(model))
    with pytest.raises(ConfigError, match=r"zero\.Init.*config_dict_or_path"):
        deepspeed.initialize(model=model, config=config)
    engine, *_ = deepspeed.initialize(model=model, config={"optimizer": config["optimizer"]})
    assert engine.core is closing[0]


# -- GatheredParameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_edits_are_kept(paged, modifier_rank):
    reference = plain(mlp)

    def edit(model: Any) -> None:
        with torch.no_grad():
            model[0].weight.zero_()
            model[2].weight.data.mul_(2.0)
            model[4].bias.data = torch.ones(64)
            nn.init.constant_(model[6].weight, 0.25)
            model[8].weight[3:5].add_(1)
            model[10].bias.detach().numpy()[:] = 7

    edit(reference)
    with GatheredParameters(list(paged.parameters()), modifier_rank=modifier_rank):
        edit(paged)
    with torch.no_grad():
        paged(rows())  # other weights have come and gone
    assert_same_bits(weights_of(reference), weights_of(paged))


def test_a_checkpoint_loaded_module_by_module(paged):
    state = {name: torch.randn(value.shape) for name, value in mlp().state_dict().items()}

    def load(module: nn.Module, prefix: str = "") -> None:
        with GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            if deepspeed.comm.is_initialized() is False or deepspeed.comm.get_rank() == 0:
                module._load_from_state_dict(state, prefix, {}, True, [], [], [])
        for name, child in module.named_children():
            load(child, prefix + name + ".")

    load(paged)
    assert_same_bits(state, {name: param.detach().clone() for name, param in paged.named_parameters()})


def maybe_zero_3(param: Any) -> Tensor:
    """As scripts for LoRA have it."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([param]):
            assert param.ds_status == ZeroParamStatus.AVAILABLE
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def test_weights_collected_as_scripts_do_it(paged):
    collected = {name: maybe_zero_3(param) for name, param in paged.named_parameters()}
    assert_same_bits(weights_of(plain(mlp)), collected)
    assert torch.equal(maybe_zero_3(nn.Parameter(torch.ones(2))), torch.ones(2))


def test_what_it_takes(paged):
    weight = paged[0].weight
    for params in (weight, [weight], (p for p in [weight, weight]), paged.parameters(), nn.ParameterList([weight])):
        with GatheredParameters(params, fwd_module=paged):
            assert weight.ds_status is ZeroParamStatus.AVAILABLE
            with GatheredParameters(weight):
                pass
            assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert weight.ds_status is not ZeroParamStatus.AVAILABLE
    with GatheredParameters([weight], enabled=False):
        assert weight.ds_status is not ZeroParamStatus.AVAILABLE
    with GatheredParameters([]), GatheredParameters(nn.Linear(1, 1).parameters()):
        pass
    again = GatheredParameters(weight)
    with pytest.raises(RuntimeError), again, again:
        raise RuntimeError
    assert weight.ds_status is not ZeroParamStatus.AVAILABLE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"params": "weight"}, "not a str"),
        ({"params": None}, "not a NoneType"),
        ({"params": [1]}, "not a int"),
        ({"params": nn.Linear(1, 1)}, r"Linear.parameters\(\)"),
        ({"params": [], "modifier_rank": 3}, "the ranks are 0 to 0"),
        ({"params": [], "modifier_rank": True}, "the ranks are 0 to 0"),
        ({"params": [], "modifier_rank": -1}, "the ranks are 0 to 0"),
    ],
)
def test_wrong_arguments_of_gathered_parameters(arguments, said):
    with pytest.raises(UsageError, match=said):
        GatheredParameters(**arguments)


def test_gathered_parameters_in_the_wrong_order(nvme_path):
    with deepoffload.offload_context(host_budget="1MiB", nvme_path=str(nvme_path)) as context:
        model = mlp()
    gathered = GatheredParameters(model.parameters())
    with pytest.raises(UsageError, match="without having been entered"):
        gathered.__exit__(None, None, None)
    context.engine.close()
    with pytest.raises(ClosedError), gathered:
        pass


# -- names of parameters ---------------------------------------------------------------------------------------------


def test_the_names_that_deepspeed_puts_on_parameters(paged):
    params = list(paged.parameters())
    assert len({param.ds_id for param in params}) == len(params)
    for param, like in zip(params, mlp().parameters(), strict=True):
        assert param.ds_shape == like.shape and param.ds_numel == like.numel()
        assert_same_bits(param.detach().clone().flatten(), param.ds_tensor.clone())
        assert param.ds_status in (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.INFLIGHT)
        for name in ("ds_id", "ds_status", "ds_shape", "ds_numel", "ds_tensor"):
            with pytest.raises(AttributeError):
                setattr(param, name, None)
        assert not [name for name in vars(param) if name.startswith("ds_")]
    assert not hasattr(nn.Parameter(torch.ones(1)), "ds_id")
    params[0].ds_tensor.fill_(2.0)
    assert bool((params[0] == 2).all())
    assert deepspeed.zero.is_zero_param(params[0]) and not deepspeed.zero.is_zero_param(torch.ones(1))


def test_the_names_are_not_there_within_a_call():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.seen: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(hasattr(self.weight, "ds_id"))
            return x * self.weight

    with Init():
        model = Looks()
    model(torch.ones(4))
    assert model.seen == [False] and hasattr(model.weight, "ds_id")
    engine_of(model).close()


# -- what is accepted around it --------------------------------------------------------------------------------------


def test_external_parameters_need_no_registration(shared_paging):
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            deepspeed.zero.register_external_parameter(self, self.first.weight)

        def forward(self, x: Tensor) -> Tensor:
            with GatheredParameters(self.first.weight, fwd_module=self):
                return self.second(self.first(x)) @ self.first.weight

    reference = plain(Borrows)
    model = shared_paging.build(Borrows, EVICTING)
    for one in (reference, model):
        one(rows()).square().mean().backward()
    assert_same_bits([p.grad for p in reference.parameters()], [p.grad.clone() for p in model.parameters()])
    deepspeed.zero.unregister_external_parameter(model, model.first.weight)
    with pytest.raises(UsageError, match="takes a torch.nn.Module and a torch.nn.Parameter"):
        deepspeed.zero.register_external_parameter(model.first.weight, model)


def test_leaf_modules_are_found(paged):
    utils = deepspeed.utils
    assert utils.set_z3_leaf_modules(paged, [nn.Tanh]) == [m for m in paged if isinstance(m, nn.Tanh)]
    assert len(utils.set_z3_leaf_modules(paged, ["Linear", "torch.nn.modules.activation.GELU"])) == 9
    assert utils.set_z3_leaf_modules_by_name(paged, ["0", "2", "x"]) == ([paged[0], paged[2]], ["0", "2"])
    assert utils.set_z3_leaf_modules_by_suffix(paged, ["1"])[0] == [paged[1], paged[11]]
    assert utils.unset_z3_leaf_modules(paged, [nn.Conv2d], raise_if_not_found=False) == []
    utils.set_z3_leaf_module(paged[0], True)
    assert not [name for name in vars(paged[0]) if "leaf" in name]
    with pytest.raises(ValueError, match="no module of class"):
        utils.set_z3_leaf_modules(paged, [nn.Conv2d])
    with pytest.raises(UsageError, match="not list"):
        utils.set_z3_leaf_modules([paged], [nn.Linear])


def test_a_model_is_unwrapped_for_generation(config, closing):
    model = mlp()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    closing.append(engine)
    with deepspeed.zero.unwrap_model_for_generation(engine) as inner:
        assert inner is model
    with deepspeed.zero.unwrap_model_for_generation(model) as inner:
        assert inner is model
