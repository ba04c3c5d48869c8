"""The state machine of a gradient: each method makes its transition, and none that the table does not have."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from deepoffload.optim.gradient_state import GradientRecord, GradientState
from deepoffload.runtime.context import engine_of
from tests.support.inspect import units_of
from tests.support.paging import RESIDENT, Paging

EMPTY, LANDED, HANDED_OVER, USER = GradientState

MOVES: dict[str, tuple[Callable[[GradientRecord], None], GradientState]] = {
    "landed": (lambda record: record.landed((2.0, False)), LANDED),
    "left_to_program": (GradientRecord.left_to_program, USER),
    "handed_over": (GradientRecord.handed_over, HANDED_OVER),
    "dropped": (GradientRecord.dropped, EMPTY),
}
WAYS = {
    EMPTY: (),
    LANDED: ("landed",),
    HANDED_OVER: ("landed", "handed_over"),
    USER: ("left_to_program",),
}
ALLOWED = {
    (EMPTY, LANDED),
    (EMPTY, USER),
    (LANDED, LANDED),
    (LANDED, EMPTY),
    (LANDED, HANDED_OVER),
    (HANDED_OVER, EMPTY),
    (USER, EMPTY),
}
"""The arrows that ARCHITECTURE.md draws."""


@pytest.fixture
def record(paging: Paging) -> GradientRecord:
    model = paging.build(lambda: nn.Linear(4, 4), RESIDENT)
    return GradientRecord(units_of(model)[0].handles[0])


@pytest.mark.parametrize("state", GradientState, ids=lambda state: state.name)
@pytest.mark.parametrize("move", MOVES)
def test_transitions(record: GradientRecord, state: GradientState, move: str) -> None:
    for step in WAYS[state]:
        MOVES[step][0](record)
    assert record.state is state
    call, to = MOVES[move]
    if (state, to) in ALLOWED:
        call(record)
        assert record.state is to
    else:
        with pytest.raises(RuntimeError, match=f"weight: no transition from {state.name} to {to.name}"):
            call(record)
        assert record.state is state


def test_what_is_known_of_a_landed_gradient(record: GradientRecord) -> None:
    record.landed((2.0, True))
    assert (record.sum_sq, record.non_finite) == (2.0, True)
    record.forget_sum()
    record.landed(None)  # pieces are on their way from a device
    assert record.sum_sq is None
    record.measured(3.0, False)
    assert (record.sum_sq, record.non_finite) == (3.0, False)
    record.dropped()
    assert (record.sum_sq, record.non_finite) == (None, False)


def test_one_record_per_parameter_until_its_unit_is_gone(paging: Paging) -> None:
    model = paging.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), RESIDENT)
    engine = engine_of(model)
    before = set(engine.gradients._records)
    model[1] = nn.Linear(4, 4)
    gc.collect()  # the old layer and its hooks refer to one another
    model(torch.ones(1, 4)).sum().backward()
    records = set(engine.gradients._records)
    assert records == {handle for unit in units_of(engine) for handle in unit.handles}
    assert len(records) == 4 and len(records & before) == 2
