"""``safe_get_*`` and ``safe_set_*``: they show what plain PyTorch holds, and what they set trains on.

The plain side has ``CPUAdamW`` over ordinary parameters, so everything is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.deepspeed import utils
from deepoffload.errors import ClosedError, UsageError
from deepoffload.params.torch_private import get_data
from tests.support.inspect import handle_of
from tests.support.loops import assert_same_bits
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Setting, plain

SETTINGS = (RESIDENT, TIGHT, EVICTING)
ADAM = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(params=SETTINGS, ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param


@pytest.fixture
def both(shared_paging: Paging, setting: Setting) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A plain model and a paged one, each with its optimizer."""
    reference = plain(mlp)
    paged = shared_paging.build(mlp, setting, key="mlp")
    yield (
        reference,
        deepoffload.CPUAdamW(reference.parameters(), **ADAM),
        paged,
        deepoffload.CPUAdamW(paged.parameters(), **ADAM),
    )


def backward(model: Any, seed: int = 1) -> None:
    model(rows(seed=seed)).float().square().mean().backward()


def step(model: Any, optimizer: Any, seed: int = 1) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def test_values_are_those_of_plain_pytorch(both):
    reference, its_optimizer, paged, optimizer = both
    for round_ in range(3):
        step(reference, its_optimizer, round_)
        step(paged, optimizer, round_)
        for (name, theirs), ours in zip(reference.named_parameters(), paged.parameters(), strict=True):
            value = utils.safe_get_full_fp32_param(ours)
            assert type(value) is Tensor and not value.requires_grad
            assert_same_bits(theirs.detach(), value, name)
            for key in ("exp_avg", "exp_avg_sq"):
                state = utils.safe_get_full_optimizer_state(ours, key)
                assert_same_bits(its_optimizer.state[theirs][key], state, f"{name}.{key}")
                assert_same_bits(state.flatten(), utils.safe_get_local_optimizer_state(ours, key), name)


def test_gradients_are_shown_and_replaced(both):
    reference, its_optimizer, paged, optimizer = both
    assert all(utils.safe_get_full_grad(param) is None for param in paged.parameters())
    backward(reference)
    backward(paged)
    for theirs, ours in zip(reference.parameters(), paged.parameters(), strict=True):
        found = utils.safe_get_full_grad(ours)
        assert type(found) is Tensor
        assert_same_bits(theirs.grad, found)
        assert_same_bits(theirs.grad.flatten(), utils.safe_get_local_grad(ours))
        theirs.grad.mul_(3).add_(0.25)
        utils.safe_set_full_grad(ours, found * 3 + 0.25)
    utils.safe_update_full_grad_vectorized(paged.parameters(), lambda grad, param: grad * 0.5)
    for theirs, ours in zip(reference.parameters(), paged.parameters(), strict=True):
        theirs.grad.mul_(0.5)
        utils.safe_set_local_grad(ours, utils.safe_get_local_grad(ours))
    its_optimizer.step()
    optimizer.step()
    assert_same_bits([p.detach() for p in reference.parameters()], [p.detach().clone() for p in paged.parameters()])


def test_a_gradient_that_is_not_there_is_made(both):
    reference, its_optimizer, paged, optimizer = both
    for theirs, ours in zip(reference.parameters(), paged.parameters(), strict=True):
        theirs.grad = torch.full_like(theirs, 0.5)
        utils.safe_set_full_grad(ours, torch.full(ours.shape, 0.5))
    its_optimizer.step()
    optimizer.step()
    assert_same_bits([p.detach() for p in reference.parameters()], [p.detach().clone() for p in paged.parameters()])


