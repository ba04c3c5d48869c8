"""torch's own optimizers on paged parameters, and ours next to ordinary parameters, schedulers and groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UnsupportedError
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, TIGHT, Paging, Same

TORCH_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-default": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-amsgrad-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=True),
    "lamb-like": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def steps(model: nn.Module, optimizer: Any, count: int = 3) -> None:
    for seed in range(count):
        model(rows(seed=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_torch_optimizers(same: Same, name: str) -> None:
    def program(model: nn.Module) -> Any:
        steps(model, TORCH_OPTIMIZERS[name](model.parameters()))
        return weights_of(model)

    same(mlp, program)


def test_lbfgs_and_two_step_optimizers(same: Same) -> None:
    """LBFGS flattens everything; a sharpness-aware step moves the weights away and back."""

    def program(model: nn.Module) -> Any:
        def closure() -> Tensor:
            model.zero_grad()
            loss = model(rows()).square().mean()
            loss.backward()
            return loss

        torch.optim.LBFGS(model.parameters(), max_iter=3).step(closure)
        between = weights_of(model)
        closure()
        with torch.no_grad():
            moved = {p: 0.05 * p.grad / p.grad.norm() for p in model.parameters()}
            for param, shift in moved.items():
                param.add_(shift)
        closure()
        with torch.no_grad():
            for param, shift in moved.items():
                param.sub_(shift)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return between, weights_of(model)

    same(mlp, program, room=4.0)


@pytest.mark.parametrize("foreach", [False, True])
def test_grad_scaler(same: Same, foreach: bool) -> None:
    """Unscaling works in place on what ``.grad`` shows, and an overflow skips the step."""

    def program(model: nn.Sequential) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for seed in range(4):
            scaler.scale(model(rows(seed=seed)).square().mean()).backward()
            if seed == 2:
                model[4].weight.grad[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, weights_of(model)

    same(mlp, program)


def test_ours_clipped_between_unscaling_and_step(same: Same) -> None:
    """As accelerate, transformers' Trainer and Lightning do it, the last only where the optimizer does not say that it
    unscales by itself."""

    def program(model: nn.Sequential) -> Any:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        seen = []
        for seed in range(4):
            scaler.scale(model(rows(seed=seed)).square().mean()).backward()
            if seed == 2:
                model[4].weight.grad[0, 0] = float("inf")
            assert not optimizer._step_supports_amp_scaling
            if seed != 1:  # else the scaler unscales at the step
                scaler.unscale_(optimizer)
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
        return seen, weights_of(model)

    same(mlp, program)


def test_optimizer_made_before_the_context_ends(paging: Paging) -> None:
    """Adoption keeps the parameter objects: an optimizer, a list or a weak reference made before stays right."""

    def build() -> tuple[nn.Module, Any]:
        model = mlp()
        return model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2)

    model, optimizer = paging.build(build, TIGHT)
    steps(model, optimizer)
    later = paging.build(mlp, TIGHT)
    steps(later, deepoffload.CPUAdamW(later.parameters(), lr=1e-2))
    assert_same_bits(weights_of(later), weights_of(model))


class Mixed(nn.Module):
    """Paged layers, and a plain one that was built outside."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.paged = mlp()
        object.__setattr__(self, "plain", plain)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.paged(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_and_ordinary_parameters_in_one_optimizer(paging: Paging, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    outside = nn.Linear(64, 8)
    twin = nn.Linear(64, 8)
    twin.load_state_dict(outside.state_dict())

    torch.manual_seed(0)
    reference = Mixed(twin)
    model = paging.build(lambda: Mixed(outside), EVICTING)
    both = []
    for net, kind in ((reference, torch.optim.AdamW), (model, deepoffload.CPUAdamW)):
        groups = [
            {"params": list(net.paged.parameters()), "lr": 1e-2},
            {"params": list(net.plain.parameters()), "lr": 1e-3, "weight_decay": 0.3},
        ]
        optimizer = kind(groups)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        for seed in range(4):
            net(rows(seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        both.append(weights_of(net.paged) | weights_of(net.plain))
    for name, value in both[0].items():
        torch.testing.assert_close(both[1][name], value, rtol=1e-4, atol=1e-5)


def test_optimizer_over_a_subset(paging: Paging) -> None:
    model = paging.build(mlp, EVICTING)
    before = weights_of(model)
    steps(model, deepoffload.CPUAdamW(model[2].parameters(), lr=1e-2))
    for name, value in weights_of(model).items():
        assert torch.equal(value, before[name]) != name.startswith("2."), name


def test_parameter_groups_get_their_own_settings(paging: Paging) -> None:
    """A group with learning rate 0 and decay stays; maximize moves the other way."""
    model = paging.build(mlp, EVICTING)
    before = weights_of(model)
    optimizer = deepoffload.CPUAdamW(
        [
            {"params": list(model[0].parameters()), "lr": 0.0, "weight_decay": 0.5},
            {"params": list(model[2].parameters()), "lr": 1e-3, "weight_decay": 0.0},
            {"params": list(model[4].parameters()), "lr": 1e-3, "weight_decay": 0.0, "maximize": True},
        ]
    )
    model(rows()).square().mean().backward()
    signs = {name: param.grad.sign() for name, param in model.named_parameters()}
    optimizer.step()
    after = weights_of(model)
    for name, value in after.items():
        moved = (value - before[name]).sign()
        expected = {"0": 0, "2": -1, "4": 1}.get(name.split(".")[0], 0)
        # Where the gradient is far above eps the first step is the learning rate in its direction.
        clear = signs[name].abs() > 0
        agree = (moved == expected * signs[name])[clear].float().mean()
        assert agree > 0.95, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"betas": (1.0, 0.9)}, "betas must be two numbers"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"capturable": True}, "no meaning for an update on the host"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, UnsupportedError), match=message):
        deepoffload.CPUAdamW([nn.Parameter(torch.zeros(3))], **options)


def test_several_dtypes_in_one_model(paging: Paging) -> None:
    """fp32, bf16 and fp16 weights side by side, as registered: each has an exact fp32 master from its first value."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, dtype in (("single", torch.float32), ("brain", torch.bfloat16), ("sixteen", torch.float16)):
                self.register_parameter(name, nn.Parameter(torch.randn(64, 64).to(dtype)))

    model = paging.build(Several, EVICTING)
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
    ours = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    torchs = torch.optim.AdamW(masters.values(), lr=1e-2)
    for step in range(3):
        for name, param in model.named_parameters():
            grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).to(param.dtype)
            param.grad = grad
            masters[name].grad = grad.float()
        ours.step()
        torchs.step()
    for name, param in model.named_parameters():
        tolerance = {"single": 1e-6, "brain": 2.0**-7, "sixteen": 2.0**-10}[name]
        torch.testing.assert_close(param.detach().float(), masters[name].detach(), rtol=tolerance, atol=1e-6)
