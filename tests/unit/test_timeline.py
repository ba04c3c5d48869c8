"""The timeline: sums by hand, what a real training records, and the exported file in the trace event format."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import UsageError
from deepoffload.runtime.context import engine_of
from deepoffload.runtime.engine import Engine
from deepoffload.timeline import Lane, Timeline
from tests.support.inspect import tiers_of, units_of
from tests.support.models import mlp, rows
from tests.support.paging import SERIAL, TIGHT, Paging, Setting

STEPS = 4


def trained(paging: Paging, setting: Setting) -> tuple[nn.Module, Engine]:
    """A model after a few steps with nothing looked at in between, and its engine."""
    build = partial(mlp, depth=4)
    budget = int(1.6 * paging.least_bytes(build, setting, key="timeline"))
    with paging.context(setting, budget, timeline=True):
        model = build()
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    for seed in range(STEPS):
        model(rows(seed=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, engine_of(model)


def timed(engine: Engine) -> Timeline:
    assert engine.timeline is not None
    return engine.timeline


# -- sums --------------------------------------------------------------------------------------------------------------


def test_nothing_recorded() -> None:
    timeline = Timeline()
    assert timeline.spans() == []
    assert timeline.summary().steps == 0
    assert timeline.summary().table() == "no whole step has been recorded"
    assert timeline.summary().disk_bytes_per_s == 0.0
    timeline.end_of_step()
    assert timeline.summary().steps == 0, "one end of a step is no whole step"


def test_summary_by_hand() -> None:
    timeline = Timeline()
    timeline.phase("forward a")
    timeline.end_of_step()
    begin_s = timeline.spans()[-1].end_s
    timeline.phase("forward b")
    middle_s = timeline.spans()[-1].end_s
    while timeline.spans()[-1].end_s < begin_s + 0.02:  # a step of 20 ms at least, for round numbers within
        timeline.phase("forward b")
    ms = 1e-3
    timeline.add(Lane.READ, "before", begin_s - 5 * ms, begin_s - 4 * ms, 1000)
    timeline.add(Lane.READ, "begun before", begin_s - 5 * ms, begin_s + 2 * ms, 300)
    timeline.add(Lane.WRITE, "one", begin_s + 1 * ms, begin_s + 3 * ms, 50)
    timeline.add(Lane.WRITE, "two", begin_s + 6 * ms, begin_s + 7 * ms, 7)
    timeline.add(Lane.WAIT, "read weight: a", begin_s + 1 * ms, begin_s + 2 * ms)
    timeline.add(Lane.WAIT, "write state: b", begin_s + 4 * ms, begin_s + 6 * ms)
    timeline.add(Lane.WAIT, "read weight: c", begin_s + 6 * ms, begin_s + 6.5 * ms)
    timeline.add(Lane.UPDATE, "update a", begin_s + 8 * ms, begin_s + 11 * ms, 10)
    timeline.add(Lane.LANDING, "a.grad", begin_s + 12 * ms, begin_s + 12.25 * ms, 10)
    timeline.end_of_step()
    end_s = timeline.spans()[-1].end_s
    timeline.add(Lane.READ, "ends later", begin_s + 1 * ms, end_s + 5 * ms, 10**9)
    timeline.add(Lane.UPDATE, "after", end_s + 1 * ms, end_s + 2 * ms)

    summary = timeline.summary()
    assert middle_s <= end_s
    assert summary.steps == 1 and summary.seconds == pytest.approx(end_s - begin_s, abs=1e-9)
    assert summary.wait_s == pytest.approx(3.5 * ms)
    assert summary.update_s == pytest.approx(3 * ms)
    assert summary.landing_s == pytest.approx(0.25 * ms)
    assert summary.compute_s == pytest.approx(end_s - begin_s - 6.75 * ms)
    assert (summary.read_bytes, summary.written_bytes) == (300, 57)
    assert summary.disk_busy_s == pytest.approx(4 * ms)
    assert summary.disk_bytes_per_s == pytest.approx(357 / (4 * ms))
    assert list(summary.waited_for) == ["write state", "read weight"]
    assert list(summary.waited_for.values()) == pytest.approx([2 * ms, 1.5 * ms])
    table = summary.table().splitlines()
    assert table[0].startswith("1 steps") and any("write state" in line for line in table)


def test_how_busy_the_disk_is_in_backward() -> None:
    """Updates inside backward belong to it; those of the next forward do not."""
    timeline = Timeline()
    timeline.phase("forward a")
    timeline.end_of_step()
    for name in ("forward a", "backward b", "update b", "backward a"):
        timeline.phase(name)
    timeline.end_of_step()
    spans = {span.name: span for span in timeline.spans()}
    begin_s, end_s = spans["backward b"].begin_s, spans["backward a"].end_s
    timeline.add(Lane.READ, "until its middle", begin_s - 1.0, (begin_s + end_s) / 2, 10)
    summary = timeline.summary()
    assert summary.backward_s == pytest.approx(end_s - begin_s, abs=1e-9)
    assert summary.disk_busy_in_backward_s == pytest.approx((end_s - begin_s) / 2, abs=1e-9)


def test_only_the_last_steps_count() -> None:
    timeline = Timeline()
    for _ in range(5):
        timeline.end_of_step()
    assert [timeline.summary(last).steps for last in (1, 2, 4, 10)] == [1, 2, 4, 4]


def test_phases_leave_no_gap() -> None:
    timeline = Timeline()
    for name in ("forward a", "forward b", "backward b"):
        timeline.phase(name)
    timeline.end_of_step()
    spans = timeline.spans()
    assert [span.name for span in spans] == ["forward a", "forward b", "backward b"]
    assert all(one.end_s == other.begin_s for one, other in zip(spans, spans[1:], strict=False))


def test_old_spans_are_dropped() -> None:
    timeline = Timeline(spans_max=3)
    for number in range(10):
        timeline.add(Lane.READ, str(number), float(number), number + 0.5, 1)
    assert [span.name for span in timeline.spans()] == ["7", "8", "9"]


def test_steps_whose_spans_were_dropped_are_not_summed_up() -> None:
    """Else what was dropped would count as compute."""
    timeline = Timeline(spans_max=8)
    for _ in range(6):
        for number in range(3):
            timeline.phase(f"forward {number}")
        timeline.end_of_step()
    summary = timeline.summary()
    kept = [span for span in timeline.spans() if span.lane is Lane.PROGRAM]
    assert 1 <= summary.steps <= 2
    assert summary.seconds <= sum(span.end_s - span.begin_s for span in kept) + 1e-9


# -- a real training ---------------------------------------------------------------------------------------------------


def test_off_by_default(paging: Paging) -> None:
    model = paging.build(partial(mlp, depth=4), TIGHT, key="timeline")
    model(rows()).sum().backward()
    engine = engine_of(model)
    assert engine.timeline is None and tiers_of(engine).timeline is None
    for ask in (engine.summary, lambda: engine.export_trace("/nonexistent/trace.json")):
        with pytest.raises(UsageError, match="timeline = true"):
            ask()


@pytest.mark.parametrize("setting", [TIGHT, SERIAL], ids=str)
def test_spans_of_a_training(paging: Paging, setting: Setting) -> None:
    model, engine = trained(paging, setting)
    spans = timed(engine).spans()
    assert all(span.begin_s <= span.end_s for span in spans)
    units = [unit.name for unit in units_of(engine)]
    program = [span for span in spans if span.lane is Lane.PROGRAM]
    assert all(one.end_s == other.begin_s for one, other in zip(program, program[1:], strict=False))
    kinds = {kind: {s.name.split()[1] for s in program if s.name.startswith(kind)} for kind in ("forward", "backward")}
    assert kinds == {"forward": set(units), "backward": set(units)}

    # Every piece is updated once per step; of a deferred last one nothing is done yet.
    updates = [span for span in spans if span.lane is Lane.UPDATE]
    done = STEPS if setting is SERIAL else STEPS - 1
    pieces = {unit.name: len(unit.pieces) for unit in units_of(engine)}
    assert {name: sum(s.name == f"update {name}" for s in updates) for name in units} == {
        name: done * count for name, count in pieces.items()
    }
    assert sum(span.nbytes for span in updates) == done * sum(
        piece.block.nbytes for unit in units_of(engine) for piece in unit.pieces
    )
    landings = [span for span in spans if span.lane is Lane.LANDING]
    assert len(landings) == STEPS * sum(len(unit.handles) for unit in units_of(engine))

    stats = engine.stats()
    moved = {lane: sum(s.nbytes for s in spans if s.lane is lane) for lane in (Lane.READ, Lane.WRITE)}
    assert 0 < moved[Lane.READ] <= stats["disk_bytes_read"] and 0 < moved[Lane.WRITE] <= stats["disk_bytes_written"]
    waits = [span for span in spans if span.lane is Lane.WAIT]
    assert sum(s.end_s - s.begin_s for s in waits) == pytest.approx(stats["wait_s"], abs=1e-6)


@pytest.mark.parametrize("setting", [TIGHT, SERIAL], ids=str)
def test_the_summary_adds_up(paging: Paging, setting: Setting) -> None:
    model, engine = trained(paging, setting)
    summary = engine.summary()
    assert summary.steps == STEPS - 1
    parts = summary.compute_s + summary.wait_s + summary.update_s + summary.landing_s
    assert parts == pytest.approx(summary.seconds)
    assert sum(summary.waited_for.values()) == pytest.approx(summary.wait_s)
    assert 0 < summary.disk_busy_s <= summary.seconds
    assert summary.update_s > 0 and summary.landing_s > 0 and summary.read_bytes > 0 and summary.written_bytes > 0
    assert engine.summary(1).steps == 1 and engine.summary(1).seconds < summary.seconds


def check_event(event: dict[str, Any]) -> None:
    """Complete and metadata events as the format's document describes them."""
    assert isinstance(event["name"], str) and event["name"]
    assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["args"], dict)
    if event["ph"] == "M":
        assert event["name"] == "thread_name" and event["args"]["name"]
        return
    assert event["ph"] == "X" and isinstance(event["cat"], str)
    assert type(event["ts"]) is float and type(event["dur"]) is float
    assert event["ts"] >= 0 and event["dur"] >= 0