@pytest.mark.parametrize("stepped", [False, True], ids=["before the first step", "later"])
def test_what_is_set_trains_on(both, stepped):
    reference, its_optimizer, paged, optimizer = both
    step(reference, its_optimizer)  # torch has no state before
    if stepped:
        step(paged, optimizer)
    for index, (theirs, ours) in enumerate(zip(reference.parameters(), paged.parameters(), strict=True)):
        generator = torch.Generator().manual_seed(index)
        value, moment, square = (torch.rand(ours.shape, generator=generator) for _ in range(3))
        state = its_optimizer.state[theirs]
        theirs.data.copy_(value)
        state["exp_avg"].copy_(moment)
        state["exp_avg_sq"].copy_(square)
        if not stepped:
            state["step"].zero_()
        utils.safe_set_full_fp32_param(ours, value)
        utils.safe_set_full_optimizer_state(ours, moment, "exp_avg")
        utils.safe_set_local_optimizer_state(ours, square.flatten(), "exp_avg_sq")
        assert_same_bits(value, utils.safe_get_full_fp32_param(ours))
        assert_same_bits(moment, utils.safe_get_full_optimizer_state(ours, "exp_avg"))
    saved = optimizer.state_dict()["state"]
    for number, theirs in enumerate(reference.parameters()):
        assert_same_bits(its_optimizer.state[theirs]["exp_avg"], saved[number]["exp_avg"].clone())
    for round_ in range(2):
        step(reference, its_optimizer, round_)
        step(paged, optimizer, round_)
    assert_same_bits([p.detach() for p in reference.parameters()], [p.detach().clone() for p in paged.parameters()])


def test_optimizer_state_before_the_first_step_is_what_it_starts_with(both):
    paged = both[2]
    for param in paged.parameters():
        assert not utils.safe_get_full_optimizer_state(param, "exp_avg").any()
    sums = deepoffload.CPUAdagrad(paged.parameters(), initial_accumulator_value=0.5)
    assert sums.param_groups
    with pytest.raises(UsageError, match="is in 2 optimizers"):
        utils.safe_get_full_optimizer_state(next(paged.parameters()), "sum")


def test_setting_one_moment_before_the_first_step_leaves_the_others_at_their_start(both):
    reference, its_optimizer, paged, optimizer = both
    step(reference, its_optimizer)
    for theirs, ours in zip(reference.parameters(), paged.parameters(), strict=True):
        theirs.data.copy_(utils.safe_get_full_fp32_param(ours))
        state = its_optimizer.state[theirs]
        state["exp_avg"].fill_(0.125)
        state["exp_avg_sq"].zero_()
        state["step"].zero_()
        utils.safe_set_full_optimizer_state(ours, torch.full(ours.shape, 0.125), "exp_avg")
    step(reference, its_optimizer)
    step(paged, optimizer)
    assert_same_bits([p.detach() for p in reference.parameters()], [p.detach().clone() for p in paged.parameters()])


