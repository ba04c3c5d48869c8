"""Classes of optimizers that ``deepoffload.paged`` takes and refuses, and the master-weight loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.loops import nudge


class ScheduleFree(torch.optim.Optimizer):
    """SGD of the kind of schedule-free ones: counts of steps in the group, a second weight, and two modes."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "train_mode": False})

    @torch.no_grad()
    def _interpolate(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = train

    def train(self) -> None:
        self._interpolate(True)

    def eval(self) -> None:
        self._interpolate(False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            lr = group["lr"] * min(1.0, (group["k"] + 1) / 3)
            group["weight_sum"] = group["weight_sum"] + lr * lr
            share = lr * lr / group["weight_sum"]
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.clone())
                    param.lerp_(z, share)
                    param.add_(param.grad, alpha=lr * (group["beta"] * (1 - share) - 1))
                    z.sub_(param.grad, alpha=lr)
            group["k"] += 1


class CountingAdam(torch.optim.Optimizer):
    """Keeps Python numbers and flags, binds new tensors in each step, and gives the weight new memory."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, first=True, mean=torch.zeros_like(param), rows=None)
                state["step"] += 1
                state["first"] = False
                state["mean"] = 0.9 * state["mean"] + param.grad * 0.1
                state["rows"] = param.grad.norm().reshape(1)
                param.data = param.data - group["lr"] * state["mean"] / (1 - 0.9 ** state["step"])


class _Refused(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def entry(self, param: Tensor) -> dict[str, Any]:
        return self.state[param]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for param in params:
            param.sub_(param.grad, alpha=self.rate(params))
            self.keep(param)

    def rate(self, params: list[Tensor]) -> float:
        return 0.01

    def keep(self, param: Tensor) -> None:
        """Change the state."""


class GlobalNorm(_Refused):
    def rate(self, params: list[Tensor]) -> float:
        return 0.01 / float(sum(p.grad.square().sum() for p in params))


class RandomNoise(_Refused):
    def rate(self, params: list[Tensor]) -> float:
        return float(torch.rand(()))


class CountsCalls(_Refused):
    calls = 0

    def rate(self, params: list[Tensor]) -> float:
        self.calls += 1
        return 0.01 / self.calls


class CountsCallsForLater(_Refused):
    """The count shows in the sixth step, which no trial sees."""

    calls = 0

    def rate(self, params: list[Tensor]) -> float:
        self.calls += 1
        return 0.01 / (1 + self.calls // 6)


class CountsInState(_Refused):
    def rate(self, params: list[Tensor]) -> float:
        entry = self.state["all"]
        entry["calls"] = entry.get("calls", 0) + 1
        return 0.01 / (1 + entry["calls"] // 6)


class ClipsTogether(_Refused):
    """By a limit that gradients of an ordinary size do not meet."""

    def rate(self, params: list[Tensor]) -> float:
        norm = float(sum(p.grad.square().sum() for p in params)) ** 0.5
        return 0.01 * min(1.0, 1000 / norm)


class KeepsHistory(_Refused):
    """A list that grows."""

    def keep(self, param: Tensor) -> None:
        self.state[param].setdefault("history", []).append(param.clone())


class KeepsDict(_Refused):
    def keep(self, param: Tensor) -> None:
        self.state[param]["parts"] = {"mean": param.clone()}


class ChangesShape(_Refused):
    """One more entry after the second step."""

    def keep(self, param: Tensor) -> None:
        key = "second" if "first" in self.state[param] else "first"
        self.state[param][key] = torch.zeros_like(param)


class ChangesShapeLate(_Refused):
    """In the fourth step, which no trial sees."""

    def keep(self, param: Tensor) -> None:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        state["moment"] = torch.zeros(3) if state["step"] > 3 else torch.zeros_like(param)


class FailsLate(_Refused):
    """With an error of its own in the fourth step."""

    def keep(self, param: Tensor) -> None:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 3:
            raise ArithmeticError("a matrix is singular")


class ChangesLateInList(_Refused):
    """A list is longer after the fourth step, which no trial sees."""

    def keep(self, param: Tensor) -> None:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        state["bases"] = [torch.zeros(5, 5)] * (2 if state["step"] > 3 else 1)


class OtherShapes(torch.optim.Optimizer):
    """Keeps tensors of other shapes and types, in tuples too, and exchanges two of them in each step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad, state = param.grad, self.state[param]
                if not state:
                    state.update(one=torch.zeros_like(grad), other=torch.zeros_like(grad), seen=None)
                    state["twice"] = torch.zeros(2, *grad.shape)
                    state["half"] = torch.zeros(grad.shape, dtype=torch.bfloat16)
                    state["nested"] = ((torch.zeros(grad.numel(), dtype=torch.int64).view(-1, 1), 0), [], 1.5)
                state["one"], state["other"] = state["other"], state["one"]
                state["one"].add_(grad)
                state["twice"] = torch.stack([state["twice"][1], grad]).transpose(0, -1).contiguous().transpose(0, -1)
                state["half"].add_(grad)
                (signs, count), _, rate = state["nested"]
                state["nested"] = ((signs + grad.sign().long().reshape(-1, 1), count + 1), [], rate)
                update = state["one"] - 0.5 * state["other"] + state["twice"].sum(0) + state["half"].float()
                param.sub_(update + 1e-3 * state["nested"][0][0].view_as(grad), alpha=group["lr"] * rate)


class PlainLoop:
    """The class over fp32 masters of a model's weights, which are rounded to them after each step; in fp32 the weights
    are the masters."""

    def __init__(self, model: nn.Module, make: Callable[[Any], Any], params: Iterable[Tensor] | None = None) -> None:
        self._weights = list(model.parameters() if params is None else params)
        masters = getattr(model, "fp32_masters", None)
        self.masters = self._weights if masters is None else [masters[id(p)] for p in self._weights]
        self.inner = make(self.masters)

    def step(self, factor: float = 1.0) -> None:
        for weight, master in zip(self._weights, self.masters, strict=True):
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
            if master.grad is not None and factor != 1.0:
                master.grad = master.grad * factor
        self.inner.step()
        self.show()

    def show(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self._weights, self.masters, strict=True):
                if master is not weight:
                    if weight.dtype is torch.bfloat16:
                        nudge(master)
                    weight.copy_(master)

    def zero_grad(self) -> None:
        for weight in self._weights:
            weight.grad = None
