"""What is measured: which cases run side by side, and what each of them does in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.end_to_end.cases import Case, Work, deepspeed, ours
from deepoffload.cli.nvme.types import Pattern

ROWS = ("all", "host", "background", "background-host", "durable", "deepspeed-cpu")


@dataclass(frozen=True)
class Action:
    """One thing that a case does.

    Attributes:
        label: its name in the report.
        what: the child's word for it.
        rate: the rate of the disk that says how fast it can be.
        case: who does it, a place in the row's cases.
    """

    label: str
    what: str
    rate: Pattern | None = None
    case: int = 0


@dataclass(frozen=True)
class Row:
    name: str
    cases: tuple[Case, ...]
    actions: tuple[Action, ...]


BACKGROUND = (
    Action("steps", "steps"),
    Action("background", "background", Pattern.WRITE),
    Action("steps again", "steps"),
    Action("torch_async", "torch_async"),
)
DURABLE = (
    Action("without", "steps", case=0),
    Action("with", "steps", case=1),
    Action("without again", "steps", case=0),
    Action("with again", "steps", case=1),
)


def one_by_one(**rates: Pattern | None) -> tuple[Action, ...]:
    return tuple(Action(name, name, rate) for name, rate in rates.items())


def chosen_rows(work: Work, names: list[str]) -> list[Row]:
    """Waiting saves and loads with ``step_overlap = "none"``, what happens during training with the default."""
    waiting = {case.name.removesuffix("-none"): case for case in ours(work, "none")}
    training = {case.name.removesuffix("-deferred"): case for case in ours(work, "deferred")}
    peers = {case.name: case for case in deepspeed(work)}
    plain = training["all"]
    durable = replace(
        plain,
        name="durable-deferred",
        text=f"{plain.text}, durable",
        settings={**plain.settings, "durability": {"every": 1}},
    )
    mixed = Pattern.MIXED
    rows = (
        Row("all", (waiting["all"],), one_by_one(save=mixed, load=mixed, torch_save=None, torch_load=None)),
        Row("host", (waiting["host"],), one_by_one(save=Pattern.WRITE, load=Pattern.READ)),
        Row("background", (plain,), BACKGROUND),
        Row("background-host", (training["host"],), BACKGROUND),
        Row("durable", (plain, durable), DURABLE),
        Row("deepspeed-cpu", (peers["deepspeed-cpu"],), one_by_one(save=None, load=None)),
    )
    return [row for row in rows if row.name in names]