# -- 16 bits ---------------------------------------------------------------------------------------------------------


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master that a bf16 weight and its remainder are."""
    high = weight.detach().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def test_the_master_of_a_bf16_weight_is_exact(shared_paging, setting):
    reference = plain(mlp).bfloat16()
    paged = shared_paging.build(
        mlp, Setting("bf16", setting.room, evict_always=setting.evict_always, precision="bf16"), key="mlp"
    )
    its_optimizer = deepoffload.CPUAdamW(reference.parameters(), **ADAM)
    optimizer = deepoffload.CPUAdamW(paged.parameters(), **ADAM)
    registered = plain(mlp)
    for exact, theirs, ours in zip(registered.parameters(), reference.parameters(), paged.parameters(), strict=True):
        value = utils.safe_get_full_fp32_param(ours)
        assert float((value - exact.detach()).abs().max()) <= 2**-24  # a tie moves by one unit in the last place
        utils.safe_set_full_fp32_param(ours, theirs.detach().float())

    def train_and_compare() -> None:
        for seed in range(3):
            for model, its in ((reference, its_optimizer), (paged, optimizer)):
                model(rows(seed=seed).bfloat16()).float().square().mean().backward()
                its.step()
                its.zero_grad()
            for theirs, ours in zip(reference.parameters(), paged.parameters(), strict=True):
                master = joined(theirs, its_optimizer.state[theirs]["remainder"])
                assert_same_bits(master, utils.safe_get_full_fp32_param(ours))

    train_and_compare()
    for index, (theirs, ours) in enumerate(zip(reference.parameters(), paged.parameters(), strict=True)):
        value = torch.rand(ours.shape, generator=torch.Generator().manual_seed(index)) + 0.1
        utils.safe_set_full_fp32_param(ours, value)
        exact = utils.safe_get_full_fp32_param(ours)
        assert float((exact - value).abs().max()) <= 2**-23
        assert_same_bits(exact.bfloat16(), ours.detach().clone())
        entry = its_optimizer.state_dict()  # the plain side gets the same by its state
        with torch.no_grad():
            theirs.copy_(exact.bfloat16())
        high = theirs.detach().view(torch.int16).to(torch.int32) << 16
        entry["state"][index]["remainder"] = (exact.view(torch.int32) - high).to(torch.int16)
        its_optimizer.load_state_dict(entry)
    train_and_compare()


def test_the_master_of_an_fp16_weight(shared_paging):
    paged = shared_paging.build(mlp, Setting("fp16", None, precision="fp16"))
    optimizer = deepoffload.CPUAdamW(paged.parameters(), lr=1e-4)
    paged(rows().half()).float().square().mean().backward()
    optimizer.step()
    for param in paged.parameters():
        master = utils.safe_get_full_fp32_param(param)
        assert torch.equal(master.half(), param.detach().clone())
        value = torch.rand(param.shape)
        utils.safe_set_full_fp32_param(param, value)
        assert_same_bits(value, utils.safe_get_full_fp32_param(param))
        with torch.no_grad():
            param.fill_(0.5)  # the program's own edit is the master from then on
        assert torch.equal(utils.safe_get_full_fp32_param(param), torch.full(param.shape, 0.5))


# -- what has no such value ------------------------------------------------------------------------------------------


def test_a_frozen_parameter_has_no_fp32_value_and_no_state(shared_paging):
    def build() -> Any:
        model = mlp()
        next(model.parameters()).requires_grad_(False)
        return model

    model = shared_paging.build(build, Setting("frozen", None, precision="bf16"))
    frozen = next(model.parameters())
    deepoffload.CPUAdamW([param for param in model.parameters() if param.requires_grad])
    assert utils.safe_get_full_fp32_param(frozen) is None and utils.safe_get_local_fp32_param(frozen) is None
    assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None and utils.safe_get_full_grad(frozen) is None
    utils.safe_set_full_fp32_param(frozen, torch.full(frozen.shape, 1.5))
    assert bool((frozen == 1.5).all())
    with pytest.raises(UsageError, match="frozen"):
        utils.safe_set_full_grad(frozen, torch.zeros(frozen.shape))
    with pytest.raises(UsageError, match="it is frozen, or its optimizer is not one of deepoffload"):
        utils.safe_set_full_optimizer_state(frozen, torch.zeros(frozen.shape), "exp_avg")
    given_to_one = deepoffload.CPUAdamW([frozen])  # as scripts do with model.parameters()
    assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    del given_to_one


def test_an_ordinary_parameter_gives_none():
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    assert utils.safe_get_full_fp32_param(param) is None
    assert utils.safe_get_full_optimizer_state(param, "exp_avg") is None
    assert torch.equal(utils.safe_get_full_grad(param), torch.ones(2))
    with pytest.raises(UsageError, match="belongs to no engine"):
        utils.safe_get_local_fp32_param(param)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: utils.safe_get_full_fp32_param("weight"), "a parameter is wanted, not a str"),
        (lambda p: utils.safe_set_full_fp32_param(p, torch.ones(3)), "parameter's shape"),
        (lambda p: utils.safe_set_full_fp32_param(p, 1.0), "has to be a tensor, not a float"),
        (lambda p: utils.safe_set_local_fp32_param(p, torch.ones(3)), "local part has .* elements here, not 3"),
        (lambda p: utils.safe_set_full_grad(p, torch.ones(3)), "its shape"),
        (lambda p: utils.safe_get_full_optimizer_state(p, "momentum"), "CPUAdamW keeps 'exp_avg', 'exp_avg_sq'"),
        (lambda p: utils.safe_set_full_optimizer_state(p, torch.ones(3), "exp_avg"), "parameter's shape"),
    ],
)
def test_bad_arguments(both, call, said):
    param = next(both[2].parameters())
    before = param.detach().clone()
    with pytest.raises(UsageError, match=said):
        call(param)
    assert_same_bits(before, param.detach().clone())


def test_after_the_engine_was_closed(nvme_path):
    with deepoffload.offload_context(host_budget="1MiB", nvme_path=str(nvme_path)) as context:
        model = mlp()
    context.engine.close()
    for call in (utils.safe_get_full_fp32_param, utils.safe_get_full_grad):
        with pytest.raises(ClosedError):
            call(next(model.parameters()))


def test_getters_hold_none_of_the_engines_memory(shared_paging):
    model = shared_paging.build(mlp, TIGHT, key="mlp")
    held = [utils.safe_get_full_fp32_param(param) for param in model.parameters()]
    for param, value in zip(model.parameters(), held, strict=True):
        assert value.untyped_storage()._cdata != get_data(param).untyped_storage()._cdata
        assert handle_of(param).escape_crc is None
