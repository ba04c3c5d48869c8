"""Ordinary parameters of an optimizer that steps one parameter at a time: their state is in ``optimizer.state``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepoffload.optim.foreign.maker import Maker
from deepoffload.optim.foreign.one_step import OneStep, Operands
from deepoffload.optim.foreign.state_form import StateForm, plain_surroundings
from deepoffload.optim.ordinary import OrdinaryUpdate
from deepoffload.optim.rule import Rule, UpdateJob


class ForeignOrdinary(OrdinaryUpdate):
    """Steps fp32 parameters; they have no other masters.

    Args:
        form_of: the state of a parameter.
    """

    def __init__(self, rule: Rule, maker: Maker, form_of: Callable[[Tensor], StateForm]) -> None:
        super().__init__(rule)
        self._maker = maker
        self._form_of = form_of

    def run(self, jobs: list[tuple[Tensor, dict[str, Any], UpdateJob]], grad_factor: float) -> None:
        """Update each parameter from its gradient times ``grad_factor``."""
        for param, state, job in jobs:
            if not param.numel():
                continue
            form, weight = self._form_of(param), param.detach()
            grad = param.grad if job.hyper.method == "step" else None
            if grad is not None and grad_factor != 1.0:
                grad = grad.detach() * grad_factor
            if job.first:
                arrays = {key: torch.empty_like(weight) for key in form.arrays}
            else:
                arrays = {key: state.pop(key) for key in form.arrays}
            operands = Operands(weight, grad, arrays, state)
            name = f"a parameter of shape {tuple(param.shape)}"
            try:
                with plain_surroundings(weight.device.type):
                    OneStep(self._maker, job.hyper, form, name, weight.device).make(operands, first=job.first)
            finally:
                state.update(arrays)
        if jobs:
            torch.autograd.graph.increment_version([param for param, _, _ in jobs])
