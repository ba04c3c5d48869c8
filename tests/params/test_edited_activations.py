"""What autograd has saved of activations and is edited in place before backward: the same error as in plain PyTorch, or
the same gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.loops import assert_same_bits, gradients_of
from tests.support.paging import EVICTING, TIGHT, Paging, Same, plain

WIDTH = 8

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "saves nothing": lambda x: x + 1,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "sin": torch.sin,
    "gelu": F.gelu,
    "square": lambda x: x.pow(2),
    "itself": lambda x: x * x.t(),
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "cumulative": lambda x: (x + 3).cumprod(-1),
    "view": lambda x: x.view(-1).sigmoid().view(WIDTH, WIDTH),
    "in place": lambda x: (x + 1).sigmoid_(),
    "bf16": lambda x: torch.tanh(x.bfloat16()).float(),
    "function": lambda x: _Keeps.apply(x),
}


class _Keeps(torch.autograd.Function):
    """Saves what it is given, what it returns, and something in between."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        y = x * 2
        context.save_for_backward(x, y, x.bool())
        return y

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        x, y, mask = context.saved_tensors
        return grad * (x + y) * mask


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "add_": lambda x: x.add_(1),
    "recorded": lambda x: x.mul_(x.detach() + 2),
    "zero_": lambda x: x.zero_(),
    "items": lambda x: x.__setitem__(0, 1.0),
    "view": lambda x: x.view(-1)[3:7].fill_(2.0),
    "detached": lambda x: x.detach().sub_(3),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "data": lambda x: x.data.mul_(3),
    "numpy": lambda x: x.detach().numpy().__setitem__(0, 0.5),
    "nothing changes": lambda x: x.add_(0),
    "clone": lambda x: x.clone().mul_(2),
}


class Edits(nn.Module):
    """Computes something of its weights, and edits what went in or what came out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.do = OPERATIONS["sigmoid"]
        self.edit = EDITS["none"]
        self.whose = "output"
        self.recording = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x) @ self.first
        y = self.do(x)
        with torch.set_grad_enabled(self.recording):
            self.edit(y if self.whose == "output" else x)
        return y @ self.second


def model() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(64, 64) for _ in range(2)]
    return nn.Sequential(*[Edits() for _ in range(2)], nn.Linear(WIDTH, 64), *layers)


def outcome(model: nn.Module, run: Callable[[], Tensor], *, names: bool) -> Any:
    """The gradients of a program, or the message of its error. With ``names`` also that of the node that made the
    tensor: of an input torch says what made what it is now, and ours what made it what it was."""
    model.zero_grad()
    try:
        run().square().mean().backward()
    except RuntimeError as error:
        words = re.sub(r"(Backward\d*)?, is at", ", is at", str(error))
        return words if names else re.sub(r", which is output \d+ of [\w:]+,", "", words)
    return gradients_of(model)


def test_operations_and_edits(same: Same) -> None:
    x = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)

    def program(model: nn.Sequential) -> Any:
        found: dict[str, Any] = {}
        for do in OPERATIONS:
            for edit in EDITS:
                for whose in ("output", "input"):
                    for layer in model[:2]:
                        layer.do, layer.edit, layer.whose = OPERATIONS[do], EDITS[edit], whose
                        layer.recording = len(found) % 3 > 0
                    names = whose == "output" and do in ("sigmoid", "tanh", "exp", "bf16", "function")
                    found[f"{do} {edit} {whose}"] = outcome(model, lambda: model(x), names=names)
        refused = sum(isinstance(each, str) for each in found.values())
        assert len(found) // 5 < refused < len(found) * 4 // 5, "these programs tell nothing apart"
        return found

    same(model, program, key="edits of activations")


def test_where_torch_has_saved_something_else(same: Same) -> None:
    """Where others keep what is saved, torch compares no versions: neither do we."""
    x = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)

    def copies(model: nn.Module) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    def keeps(model: nn.Module) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0]):
            return model(x)

    def runs_again(model: nn.Sequential) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    def runs_again_outside(model: nn.Sequential) -> Tensor:
        return checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)

    def in_anomaly_mode(model: nn.Sequential) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            output = model(x)
            output.square().mean().backward()
        return output

    def program(model: nn.Sequential) -> Any:
        found = []
        for layer in model[:2]:
            layer.do = torch.sigmoid
        for run in (copies, keeps, runs_again, runs_again_outside, in_anomaly_mode):
            for edit in ("none", "add_", "data"):
                for layer in model[:2]:
                    layer.edit = EDITS[edit]
                found.append(outcome(model, lambda run=run: run(model), names=True))
        return found

    with pytest.warns(UserWarning, match="Error detected in SigmoidBackward0"):
        same(model, program, key="edits of activations")


STEP = st.tuples(
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(0, 3),
    st.sampled_from(sorted(EDITS)),
    st.integers(0, 5),
    st.booleans(),
)


class Pool(nn.Module):
    """Makes tensors of tensors, and edits any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(3)])
        self.steps: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        pool = [torch.tanh(x) @ weight for weight in self.weights]
        for operation, whose, edit, edited, recording in self.steps:
            pool.append(OPERATIONS[operation](pool[whose % len(pool)]).tanh() @ self.weights[whose % 3])
            with torch.set_grad_enabled(recording):
                EDITS[edit](pool[edited % len(pool)])
        return torch.stack(pool).sum(0)


def pools() -> nn.Sequential:
    return nn.Sequential(Pool(), Pool(), nn.Linear(WIDTH, 64), *[nn.Linear(64, 64) for _ in range(3)])


def test_random_programs(paging: Paging) -> None:
    x = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
    reference = plain(pools)
    paged = {setting.name: paging.build(pools, setting, key="pools") for setting in (EVICTING, TIGHT)}
    kinds = set()

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.lists(STEP, min_size=1, max_size=6))
    def same_outcome(steps: list[Any]) -> None:
        def run(model: nn.Sequential) -> Any:
            model[0].steps = model[1].steps = steps
            return outcome(model, lambda: model(x), names=False)

        expected = run(reference)
        kinds.add(type(expected))
        for name, model in paged.items():
            assert_same_bits(expected, run(model), name, nan_is_wrong=False)  # poison shows as other bits, too

    same_outcome()
    assert kinds == {str, dict}, "one kind of outcome was never seen"


def test_gradients_in_a_graph_that_accumulation_changes(same: Same) -> None:
    """A loss of gradients, and more gradients that come before its backward: they are added in place."""

    def program(model: nn.Sequential) -> Any:
        x = torch.ones(2, 64)
        model(x).square().mean().backward()
        scale = torch.ones((), requires_grad=True)
        loss = sum((param.grad * scale).square().sum() for param in model.parameters())
        model(x).square().mean().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return gradients_of(model)

    same(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), program, room=6.0)
