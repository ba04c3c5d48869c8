"""When a unit's last gradient has landed."""

from __future__ import annotations

from itertools import permutations

import pytest
from torch import nn

from deepoffload.optim.unit_completion import UnitCompletion
from deepoffload.params.unit import ParamHandle
from tests.support.inspect import units_of
from tests.support.paging import RESIDENT, Paging


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class Expected:
    """Expects gradients of ``handles``."""

    def __init__(self, handles: list[ParamHandle]) -> None:
        self.handles = set(handles)
        self.completion = UnitCompletion(self.handles.__contains__)

    def land(self, *handles: ParamHandle) -> list[list[ParamHandle]]:
        return [self.completion.landed(handle) for handle in handles]


@pytest.fixture
def handles(paging: Paging) -> list[ParamHandle]:
    """Four parameters of one unit, in the unit's order."""
    model = paging.build(lambda: nn.ModuleList([Layer()]), RESIDENT)
    (unit,) = units_of(model)
    assert len(unit.handles) == 4
    return [*unit.handles]


def test_the_last_of_any_order_completes_the_unit(handles: list[ParamHandle]) -> None:
    for order in permutations(handles):
        assert Expected(handles).land(*order) == [[], [], [], handles]


def test_what_is_not_expected_is_not_waited_for_and_completes_nothing(handles: list[ParamHandle]) -> None:
    a, b, c, d = handles
    expected = Expected([a, c])
    assert expected.land(b, a, d, b) == [[], [], [], []]
    assert expected.land(c) == [[a, c]]
    assert expected.land(d) == [[]]


def test_a_gradient_that_lands_twice_stands_for_no_other(handles: list[ParamHandle]) -> None:
    a, b, c, d = handles
    assert Expected(handles).land(a, a, b, b, c, c) == [[]] * 6
    assert Expected(handles).land(d, d, c, b, a, b) == [[]] * 4 + [handles] * 2


def test_a_parameter_that_is_frozen_meanwhile(handles: list[ParamHandle]) -> None:
    a, b, c, d = handles
    expected = Expected(handles)
    assert expected.land(a, b) == [[], []]
    expected.handles -= {a, c}
    assert expected.land(d) == [[b, d]]


def test_a_new_step_of_some(handles: list[ParamHandle]) -> None:
    a, b, c, d = handles
    expected = Expected(handles)
    expected.land(a, b)
    expected.completion.start_step([b, c])
    assert expected.land(c, d) == [[], []]
    assert expected.land(b) == [handles]
    expected.completion.start_step(handles)
    assert expected.land(a, b, c) == [[]] * 3


def test_units_are_apart(paging: Paging) -> None:
    model = paging.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), RESIDENT)
    first, second = (unit.handles for unit in units_of(model))
    expected = Expected([*first, *second])
    assert expected.land(first[0], second[1], second[0]) == [[], [], second]
    assert expected.land(first[1]) == [first]


def test_a_parameter_without_a_unit(handles: list[ParamHandle]) -> None:
    lone = handles[0]
    lone.unit = None
    assert Expected(handles).land(lone) == [[]]
