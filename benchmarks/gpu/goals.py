"""What rows are to reach, and what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases import FEW
from deepoffload.schedule.cost_model import Bandwidths, Traffic

Rows = dict[str, dict[str, Any]]
"""Of a report, by name."""


class Missing(Exception):
    """A row that a goal needs has no figure; says which and why."""


@dataclass(frozen=True)
class Goal:
    """One figure of a report and its limit.

    Attributes:
        name: for people.
        figure: raises Missing where rows lack.
        least: whether the figure has to be at least the limit, not at most.
    """

    name: str
    limit: float
    figure: Callable[[Rows, dict[str, Any]], float]
    least: bool = False

    def judged(self, rows: Rows, transfers: dict[str, Any]) -> dict[str, Any]:
        about = {"goal": self.name, "at_least" if self.least else "at_most": self.limit}
        try:
            figure = self.figure(rows, transfers)
        except Missing as error:
            return about | {"missing": str(error)}
        return about | {"figure": figure, "reached": figure >= self.limit if self.least else figure <= self.limit}


def in_words(judged: dict[str, Any]) -> str:
    """A line of the report."""
    limit = f"at least {judged['at_least']}" if "at_least" in judged else f"at most {judged['at_most']}"
    if "missing" in judged:
        return f"{judged['goal']}: not known ({judged['missing']}), to be {limit}"
    return f"{judged['goal']}: {judged['figure']:.3f}, to be {limit}: {'reached' if judged['reached'] else 'MISSED'}"


def judge(report: dict[str, Any]) -> list[dict[str, Any]]:
    """All goals, by what a report has until now."""
    rows = {row["case"]["name"]: row for row in report["cases"]}
    return [goal.judged(rows, report["transfers"]) for goal in _goals()]


def _row(rows: Rows, name: str) -> dict[str, Any]:
    row = rows.get(name)
    if row is None:
        raise Missing(f"{name} has not run")
    if "step_s" not in row:
        said = row.get("left_out") or str(row.get("error", "no figure")).splitlines()[-1]
        raise Missing(f"{name}: {said}")
    return row


def _step_s(rows: Rows, name: str) -> float:
    return float(_row(rows, name)["step_s"])


def _over(ours: str, other: str) -> Callable[[Rows, dict[str, Any]], float]:
    """Seconds per step of one row over those of another one."""
    return lambda rows, transfers: _step_s(rows, ours) / _step_s(rows, other)


def _peak_over_estimate(name: str) -> Callable[[Rows, dict[str, Any]], float]:
    def figure(rows: Rows, transfers: dict[str, Any]) -> float:
        row = _row(rows, name)
        return abs(row["device_peak_bytes"] / row["device_estimate_bytes"] - 1.0)

    return figure


def _over_bound(ours: str, compute: str) -> Callable[[Rows, dict[str, Any]], float]:
    """Seconds per step over the larger of computing and what the disk needs for the bytes of a step."""

    def figure(rows: Rows, transfers: dict[str, Any]) -> float:
        row = _row(rows, ours)
        rates = Bandwidths(**row["disk_rates"], memory_bytes_per_s=1.0)
        disk_s = rates.seconds(Traffic(row["disk_read_bytes"], row["disk_written_bytes"]))
        return float(row["step_s"]) / max(_step_s(rows, compute), disk_s)

    return figure


def _our_calls(ours: str, plain: str) -> Callable[[Rows, dict[str, Any]], float]:
    """What a step of few tokens takes longer than plain PyTorch's, over a whole step: Python and the driver's calls are
    as many for few tokens as for many."""
    return lambda rows, transfers: (
        max(0.0, _step_s(rows, f"{ours}, {FEW}") - _step_s(rows, f"{plain}, {FEW}")) / _step_s(rows, ours)
    )


def _link(direction: str) -> Callable[[Rows, dict[str, Any]], float]:
    def figure(rows: Rows, transfers: dict[str, Any]) -> float:
        if f"{direction}_ratio" not in transfers:
            raise Missing(f"transfers: {transfers.get('error', 'not measured')}")
        return float(transfers[f"{direction}_ratio"])

    return figure


def _goals() -> Iterator[Goal]:
    plain, host = "1.24b plain PyTorch", "1.24b ours, state in host memory"
    yield Goal("1.24 B, state in host memory, over plain PyTorch", 1.25, _over(host, plain))
    yield Goal("the same with speculative updates", 1.12, _over("1.24b ours, speculative updates", plain))
    ours = "7b ours, state in host memory"
    yield Goal("7 B over DeepSpeed", 0.35, _over(ours, "7b DeepSpeed ZeRO-3, optimizer on CPU"))
    yield Goal("7 B over FSDP2", 0.55, _over(ours, "7b FSDP2 CPU offload"))
    yield Goal("7 B over torchao", 0.95, _over(ours, "7b torchao CPUOffloadOptimizer"))
    bound = _over_bound("3.2b ours, optimizer on NVMe", "3.2b plain PyTorch")
    yield Goal("3.2 B on NVMe over max(compute, bytes / rate)", 1.15, bound)
    yield Goal("copies in over the link's rate", 0.9, _link("in"), least=True)
    yield Goal("copies out over the link's rate", 0.9, _link("out"), least=True)
    for gib in (24, 16, 8):
        figure = _peak_over_estimate(f"7b ours, {gib} GB of device memory")
        yield Goal(f"7 B in {gib} GiB of device memory trains; its peak is off the estimate by", 0.1, figure)
    calls = _our_calls("319m ours, everything on the device", "319m plain PyTorch")
    yield Goal("Python and driver calls of ours per step, 319 M on the device", 0.03, calls)
