"""What a rank that makes a step tells those that have joined, so that they make the same one."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.optim.gradient_state import GradientState
from deepoffload.optim.handles import handle_of
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.params.edits import look_for_edits
from deepoffload.params.unit import ParamHandle


class SteppingOptimizer(Protocol):
    """What an order asks of its optimizer (implemented by :class:`~deepoffload.optim.base.HostOptimizer`)."""

    param_groups: list[dict[str, Any]]
    skip_non_finite: bool
    max_grad_norm: float | None
    needs_gradients: bool

    def _each(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Every parameter, with its group."""


@dataclass(frozen=True)
class StepOrder:
    """One step of one optimizer.

    Attributes:
        optimizer: its number among those of the engine.
        groups: the settings of its groups, without parameters.
        num_params: how many parameters each group has.
        grad_scale: what the gradients are too large by; None where nobody has said.
        edited: names of the parameters that the program has written since their last update.
        frozen: names of those that it has frozen.
        fault: why ranks that have joined cannot make it; empty where they can.
    """

    optimizer: int
    groups: Sequence[Mapping[str, Any]]
    num_params: Sequence[int]
    skip_non_finite: bool
    max_grad_norm: float | None
    grad_scale: float | None
    edited: frozenset[str]
    frozen: frozenset[str]
    fault: str

    def give_settings(self, optimizer: SteppingOptimizer) -> None:
        """This rank's optimizer takes over the settings.

        Raises:
            UsageError: it has other groups, or the program has written its weights on the other ranks alone.
        """
        differing = self.edited ^ _edited(optimizer)
        if differing:
            raise UsageError(
                f"the program has written {min(differing)} on some ranks, while others have joined: these do not run "
                "the program, so what they own of it has not changed. Write weights outside of deepoffload.join"
            )
        num_params = [len(group["params"]) for group in optimizer.param_groups]
        if num_params != list(self.num_params):
            raise UsageError(
                f"the optimizer of a rank that has joined has groups of {num_params} parameters, and that of a rank "
                f"which steps has groups of {list(self.num_params)}: make the same optimizers in the same order on all "
                "ranks"
            )
        for group, settings in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(settings)
        optimizer.skip_non_finite, optimizer.max_grad_norm = self.skip_non_finite, self.max_grad_norm


def order_of(optimizer: SteppingOptimizer, gradients: RankGradients) -> StepOrder:
    """What this rank's optimizer is about to do."""
    number = gradients.pager.held.number_of(optimizer)
    scale = getattr(optimizer, "grad_scale", None)
    groups = optimizer.param_groups
    return StepOrder(
        -1 if number is None else number,
        [{key: value for key, value in group.items() if key != "params"} for group in groups],
        [len(group["params"]) for group in groups],
        optimizer.skip_non_finite,
        optimizer.max_grad_norm,
        None if scale is None else float(scale),
        _edited(optimizer),
        frozenset(handle.name for handle in _handles(optimizer) if is_frozen(handle)),
        _fault(optimizer, number, gradients),
    )


def _edited(optimizer: SteppingOptimizer) -> frozenset[str]:
    handles = _handles(optimizer)
    look_for_edits({handle.unit for handle in handles if handle.unit is not None})
    return frozenset(handle.name for handle in handles if handle.master_stale)


def _handles(optimizer: SteppingOptimizer) -> list[ParamHandle]:
    return [handle for handle in (handle_of(param) for param, _ in optimizer._each()) if handle is not None]


def is_frozen(handle: ParamHandle) -> bool:
    """Whether the program has frozen a parameter."""
    return handle.tensor is not None and not handle.tensor.requires_grad


def _fault(optimizer: SteppingOptimizer, number: int | None, gradients: RankGradients) -> str:
    if number is None:
        return "the optimizer was copied, or made before its parameters were paged: make it from the paged model's"
    for handle in (handle_of(param) for param, _ in optimizer._each()):
        if handle is None or not gradients.present(handle):
            continue
        if handle in gradients.stepped:
            return (
                f"{handle.name}.grad has made a step before, and was kept. Ranks that have joined clear the gradients "
                "between steps: call optimizer.zero_grad() after each step"
            )
        if gradients.state_of(handle) is GradientState.USER or gradients.was_edited(handle):
            return (
                f"the program has changed {handle.name}.grad, or keeps a view of it. Ranks that have joined do not run "
                "the program: clip with the optimizer's max_grad_norm, not with torch's clip_grad_norm_"
            )
    return ""


def packed(order: StepOrder) -> bytes:
    """An order as bytes."""
    return pickle.dumps(order)


def first_order(said: Iterable[bytes]) -> StepOrder:
    """What the ranks that step have said, in rank order; those that have joined say nothing. Their updates are compared
    afterwards.

    Raises:
        UsageError: ranks that have joined cannot make it.
    """
    orders = {rank: pickle.loads(message) for rank, message in enumerate(said) if message}
    for rank, order in orders.items():
        if order.fault:
            raise UsageError(f"rank {rank} steps while others have joined: {order.fault}")
    return next(iter(orders.values()))
