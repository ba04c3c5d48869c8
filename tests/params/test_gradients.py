"""``.grad`` is what a program expects it to be: the truth until the step, readable, writable, assignable, deletable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, Paging, Same


def backward(model: nn.Module, seed: int = 1) -> None:
    model(rows(seed=seed)).square().mean().backward()


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_clip_grad_norm(same: Same, foreach: bool | None, norm: float) -> None:
    def program(model: nn.Module) -> Any:
        backward(model)
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=norm, foreach=foreach)
        return total.clone(), gradients_of(model)

    same(mlp, program)


def test_clip_grad_value_and_get_total_norm(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        backward(model)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        return nn.utils.get_total_norm([p.grad for p in model.parameters()]).clone(), gradients_of(model)

    same(mlp, program)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(same: Same, set_to_none: bool) -> None:
    def program(model: nn.Module) -> Any:
        backward(model)
        model.zero_grad(set_to_none=set_to_none)
        between = gradients_of(model)
        backward(model, 2)
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=set_to_none)
        backward(model, 3)
        return between, gradients_of(model)

    same(mlp, program)


def test_delete_and_set_to_none(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        backward(model)
        model[0].weight.grad = None
        del model[2].weight.grad
        between = gradients_of(model)
        backward(model, 2)
        return between, gradients_of(model)

    same(mlp, program)


def test_accumulation(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        for seed in range(4):
            backward(model, seed)
        return gradients_of(model)

    same(mlp, program)


def test_gradient_object_kept_over_a_second_backward(same: Same) -> None:
    """torch accumulates in place: an object read before shows the sum afterwards."""

    def program(model: nn.Sequential) -> Any:
        backward(model)
        kept = [layer.weight.grad for layer in model[::2]]
        backward(model, 2)
        assert all(k is layer.weight.grad for k, layer in zip(kept, model[::2], strict=True))
        sums = [k.clone() for k in kept]
        model.zero_grad()
        backward(model, 3)
        return sums, [k.clone() for k in kept], gradients_of(model)

    same(mlp, program)


def test_gradient_written_in_place(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        backward(model)
        for layer in model[::2]:
            layer.weight.grad.mul_(0.5)
            layer.weight.grad[0] = 7.0
            layer.bias.grad.data.add_(1.0)
            layer.bias.grad.copy_(layer.bias.grad * 2)
        backward(model, 2)
        return gradients_of(model)

    same(mlp, program)


def test_views_of_gradients(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        backward(model)
        views = [layer.weight.grad.view(-1)[3:9] for layer in model[::2]]
        model(rows()).sum()
        for view in views:
            view.zero_()
        del view
        backward(model, 2)
        return [v.clone() for v in views], gradients_of(model)

    same(mlp, program, room=4.0)


def test_own_gradient_assigned(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        mine = [torch.full_like(p, 0.5) for p in model.parameters()]
        for param, grad in zip(model.parameters(), mine, strict=True):
            param.grad = grad
        backward(model)
        for param, grad in zip(model.parameters(), mine, strict=True):
            assert param.grad is grad
        return mine, gradients_of(model)

    same(mlp, program)


def test_flat_gradient_buffer(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        start = 0
        for param in model.parameters():
            param.grad = flat[start : start + param.numel()].view_as(param)
            start += param.numel()
        backward(model)
        backward(model, 2)
        return flat.clone(), gradients_of(model)

    same(mlp, program)


def test_gradient_of_the_wrong_shape_is_refused_before_anything_changes(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        backward(model)
        with pytest.raises(RuntimeError, match="shape|size"):
            model[0].weight.grad = torch.zeros(3)
        return gradients_of(model)

    same(mlp, program)


def test_gradient_moved_to_another_parameter(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        backward(model)
        model[0].weight.grad = model[2].weight.grad
        model[4].weight.grad = model[6].weight.grad.clone()
        return gradients_of(model)

    same(mlp, program)


def test_gradient_shared_by_two_parameters(same: Same) -> None:
    """Each backward then adds both gradients into the one tensor."""

    def program(model: nn.Sequential) -> Any:
        backward(model)
        model[0].weight.grad = model[2].weight.grad
        backward(model, 2)
        assert model[0].weight.grad is model[2].weight.grad
        between = gradients_of(model)
        model.zero_grad()
        backward(model, 3)
        return between, gradients_of(model)

    same(mlp, program)


def test_freeze_train_unfreeze(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        seen = []
        backward(model)
        model[2].requires_grad_(False)
        model.zero_grad()
        backward(model, 2)
        seen.append(gradients_of(model))
        model[2].weight.requires_grad = True
        backward(model, 3)
        return seen, gradients_of(model)

    same(mlp, program)


class Half(nn.Module):
    """Half frozen from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.body[0].requires_grad_(False)
        self.body[4].weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("door", ["attribute", "method", "module"])
