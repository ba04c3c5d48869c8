"""When guesses begin and end where nobody asks for them, and what the placement says about it."""

from __future__ import annotations

from typing import Any

import pytest

from deepoffload.schedule.cost_model import Bandwidths, BlockKind, StepOverlap, Workload
from deepoffload.schedule.default_updates import with_updates
from deepoffload.schedule.placement import BlockColumns, BlockSpec, Placement, place_columns
from deepoffload.schedule.speculation import (
    FIRST_REST_STEPS,
    FIRST_SHARE,
    SHARE_STEP,
    STEPS_COMPARED,
    STEPS_TO_SETTLE,
    BackwardShare,
    PhaseWaits,
)

MB = 1 << 20
SLOW_DISK = Bandwidths(2e9, 2e9, 2e9, 2e10)
FAST_DISK = Bandwidths(5e10, 5e10, 5e10, 2e10)


def after(share: BackwardShare, steps: int, *, forward: float, backward: float, guessing_s: float = 0.9) -> float:
    """``guessing_s``: how long a step takes with guesses; one without takes a second."""
    for _ in range(steps):
        share.step_ended(PhaseWaits(guessing_s if share.share else 1.0, forward, backward))
    return share.share


def test_guesses_begin_when_forward_waits_long_and_end_when_nothing_waits() -> None:
    share = BackwardShare(asked_for=False)
    assert share.share == 0.0
    assert after(share, 20, forward=0.2, backward=0.5) == 0.0
    assert after(share, 20, forward=0.5, backward=0.1) == FIRST_SHARE
    assert after(share, 40, forward=0.0, backward=0.0) == 0.0


def test_guesses_that_make_steps_no_shorter_end_and_are_tried_seldom() -> None:
    share, shares = BackwardShare(asked_for=False), []
    for _ in range(1000):
        shares.append(after(share, 1, forward=0.5, backward=0.1, guessing_s=0.99))
    begun = [n for n, (before, now) in enumerate(zip(shares, shares[1:], strict=False)) if now > before == 0.0]
    assert set(shares) == {0.0, FIRST_SHARE}
    assert sum(now > 0.0 for now in shares) == len(begun) * (STEPS_TO_SETTLE + STEPS_COMPARED)
    rests = [later - earlier for earlier, later in zip(begun, begun[1:], strict=False)]
    assert rests[0] >= FIRST_REST_STEPS and rests[1] >= 2 * FIRST_REST_STEPS and len(rests) == 3


def test_guesses_that_are_asked_for_begin_at_once_and_never_end() -> None:
    share = BackwardShare(asked_for=True)
    assert share.share == FIRST_SHARE
    assert after(share, 40, forward=0.0, backward=0.0) == FIRST_SHARE
    assert after(share, 40, forward=0.0, backward=0.5) == SHARE_STEP
    assert after(share, 60, forward=0.5, backward=0.0) == 1.0


def placed(capacity_mb: int, nvme_mb: int = 10_000) -> Placement:
    """Ten units of 1 MB of weights, 1 MB of gradients and 5 MB of state."""
    kinds = {BlockKind.WEIGHT: 1, BlockKind.GRADIENT: 1, BlockKind.STATE: 5}
    blocks = tuple(
        BlockSpec(3 * unit + n, f"{unit}.{kind.value}", kind, size * MB, unit)
        for unit in range(10)
        for n, (kind, size) in enumerate(kinds.items())
    )
    return place_columns(
        BlockColumns.of(blocks),
        lambda: blocks,
        capacity_bytes=capacity_mb * MB,
        nvme_capacity_bytes=nvme_mb * MB,
        event_weight_bytes=MB,
        bandwidths=SLOW_DISK,
        workload=Workload(1, StepOverlap.DEFERRED),
    )


@pytest.mark.parametrize(
    "capacity_mb, nvme_mb, rates, why, says",
    [
        (40, 10_000, SLOW_DISK, None, ""),
        (80, 10_000, SLOW_DISK, None, "no optimizer state moves"),
        (40, 10_000, FAST_DISK, None, "the disk moves state in"),
        (40, 50, SLOW_DISK, None, "NVMe has little room left"),
        (40, 10_000, SLOW_DISK, "steps are made durable", "steps are made durable"),
    ],
)
def test_what_is_chosen_where_nothing_is_said(
    capacity_mb: int, nvme_mb: int, rates: Bandwidths, why: str | None, says: str
) -> None:
    before = placed(capacity_mb, nvme_mb)
    placement = with_updates(before, None, rates, no_guesses=why)
    expected = StepOverlap.DEFERRED if says else StepOverlap.SPECULATIVE
    assert placement.step_overlap is expected and says in placement.updates
    assert placement.table().splitlines()[-1] == f"updates: {placement.updates}"
    assert placement.table().splitlines()[:-1] == before.table().splitlines(), "it takes no more memory or disk"


@pytest.mark.parametrize("said", StepOverlap)
def test_what_is_said_is_done(said: StepOverlap) -> None:
    reasons: dict[str, Any] = {"no_guesses": "several ranks train together"}  # refused before where that matters
    for rates in (SLOW_DISK, FAST_DISK):
        placement = with_updates(placed(80), said, rates, **reasons)
        assert placement.step_overlap is said and placement.updates == f"{said.value}, as step_overlap says"
