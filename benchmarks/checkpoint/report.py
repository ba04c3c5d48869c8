"""What was measured, as text, and against what it should be."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Round = dict[str, dict[str, Any]]
"""By case and action, what it cost."""


def moved(cost: dict[str, Any]) -> float:
    return float(cost["read_bytes"] + cost["written_bytes"])


def of_rate(case: str, action: str) -> Callable[[Round], float]:
    """The rate of all bytes that were moved, as a share of the disk's."""

    def value(round: Round) -> float:
        cost = round[case][action]
        return moved(cost) / float(cost["seconds"]) / float(cost["disk_bytes_per_s"])

    return value


def of_new_files(case: str) -> Callable[[Round], float]:
    """The same as a share of what the disk gives where all that is written goes to new files."""

    def value(round: Round) -> float:
        cost = round[case]["save"]
        read, written = float(cost["read_bytes"]), float(cost["written_bytes"])
        possible = (read + written) / (read + written / float(cost["new_file_share"]))
        return of_rate(case, "save")(round) / possible

    return value


def new_file_share(round: Round) -> float:
    return float(round["all"]["save"]["new_file_share"])


def seconds_of(action: str, other: str) -> Callable[[Round], float]:
    return lambda round: float(round["all"][action]["seconds"]) / float(round["all"][other]["seconds"])


def call_of(case: str) -> Callable[[Round], float]:
    return lambda round: float(round[case]["background"]["call_s"])


def cost_s(found: dict[str, Any], save: str) -> float:
    """What a save costs the run: its call, and what the steps during it take longer."""
    return float(found[save]["call_s"]) + extra_s(found, save)


def cost_of_torch(case: str) -> Callable[[Round], float]:
    return lambda round: cost_s(round[case], "background") / cost_s(round[case], "torch_async")


def extra_s(found: dict[str, Any], save: str = "background") -> float:
    """What the steps during a save took longer than those before and after it, all together."""
    during = found[save]["steps_s"]
    return float(sum(during)) - len(during) * step_s(found, "steps")


def step_s(found: dict[str, Any], label: str) -> float:
    """The median step of all groups with this label."""
    return statistics.median(step for name in (label, f"{label} again") for step in found[name]["steps_s"])


def extra_of(case: str) -> Callable[[Round], float]:
    """As a multiple of what writing the state alone would take."""

    def value(round: Round) -> float:
        cost = round[case]["background"]
        return extra_s(round[case]) / (float(cost["state_bytes"]) / float(cost["disk_bytes_per_s"]))

    return value


def every_20th(case: str) -> Callable[[Round], float]:
    """A save at every 20th step, as a share of the steps."""
    return lambda round: cost_s(round[case], "background") / (20 * step_s(round[case], "steps"))


def durable_step(round: Round) -> float:
    return step_s(round["durable"], "with") / step_s(round["durable"], "without")


def longest_sync(round: Round) -> float:
    return max(seconds for name in ("with", "with again") for seconds in round["durable"][name]["syncs_s"])


def background_rows(case: str, where: str) -> tuple[tuple[str, str, float, Callable[[Round], float]], ...]:
    return (
        (f"save(wait=False), {where}: s of the call", "at most", 0.05, call_of(case)),
        (f"... what steps take longer / (state / write rate), {where}", "at most", 1.25, extra_of(case)),
        (f"... at every 20th step: share of the steps, {where}", "at most", 0.05, every_20th(case)),
        (f"... costs / torch's async_save costs, {where}", "at most", 0.5, cost_of_torch(case)),
    )


ROWS: tuple[tuple[str, str, float, Callable[[Round], float]], ...] = (
    ("save, everything on NVMe: rate / mixed rate", "at least", 0.9, of_rate("all", "save")),
    ("writing a new file / one written before (for information)", "at least", 0.9, new_file_share),
    ("save, everything on NVMe: rate / what new files allow", "at least", 0.9, of_new_files("all")),
    ("load, everything on NVMe: rate / mixed rate", "at least", 0.9, of_rate("all", "load")),
    ("save from host memory: rate / write rate (for information)", "at least", 0.9, of_rate("host", "save")),
    ("load to host memory: rate / read rate", "at least", 0.9, of_rate("host", "load")),
    ("save / state_dict(), torch.save, sync", "at most", 0.5, seconds_of("save", "torch_save")),
    ("load / torch.load, load_state_dict", "at most", 0.5, seconds_of("load", "torch_load")),
    *background_rows("background", "all on NVMe"),
    *background_rows("background-host", "all in memory"),
    ("durable step / step, all on NVMe", "at most", 1.05, durable_step),
    ("longest fdatasync of a durable step: s", "at most", 0.02, longest_sync),
)


def to_reach(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Each claim with its median."""
    found = []
    for name, sense, target, value in ROWS:
        values = []
        for round in rounds:
            try:
                values.append(value(round))
            except KeyError:
                continue  # the case has not run yet
        if values:
            median = statistics.median(values)
            met = median >= target if sense == "at least" else median <= target
            found.append(
                {"name": name, "sense": sense, "target": target, "values": values, "median": median, "met": met}
            )
    return found


def lines_of(rounds: Sequence[Round], num_parameters: int) -> list[str]:
    """For people."""
    heading = (
        f"{'':26} {'s: min':>7} {'median':>7} {'max':>7} {'read B/param':>13} {'written':>8} {'CPU s':>6} "
        f"{'+ MB':>6} {'disk GB/s':>9} {'foreign CPU':>11}"
    )
    lines = [heading]
    names = dict.fromkeys((case, action) for round in rounds for case in round for action in round[case])
    for case, action in names:
        costs = [round[case][action] for round in rounds if action in round.get(case, {})]
        times = [cost["seconds"] for cost in costs]
        middle = {
            key: statistics.median(cost[key] for cost in costs)
            for key in costs[0]
            if isinstance(costs[0][key], int | float)
        }
        rate = f"{middle['disk_bytes_per_s'] / 1e9:.2f}" if "disk_bytes_per_s" in middle else ""
        lines.append(
            f"{case + ' ' + action:26} {min(times):7.2f} {middle['seconds']:7.2f} {max(times):7.2f} "
            f"{middle['read_bytes'] / num_parameters:13.1f} {middle['written_bytes'] / num_parameters:8.1f} "
            f"{middle['cpu_s']:6.2f} {middle['more_bytes'] / 1e6:6.0f} {rate:>9} "
            f"{middle['foreign_cpu_share']:11.0%}"
        )
    for row in to_reach(rounds):
        met = "met" if row["met"] else "not met"
        lines.append(f"{row['name']:62} {row['median']:7.3f}  {row['sense']} {row['target']:.2f}: {met}")
    return lines
