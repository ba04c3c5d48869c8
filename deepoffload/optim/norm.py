"""The sum of squares of all gradients of a step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from deepoffload.optim.handles import gradients_of
from deepoffload.optim.ordinary import sum_of_squares
from deepoffload.params.unit import ParamHandle
from deepoffload.ranks.sums import SquareSum


def squares_of(paged: Iterable[ParamHandle], ordinary: Iterable[Tensor]) -> SquareSum:
    """Of gradients of paged parameters, as far as this rank owns them, and of ordinary ones.

    The sum is exact: it knows neither the order of parameters nor what they are cut into.
    """
    total, non_finite = 0, False
    for handle in sorted(paged, key=lambda h: h.unit.index if h.unit is not None else -1):
        squares, bad = gradients_of(handle.pager).sum_of_squares(handle)
        total += squares
        non_finite |= bad
    for param in ordinary:
        squares, bad = sum_of_squares(param.grad)  # type: ignore[arg-type]
        total += squares
        non_finite |= bad
    return SquareSum(total, non_finite)
