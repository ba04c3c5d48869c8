"""Optimizers on ordinary CPU tensors: torch's numbers, settings, and what programs do with an optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UnsupportedError, UsageError
from tests.optim.kinds import KINDS, STORED, VARIANTS, Kind, gradient, ulp
from tests.support.loops import assert_same_bits, nudge


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def run(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for index, param in enumerate(params):
            param.grad = gradient(param, 100 * step + index)
        optimizer.step()


@pytest.mark.parametrize("kind", VARIANTS, ids=str)
def test_follows_torch_step_by_step(kind: Kind) -> None:
    """Each step starts from torch's own state, so that the bound is that of one step."""
    ours, theirs = parameter(37, 61), parameter(37, 61)
    reference = kind.theirs([theirs])
    for step in range(6):
        with torch.no_grad():
            ours.copy_(theirs)
        optimizer = kind.ours([ours])
        optimizer.load_state_dict({**reference.state_dict(), "param_groups": optimizer.state_dict()["param_groups"]})
        before = ours.detach().clone()
        ours.grad, theirs.grad = gradient(ours, step), gradient(theirs, step)
        if kind.make is deepoffload.CPULion:  # the reference counts no steps
            optimizer.state[ours]["step"] = torch.tensor(float(step))
        optimizer.step()
        reference.step()
        change = (theirs.detach() - before).abs()
        largest = torch.maximum(theirs.detach().abs(), torch.maximum(before.abs(), change))
        assert bool(((ours.double() - theirs.double()).abs() <= 2 * ulp(largest) + 4 * ulp(change)).all())
        state, expected = optimizer.state_dict()["state"].get(0, {}), reference.state_dict()["state"].get(0, {})
        for key in kind.arrays:
            size = torch.maximum(expected[key].abs(), gradient(ours, step).abs())
            assert bool(((state[key].double() - expected[key].double()).abs() <= 2 * ulp(size)).all()), key
        if "step" in expected:
            assert float(state["step"]) == float(expected["step"]) == step + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_a_16_bit_weight_is_the_rounded_fp32_run(kind: Kind, dtype: torch.dtype) -> None:
    weight = parameter(1000, dtype=dtype)
    master = nn.Parameter(weight.detach().float())
    optimizer, reference = kind.ours([weight]), kind.ours([master])
    for step in range(8):
        weight.grad = gradient(weight, step)
        master.grad = weight.grad.float()
        optimizer.step()
        reference.step()
        assert_same_bits(master.detach().to(dtype), weight.detach())
        if dtype is torch.bfloat16:
            nudge(master)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_that_the_program_sets_is_its_own_master(dtype: torch.dtype) -> None:
    weight = parameter(1000, dtype=dtype)
    optimizer = deepoffload.CPUSGD([weight], lr=0.01)
    run(optimizer, [weight], range(3))
    fresh = parameter(1000, seed=5, dtype=dtype)
    with torch.no_grad():
        weight.copy_(fresh)
    run(optimizer, [weight], range(1))
    run(deepoffload.CPUSGD([fresh], lr=0.01), [fresh], range(1))
    assert_same_bits(fresh.detach(), weight.detach())


def test_fp16_master_follows_a_write_through_data() -> None:
    weight = parameter(100, dtype=torch.float16)
    optimizer = deepoffload.CPUSGD([weight], lr=0.0)
    run(optimizer, [weight], range(2))
    weight.data.fill_(3.0)
    run(optimizer, [weight], range(1))
    assert bool((weight == 3.0).all())


@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_shapes_and_strides(kind: Kind) -> None:
    params = [parameter(), parameter(0), parameter(5, 3), nn.Parameter(parameter(6, 4).detach().t())]
    plain = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
    run(kind.ours(params), params, range(3))
    run(kind.ours(plain), plain, range(3))
    assert_same_bits([p.detach() for p in plain], [p.detach().contiguous() for p in params])
    assert params[3].stride() == (1, 4)


def test_parameters_count_their_own_steps() -> None:
    """A parameter without a gradient is left alone and does not age."""
    often, seldom, never = parameter(50), parameter(50, seed=1), parameter(50, seed=2)
    alone, untouched = nn.Parameter(seldom.detach().clone()), never.detach().clone()
    optimizer = deepoffload.CPUAdamW([often, seldom, never], lr=1e-2)
    for step in range(6):
        often.grad = gradient(often, step)
        seldom.grad = gradient(seldom, step) if step % 3 == 0 else None
        optimizer.step()
    reference = deepoffload.CPUAdamW([alone], lr=1e-2)
    for step in (0, 3):
        alone.grad = gradient(alone, step)
        reference.step()
    assert_same_bits([alone.detach(), untouched], [seldom.detach(), never.detach()])
    state = optimizer.state_dict()["state"]
    assert [float(state[i]["step"]) for i in (0, 1)] == [6.0, 2.0] and 2 not in state