def test_export(paging: Paging, tmp_path: Path) -> None:
    model, engine = trained(paging, TIGHT)
    engine.export_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    events = trace["traceEvents"]
    for event in events:
        check_event(event)
    assert {event["pid"] for event in events} == {os.getpid()}
    complete = [event for event in events if event["ph"] == "X"]
    spans = timed(engine).spans()
    assert sorted((e["name"], e["cat"]) for e in complete) == sorted((s.name, s.lane.value) for s in spans)
    rows_named = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert len(set(rows_named.values())) == len(rows_named)
    assert {e["tid"] for e in complete} == set(rows_named)
    assert all(rows_named[e["tid"]].split()[0] == e["cat"] for e in complete)
    # Within a row nothing overlaps: viewers would draw it one inside the other, or refuse it.
    for row in rows_named:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e["tid"] == row)
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in zip(mine, mine[1:], strict=False))


def test_export_of_transfers_that_overlap(tmp_path: Path) -> None:
    timeline = Timeline()
    start_s = 1e9  # later than any clock here
    for name, begin, end in (("a", 0.0, 3.0), ("b", 1.0, 2.0), ("c", 2.0, 4.0), ("d", 3.0, 5.0), ("e", 4.5, 4.5)):
        timeline.add(Lane.READ, name, start_s + begin, start_s + end, 64)
    timeline.export(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    rows_of = {e["name"]: names[e["tid"]] for e in events if e["ph"] == "X"}
    assert rows_of == {"a": "read", "b": "read 2", "c": "read 2", "d": "read", "e": "read 2"}
    assert all(e["args"] == {"bytes": 64} for e in events if e["ph"] == "X")


def test_recording_changes_no_bits(paging: Paging) -> None:
    ends = []
    for timeline in (False, True):
        build = partial(mlp, depth=4)
        torch.manual_seed(0)
        with paging.context(TIGHT, int(1.6 * paging.least_bytes(build, TIGHT, key="timeline")), timeline=timeline):
            model = build()
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        for seed in range(2):
            model(rows(seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])
        del model, optimizer
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
