"""The step that a simulated program comes to make, again and again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from deepoffload.schedule.clock import StepTimes, TimedRun, TimedUse


def steady_step(
    make: Callable[[], TimedRun],
    uses: Sequence[TimedUse],
    *,
    first: Sequence[TimedUse] = (),
    discards: Sequence[int] = (),
    warm_up: int = 2,
    steps: int = 2,
) -> tuple[StepTimes, TimedRun]:
    """The mean of ``steps`` steps after ``warm_up`` others, in which the order was learned; and the run itself. It
    ends sooner where a step is like the one before it: all others would be like that.

    ``first``: a step before all others that is not like them (it has no update to make that was put off). ``discards``:
    see ``TimedRun.step``.
    """
    run = make()
    if first:
        run.step(first)
    every: list[StepTimes] = []
    for _ in range(warm_up + steps):
        every.append(run.step(uses, discards))
        if len(every) > 1 and _alike(every[-1], every[-2]):
            break
    played = every[-steps:]

    def mean(name: str) -> float:
        return float(sum(getattr(step, name) for step in played)) / len(played)

    return StepTimes(
        forward_s=mean("forward_s"),
        backward_s=mean("backward_s"),
        update_s=mean("update_s"),
        wait_s=mean("wait_s"),
        backward_wait_s=mean("backward_wait_s"),
        busy_s=mean("busy_s"),
        faults=round(mean("faults")),
        read_bytes=round(mean("read_bytes")),
        written_bytes=round(mean("written_bytes")),
        link_s=mean("link_s"),
        gathered_bytes=round(mean("gathered_bytes")),
        to_device_bytes=round(mean("to_device_bytes")),
        from_device_bytes=round(mean("from_device_bytes")),
        bus_s=mean("bus_s"),
    ), run


ALIKE_SHARE = 1e-3
"""Steps that differ by less take the same time."""


def _alike(one: StepTimes, other: StepTimes) -> bool:
    return all(
        math.isclose(getattr(one, name), getattr(other, name), rel_tol=ALIKE_SHARE, abs_tol=ALIKE_SHARE * one.seconds)
        for name in ("forward_s", "backward_s", "update_s", "wait_s", "busy_s")
    ) and math.isclose(one.read_bytes + one.written_bytes, other.read_bytes + other.written_bytes, rel_tol=ALIKE_SHARE)