def test_groups_have_their_own_settings_and_new_ones_can_come() -> None:
    params = [parameter(40, seed=i) for i in range(3)]
    alone = [nn.Parameter(p.detach().clone()) for p in params]
    settings = [{"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.5}, {"lr": 0.02, "betas": (0.5, 0.9), "maximize": True}]
    optimizer = deepoffload.CPUAdamW([{"params": [params[0]], **settings[0]}, {"params": params[1], **settings[1]}])
    optimizer.add_param_group({"params": [params[2]], **settings[2]})
    run(optimizer, params, range(4))
    for step in range(4):
        for index, param in enumerate(alone):
            param.grad = gradient(param, 100 * step + index)
    separate = [deepoffload.CPUAdamW([p], **s) for p, s in zip(alone, settings, strict=True)]
    for step in range(4):
        for index, (param, each) in enumerate(zip(alone, separate, strict=True)):
            param.grad = gradient(param, 100 * step + index)
            each.step()
    assert_same_bits([p.detach() for p in alone], [p.detach() for p in params])


def test_closure_is_called_with_gradients_on() -> None:
    param = parameter(20)
    optimizer = deepoffload.CPUSGD([param], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    expected = param.detach() - 0.1 * 2 * param.detach()
    loss = optimizer.step(closure)
    assert loss.item() > 0
    torch.testing.assert_close(param.detach(), expected)


@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_lr_as_a_tensor_and_schedulers(kind: Kind) -> None:
    one, other = parameter(30), parameter(30)
    lr = kind.settings["lr"]
    optimizer, reference = kind.ours([one], lr=torch.tensor(lr, dtype=torch.float64)), kind.ours([other])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(6):
        reference.param_groups[0]["lr"] = lr * 0.5 ** (step // 2)
        run(optimizer, [one], range(step, step + 1))
        run(reference, [other], range(step, step + 1))
        schedule.step()
    assert_same_bits(other.detach(), one.detach())


def test_one_cycle_moves_lr_and_beta() -> None:
    optimizers = []
    params = [parameter(30), parameter(30)]
    for param, make in zip(params, (deepoffload.CPUAdamW, torch.optim.AdamW), strict=True):
        optimizer = make([param], lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
        for step in range(8):
            run(optimizer, [param], range(step, step + 1))
            schedule.step() if step < 7 else None
        optimizers.append(optimizer)
    assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]
    torch.testing.assert_close(params[0].detach(), params[1].detach(), rtol=1e-5, atol=1e-6)


def test_grad_scaler_skips_and_scales() -> None:
    param, plain = parameter(30), parameter(30)
    optimizer, reference = deepoffload.CPUSGD([param], lr=0.1), deepoffload.CPUSGD([plain], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        scaler.scale((param * gradient(param, step)).sum()).backward()
        if step == 1:
            param.grad[3] = torch.inf
        scaler.step(optimizer)
        scaler.update(1024.0)
        optimizer.zero_grad()
        if step != 1:
            plain.grad = gradient(plain, step)
            reference.step()
    assert_same_bits(plain.detach(), param.detach())


def edit(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(0.75)


def edit_data(param: nn.Parameter) -> None:
    param.data.mul_(0.75)


def edit_nothing(param: nn.Parameter) -> None:
    """As loading the model after the optimizer does."""
    with torch.no_grad():
        param.copy_(param.detach().clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [edit, edit_data, edit_nothing])
@pytest.mark.parametrize("look", [False, True])
def test_an_edit_after_loading_is_the_new_master(
    change: Any, dtype: torch.dtype, look: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved = parameter(40, 30, dtype=dtype)
    first = deepoffload.CPUAdamW([saved], lr=1e-2)
    run(first, [saved], range(2))
    state = copy.deepcopy(first.state_dict())
    param = nn.Parameter(saved.detach().clone())
    optimizer = deepoffload.CPUAdamW([param], lr=1e-2)
    optimizer.load_state_dict(state)
    change(param)
    lead = "remainder" if dtype is torch.bfloat16 else "master"
    if look:
        optimizer.state_dict()
    run(optimizer, [param], range(2, 4))
    expected = nn.Parameter(saved.detach().clone())
    reference = deepoffload.CPUAdamW([expected], lr=1e-2)
    if change is not edit_nothing:
        edit(expected)
        own = expected.detach().float() if lead == "master" else torch.zeros_like(state["state"][0][lead])
        state["state"][0][lead] = own
    reference.load_state_dict(state)
    run(reference, [expected], range(2, 4))
    assert_same_bits([expected.detach(), reference.state[expected]], [param.detach(), optimizer.state[param]])
    edited = change is not edit_nothing and lead == "remainder"
    assert ("were written after load_state_dict()" in caplog.text) is edited
    assert not edited or "one of shape (40, 30)" in caplog.text


def test_clipping_inside_the_update() -> None:
    params, plain = [parameter(30), parameter(7, seed=1)], [parameter(30), parameter(7, seed=1)]
    optimizer, reference = deepoffload.CPUSGD(params, lr=0.1, max_grad_norm=0.5), torch.optim.SGD(plain, lr=0.1)
    for step in range(3):
        for index, (param, other) in enumerate(zip(params, plain, strict=True)):
            param.grad, other.grad = gradient(param, step + index), gradient(other, step + index)
        norm = torch.nn.utils.clip_grad_norm_(plain, 0.5)
        optimizer.step()
        reference.step()
        assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-6)
    torch.testing.assert_close([p.detach() for p in params], [p.detach() for p in plain])


def test_skip_non_finite_changes_nothing() -> None:
    param = parameter(30)
    optimizer = deepoffload.CPUAdamW([param], lr=0.1)
    optimizer.skip_non_finite = True
    run(optimizer, [param], range(1))
    before, state = param.detach().clone(), optimizer.state[param]["exp_avg"].clone()
    param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert not optimizer.applied and float(optimizer.state[param]["step"]) == 1.0
    assert_same_bits([before, state], [param.detach(), optimizer.state[param]["exp_avg"]])


def test_a_graph_from_before_the_step_is_refused() -> None:
    param = parameter(5)
    optimizer = deepoffload.CPUSGD([param], lr=0.1)
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


WRONG = [
    (deepoffload.CPUAdam, {"lr": -1.0}, "lr"),
    (deepoffload.CPUAdam, {"lr": float("nan")}, "lr"),
    (deepoffload.CPUAdam, {"lr": "fast"}, "lr"),
    (deepoffload.CPUAdam, {"lr": torch.ones(2)}, "lr"),
    (deepoffload.CPUAdam, {"betas": (0.9, 1.0)}, "betas"),
    (deepoffload.CPUAdam, {"betas": (0.9,)}, "betas"),
    (deepoffload.CPUAdam, {"betas": 0.9}, "betas"),
    (deepoffload.CPUAdam, {"eps": -1e-8}, "eps"),
    (deepoffload.CPUAdam, {"weight_decay": -0.1}, "weight_decay"),
    (deepoffload.CPUAdam, {"state_dtype": "int8"}, "state_dtype"),
    (deepoffload.CPUAdam, {"state_dtype": "8bit", "amsgrad": True}, "amsgrad=True needs state_dtype"),
    (deepoffload.CPULion, {"state_dtype": "8bit"}, "state_dtype"),
    (deepoffload.CPUAdam, {"max_grad_norm": 0.0}, "max_grad_norm"),
    (deepoffload.CPUAdam, {"max_grad_norm": -1.0}, "max_grad_norm"),
    (deepoffload.CPUAdamW, {"capturable": True}, "capturable"),
    (deepoffload.CPUAdamW, {"differentiable": True}, "differentiable"),
    (deepoffload.CPULion, {"lr": -1.0}, "lr"),
    (deepoffload.CPULion, {"betas": (-0.1, 0.9)}, "betas"),
    (deepoffload.CPULion, {"weight_decay": None}, "weight_decay"),
    (deepoffload.CPUAdagrad, {"lr": -1.0}, "lr"),
    (deepoffload.CPUAdagrad, {"lr_decay": -1.0}, "lr_decay"),
    (deepoffload.CPUAdagrad, {"weight_decay": -1.0}, "weight_decay"),
    (deepoffload.CPUAdagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
    (deepoffload.CPUAdagrad, {"eps": -1.0}, "eps"),
    (deepoffload.CPUAdagrad, {"differentiable": True}, "differentiable"),
    (deepoffload.CPUSGD, {"lr": -1.0}, "lr"),
    (deepoffload.CPUSGD, {"momentum": -0.9}, "momentum"),
    (deepoffload.CPUSGD, {"dampening": float("nan")}, "dampening"),
    (deepoffload.CPUSGD, {"weight_decay": -0.1}, "weight_decay"),
    (deepoffload.CPUSGD, {"nesterov": True}, "nesterov"),
    (deepoffload.CPUSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov"),
    (deepoffload.CPUSGD, {"differentiable": True}, "differentiable"),
]


@pytest.mark.parametrize(("make", "settings", "name"), WRONG)
def test_wrong_settings_are_named(make: Any, settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        make([parameter(3)], **settings)
    if name.startswith(("lr", "betas", "eps", "weight")):
        optimizer = make([parameter(3)])
        with pytest.raises(ValueError, match=f"^{name}"):
            optimizer.add_param_group({"params": [parameter(3, seed=1)], **settings})
        assert len(optimizer.param_groups) == 1


def test_flags_of_torch_and_deepspeed_are_accepted() -> None:
    param = parameter(3)
    deepoffload.CPUAdamW([param], foreach=True, capturable=False, differentiable=False, fused=True)
    deepoffload.CPUSGD([param], foreach=False, differentiable=False, fused=None)
    deepoffload.CPUAdagrad([param], foreach=None, differentiable=False, fused=True)
    deepoffload.CPUAdam(model_params=[param], bias_correction=False, adamw_mode=False, fp32_optimizer_states=True)
    deepoffload.CPULion(model_params=[param], fp32_optimizer_states=True)
    for make in (deepoffload.CPUAdam, deepoffload.CPULion):
        optimizer = make([param], fp32_optimizer_states=False)
        run(optimizer, [param], range(1))
        assert optimizer.state[param]["exp_avg"].dtype is torch.bfloat16


def test_l2_without_bias_correction() -> None:
    param = parameter(200)
    start = param.detach().double()
    optimizer = deepoffload.CPUAdam([param], lr=0.01, bias_correction=False, adamw_mode=False, weight_decay=0.1)
    param.grad = gradient(param, 0)
    optimizer.step()
    grad = gradient(param, 0).double() + 0.1 * start
    expected = start - 0.01 * (0.1 * grad) / ((0.001 * grad * grad).sqrt() + 1e-8)
    torch.testing.assert_close(param.detach().double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [deepoffload.CPUAdamW, deepoffload.CPULion])
def test_without_master_weights_each_step_is_rounded(make: Any) -> None:
    weight = parameter(1000, dtype=torch.bfloat16)
    optimizer = make([weight], lr=1e-2, master_weights=False)
    plain = nn.Parameter(weight.detach().float())
    reference = make([plain], lr=1e-2)
    for step in range(4):
        weight.grad = gradient(weight, step)
        plain.grad = weight.grad.float()
        optimizer.step()
        reference.step()
        assert_same_bits(plain.detach().bfloat16(), weight.detach())
        with torch.no_grad():
            plain.copy_(weight)
    assert set(optimizer.state[weight]) == set(reference.state[plain])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_the_kernels_do_not_take_is_refused_before_anything_changes(kind: Kind) -> None:
    good, double = parameter(5), parameter(5, dtype=torch.float64)
    embedding = nn.Embedding(4, 3, sparse=True)
    for bad in (double, embedding.weight):
        optimizer = kind.ours([good, bad])
        before = good.detach().clone()
        good.grad = gradient(good, 0)
        bad.grad = None
        (embedding(torch.tensor([1])).sum() if bad is embedding.weight else bad.sum()).backward()
        with pytest.raises(UnsupportedError, match=kind.ours([good]).rule.name):
            optimizer.step()
        assert_same_bits(before, good.detach())
        assert not optimizer.state
    with pytest.raises(UsageError, match="meta"):
        kind.ours([nn.Parameter(torch.empty(3, device="meta"))])


def test_torchs_name_for_decoupled_decay_counts_in_groups() -> None:
    params = [parameter(20, seed=i) for i in range(2)]
    alone = [nn.Parameter(p.detach().clone()) for p in params]
    groups = [{"params": [p], "decoupled_weight_decay": d} for p, d in zip(params, (False, True), strict=True)]
    optimizer = deepoffload.CPUAdam(groups[:1], weight_decay=0.5)
    optimizer.add_param_group(groups[1])
    run(optimizer, params, range(2))
    for index, (param, decoupled) in enumerate(zip(alone, (False, True), strict=True)):
        each = deepoffload.CPUAdam([param], weight_decay=0.5, adamw_mode=decoupled)
        for step in range(2):
            param.grad = gradient(param, 100 * step + index)
            each.step()
    assert_same_bits([p.detach() for p in alone], [p.detach() for p in params])
    assert [g["decoupled_weight_decay"] for g in optimizer.state_dict()["param_groups"]] == [False, True]