def test_parameter_frozen_when_adopted_and_unfrozen_later_is_trained(paging: Paging, door: str) -> None:
    """With our optimizer: the gradient arrives and the update happens, as for a parameter that never was frozen."""

    def train(model: nn.Module, optimizer: Any) -> Any:
        for seed in range(3):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        if door == "module":
            model.requires_grad_(True)
        else:
            for param in model.parameters():
                param.requires_grad_(True) if door == "method" else setattr(param, "requires_grad", True)
        backward(model, 9)
        gradients = gradients_of(model)
        optimizer.step()
        return gradients, weights_of(model)

    torch.manual_seed(0)
    reference = Half()
    expected, after = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2))
    model = paging.build(Half, EVICTING)
    before = weights_of(model)
    got, updated = train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2))
    assert all(g is not None for g in got.values())
    for name, value in updated.items():
        assert not torch.equal(value, before[name]), f"{name} was not updated"
        torch.testing.assert_close(value, after[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


def test_parameter_without_gradient_in_a_step_stays_as_it_is(paging: Paging) -> None:
    """And keeps its own step count, as torch's Adam does."""

    def train(model: nn.Sequential, optimizer: Any) -> dict[str, Tensor]:
        for seed in range(4):
            model[: 4 if seed % 2 else 12](rows(seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    torch.manual_seed(0)
    reference = mlp()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2))
    model = paging.build(mlp, EVICTING)
    got = train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2))
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_zeroed_gradients_are_gradients(paging: Paging) -> None:
    """``set_to_none=False`` leaves zeros, and weight decay and moments continue."""

    def train(model: nn.Sequential, optimizer: Any) -> dict[str, Tensor]:
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        return weights_of(model)

    torch.manual_seed(0)
    reference = mlp()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.5))
    model = paging.build(mlp, EVICTING)
    got = train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2, weight_decay=0.5))
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_gradients_edited_before_the_step_are_what_is_clipped(paging: Paging) -> None:
    """The norm that landing took must not be used for gradients that were changed since, through any door."""
    model = paging.build(mlp, EVICTING)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=0.0, max_grad_norm=1.0)
    edits: list[Any] = [
        lambda g: g.mul_(3),
        lambda g: g.data.mul_(3),
        lambda g: g.numpy().__imul__(3),
        lambda g: g.view(-1)[:5].fill_(9.0),
        lambda g: torch._foreach_mul_([g], 3.0),
        lambda g: torch.mul(g, 3, out=g),
    ]
    for edit in edits:
        backward(model)
        for param in model.parameters():
            edit(param.grad)
        exact = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(exact, rel=1e-9)
        optimizer.zero_grad()


def test_channels_last_weights_get_channels_last_gradients(same: Same) -> None:
    def build() -> nn.Module:
        layers = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def program(model: nn.Module) -> Any:
        x = torch.randn(2, 16, 6, 6).to(memory_format=torch.channels_last)
        for _ in range(2):
            model(x).square().mean().backward()
        weights = [p for p in model.parameters() if p.dim() == 4]
        strides = [p.grad.stride() for p in weights], [p.stride() for p in weights]
        return strides, gradients_of(model)

    same(build, program)


def test_node_and_module_hooks(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        seen: list[Tensor] = []
        model[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
        model[4].register_full_backward_pre_hook(lambda m, go: seen.append(go[0].clone()))
        model[0].register_forward_hook(lambda m, a, out: out * 2)
        model[0].register_forward_pre_hook(lambda m, a: (a[0] + 1,))
        output = model(rows())
        output.grad_fn.register_prehook(lambda g: (g[0] * 3,))
        output.square().mean().backward()
        return seen, gradients_of(model)

    same(mlp, program)


def test_reading_gradients_without_any(same: Same) -> None:
    same(mlp, lambda model: [model(rows()).detach(), [p.grad for p in model.parameters()]])


def test_gradient_kept_over_the_step_keeps_its_values(paging: Paging) -> None:
    model = paging.build(mlp, EVICTING)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
    backward(model)
    kept = [p.grad for p in model.parameters()]
    expected = [k.clone() for k in kept]
    optimizer.step()
    assert_same_bits(expected, [k.clone() for k in kept])
    optimizer.zero_grad()
    backward(model, 2)
    assert_same_bits(expected, [k.clone() for k in kept])


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64, sparse=True)
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.table(torch.tensor([1, 5, 5, 7])) + self.table(torch.tensor([0, 1, 2, 3])) + x)


def test_sparse_gradients(same: Same) -> None:
    def program(model: Sparse) -> Any:
        backward(model)
        backward(model, 2)
        assert model.table.weight.grad.is_sparse
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return gradients, weights_of(model)

    same(Sparse, program)


def test_sparse_gradients_are_refused_by_our_optimizer(paging: Paging) -> None:
    model = paging.build(Sparse, EVICTING)
    optimizer = deepoffload.CPUAdamW(model.parameters())
    before = weights_of(model)
    backward(model)
    with pytest.raises(RuntimeError, match=r"table.weight has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert_same_bits(before, weights_of(model))


def test_detach_in_place(same: Same) -> None:
    """The old ``zero_grad``."""

    def program(model: nn.Module) -> Any:
        backward(model)
        for param in model.parameters():
            param.grad.detach_()
            param.grad.zero_()
        backward(model, seed=2)
        return gradients_of(model)

    same(mlp, program)


def test_gradients_edited_with_weights_in_grad_mode(same: Same) -> None:
    """Weight decay by hand, outside of ``no_grad``: autograd's own gradient is no view, and ours is none either."""

    def program(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for seed in range(2):
            model(rows(seed=seed)).square().mean().backward()
            for param in model.parameters():
                param.grad.add_(param, alpha=0.01)
            graphs = [param.grad.grad_fn is not None for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return graphs, weights_of(model)

    same(mlp, program)
