"""Lion, Adagrad and SGD on the machinery of adam_step: against torch.optim (Lion: its definition), every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdagradHyper, DType, LionHyper, Segment, SgdHyper, StateLayout
from tests.native.cpu_adam_scenario import FORMS, AdamBuffers, guards_intact
from tests.native.every_split import kept

SGD = SgdHyper(lr=0.05, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=False, first=False)
ADAGRAD = AdagradHyper(lr=0.05, lr_decay=0.01, eps=1e-10, weight_decay=0.01, step=3)
LION = LionHyper(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
STEPS: dict[str, tuple[Callable[..., None], Any]] = {
    "lion": (cpu_adam.lion_step, LION),
    "adagrad": (cpu_adam.adagrad_step, ADAGRAD),
    "sgd": (cpu_adam.sgd_step, SGD),
    "sgd_plain": (cpu_adam.sgd_step, SGD._replace(momentum=0.0)),
}


def ulp(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.floor(torch.log2(x.double().abs().clamp_min(2.0**-126))) - 23)


def fp32_segment(weight: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Segment:
    return Segment(
        weight.numel(),
        0,
        grad.data_ptr(),
        DType.FP32,
        weight.data_ptr(),
        DType.FP32,
        0,
        0,
        first.data_ptr(),
        second.data_ptr(),
    )


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.0}, {"dampening": 0.5}, {"nesterov": True}, {"weight_decay": 0.0}]
)
def test_sgd_follows_torch(settings: dict[str, Any], maximize: bool) -> None:
    torch.manual_seed(0)
    hyper = SGD._replace(maximize=maximize, **settings)
    n = 20_011
    param = torch.nn.Parameter(torch.randn(n))
    ours, buffer = param.detach().clone(), torch.full((n,), torch.nan)
    optimizer = torch.optim.SGD(
        [param],
        lr=hyper.lr,
        momentum=hyper.momentum,
        dampening=hyper.dampening,
        weight_decay=hyper.weight_decay,
        nesterov=hyper.nesterov,
        maximize=maximize,
        foreach=False,
    )
    scale = torch.ones(n)
    for step in range(10):
        param.grad = torch.randn(n)
        optimizer.step()
        scale = torch.maximum(scale, torch.maximum(param.grad.abs(), param.detach().abs()))
        cpu_adam.sgd_step(
            [fp32_segment(ours, param.grad, buffer, buffer)],
            [hyper._replace(first=step == 0)],
            StateLayout.FP32,
            grad_factor=1.0,
            num_threads=2,
        )
        assert ((ours.double() - param.detach().double()).abs() <= 10 * (step + 1) * ulp(scale)).all()
        if hyper.momentum:
            theirs = optimizer.state[param]["momentum_buffer"]
            assert ((buffer.double() - theirs.double()).abs() <= 10 * (step + 1) * ulp(scale)).all()
    if not hyper.momentum:
        assert buffer.isnan().all()  # the state that plain SGD does not have is not touched


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("settings", [{}, {"lr_decay": 0.0}, {"weight_decay": 0.0}])
def test_adagrad_follows_torch(settings: dict[str, Any], maximize: bool) -> None:
    torch.manual_seed(0)
    hyper = ADAGRAD._replace(maximize=maximize, **settings)
    n = 20_011
    param = torch.nn.Parameter(torch.randn(n))
    param.grad = torch.randn(n)
    total = torch.rand(n)
    ours, our_total, before = param.detach().clone(), total.clone(), param.detach().clone()
    optimizer = torch.optim.Adagrad(
        [param],
        lr=hyper.lr,
        lr_decay=hyper.lr_decay,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=maximize,
        foreach=False,
    )
    optimizer.state[param] = {"step": torch.tensor(2.0), "sum": total}
    optimizer.step()
    segment = fp32_segment(ours, param.grad, our_total, our_total)
    cpu_adam.adagrad_step([segment], [hyper], StateLayout.FP32, grad_factor=1.0, num_threads=2)
    assert ((our_total.double() - total.double()).abs() <= ulp(total)).all()
    bound = ulp(torch.maximum(before.abs(), ours.abs())) + 4 * ulp(ours - before)
    assert ((ours.double() - param.detach().double()).abs() <= bound).all()


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_follows_its_definition(maximize: bool) -> None:
    """Algorithm 2 of Chen et al. in float64; where the direction is within rounding of zero it may be either sign."""
    rng = np.random.default_rng(0)
    n = 20_011
    weight, grad, m = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    grad[:100], m[:100] = 0.0, 0.0
    p, g, a = weight.astype(np.float64), grad.astype(np.float64) * (-1 if maximize else 1), m.astype(np.float64)
    direction = LION.beta1 * a + (1 - LION.beta1) * g
    expected = p * (1 - LION.lr * LION.weight_decay) - LION.lr * np.sign(direction)
    expected_m = LION.beta2 * a + (1 - LION.beta2) * g
    segment = Segment(n, 0, grad.ctypes.data, DType.FP32, weight.ctypes.data, DType.FP32, exp_avg=m.ctypes.data)
    cpu_adam.lion_step([segment], [LION._replace(maximize=maximize)], StateLayout.FP32, grad_factor=1.0, num_threads=2)
    clear = (np.abs(direction) > 1e-6) | (np.arange(n) < 100)
    assert clear.mean() > 0.999
    assert np.allclose(weight[clear], expected[clear], rtol=2e-7, atol=1e-9)
    assert np.allclose(m, expected_m, rtol=1e-6, atol=1e-6)
    assert not m[:100].any()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("grad", DType)
@pytest.mark.parametrize(("layout", "copy"), FORMS)
def test_layouts_lengths_and_threads_agree(layout: StateLayout, copy: DType, grad: DType, name: str) -> None:
    """The fp32 value is that of the FP32 layout, in any length, at any address, on any number of threads."""
    step, hyper = STEPS[name]
    for n, offset_bytes, num_threads in [*((n, n % 7, 1) for n in range(1, 71)), (70_001, 2, 3)]:
        buffers = AdamBuffers(n, layout, grad, copy, seed=n, offset_bytes=offset_bytes)
        plain = AdamBuffers(n, StateLayout.FP32, grad, DType.FP32, seed=n)
        plain.master[:] = buffers.value()
        untouched = [buffers.max_exp_avg_sq.tobytes()]
        step([buffers.segment()], [hyper], layout, grad_factor=0.5, num_threads=num_threads)
        step([plain.segment()], [hyper], StateLayout.FP32, grad_factor=0.5, num_threads=1)
        value = kept(plain.master) if layout is StateLayout.SPLIT_BF16 else plain.master
        assert buffers.value().tobytes() == value.tobytes()
        assert buffers.exp_avg.tobytes() == plain.exp_avg.tobytes()
        assert buffers.exp_avg_sq.tobytes() == plain.exp_avg_sq.tobytes()
        assert untouched == [buffers.max_exp_avg_sq.tobytes()]
        assert all(guards_intact(array) for array in buffers.outputs())


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("lion", {"beta1": 1.0}, "beta1"),
        ("lion", {"beta2": -0.5}, "beta2"),
        ("adagrad", {"lr_decay": -1.0}, "lr_decay"),
        ("adagrad", {"step": 0}, "step"),
        ("sgd", {"momentum": -0.1}, "momentum"),
        ("sgd", {"lr": float("nan")}, "lr"),
        ("sgd", {"nesterov": True, "dampening": 0.1}, "nesterov"),
        ("sgd_plain", {"nesterov": True}, "nesterov"),
    ],
)
def test_wrong_settings(name: str, changes: dict[str, Any], field: str) -> None:
    step, hyper = STEPS[name]
    buffers = AdamBuffers(10, StateLayout.FP32, DType.FP32, DType.FP32)
    before = buffers.master.tobytes()
    with pytest.raises(ValueError, match=rf"hypers\[0\]\.{field}\b"):
        step([buffers.segment()], [hyper._replace(**changes)], StateLayout.FP32, grad_factor=1.0, num_threads=1)
    assert buffers.master.tobytes() == before


@pytest.mark.parametrize(("name", "field"), [("lion", "exp_avg"), ("adagrad", "exp_avg_sq"), ("sgd", "exp_avg")])
def test_a_missing_state_is_named(name: str, field: str) -> None:
    step, hyper = STEPS[name]
    buffers = AdamBuffers(10, StateLayout.FP32, DType.FP32, DType.FP32)
    with pytest.raises(ValueError, match=rf"segments\[0\]\.{field} is 0"):
        segment = buffers.segment()._replace(**{field: 0})
        step([segment], [hyper], StateLayout.FP32, grad_factor=1.0, num_threads=1)
