"""The table "To reach": one row per claim, each a ratio taken round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.end_to_end.cases import BYTES, Work
from benchmarks.end_to_end.runner import Run

PROCESS_BYTES = 64_000_000
"""What our own code and data may take in addition to the budget."""


@dataclass
class Round:
    """What one round gave: runs by case, and the disk's rate by tool, in bytes per second."""

    runs: dict[str, Run] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def best_rate(self) -> float:
        return max(self.rates.values())


@dataclass(frozen=True)
class Row:
    """A claim: ``value`` of a round, or None where it cannot be made, is at most ``target``."""

    name: str
    target: float
    needs: tuple[str, ...]
    value: Callable[[Round], float | None]
    unit: str = ""


@dataclass(frozen=True)
class Result:
    name: str
    target: float
    unit: str
    values: tuple[float, ...]
    median: float
    met: bool


def seconds(a: str, b: str, key: str = "seconds") -> Callable[[Round], float]:
    return lambda round: round.runs[a].median(key) / round.runs[b].median(key)


def moved_bytes(run: Run) -> float:
    return run.median("read_bytes") + run.median("written_bytes")


def bound_seconds(round: Round, disk: str, compute: str) -> float:
    """Least time of a step: that of the same work with everything in memory, or of its bytes at the best rate."""
    return max(round.runs[compute].median("seconds"), moved_bytes(round.runs[disk]) / round.best_rate)


def clipped_bound_seconds(round: Round, disk: str, compute: str, ring_bytes: int) -> float:
    """The same where the norm must be known before anything is updated. During backward, the disk can then only write
    what the ring still holds of the last update and fill it for the next; all else moves in the rest of the step."""
    run = round.runs[compute]
    backward_s = run.median("backward_s")
    hidden_bytes = min(2 * ring_bytes, backward_s * round.best_rate)
    moving_s = (moved_bytes(round.runs[disk]) - hidden_bytes) / round.best_rate
    return backward_s + max(run.median("seconds") - backward_s, moving_s)


def disk_alone(disk: str, other: str) -> Callable[[Round], float]:
    """Our bytes at the disk's best rate, against another's step: nobody who moves these bytes has a lower ratio."""
    return lambda round: moved_bytes(round.runs[disk]) / round.best_rate / round.runs[other].median("seconds")


def against_deepspeed(optimizer: str, everything: str, targets: tuple[float, float], order: str = "") -> list[Row]:
    """Step times next to DeepSpeed's, and next to each what the disk alone takes of DeepSpeed's step."""
    pairs = (
        ("optimizer", optimizer, "deepspeed-nvme-tuned", "DeepSpeed NVMe tuned"),
        ("everything", everything, "deepspeed-all-tuned", "DeepSpeed everything"),
    )
    found = []
    for (what, ours, theirs, their_name), target in zip(pairs, targets, strict=True):
        found += [
            Row(f"{what} on NVMe{order} / {their_name}", target, (ours, theirs), seconds(ours, theirs)),
            Row(f"{what} on NVMe{order}, bytes / rate alone / {their_name}", target, (ours, theirs),
                disk_alone(ours, theirs)),
        ]  # fmt: skip
    return found


def within_memory(a: str, b: str) -> Callable[[Round], float | None]:
    """Step time against step time, provided that ours takes no more memory."""

    def value(round: Round) -> float | None:
        if round.runs[a].peak_bytes > round.runs[b].peak_bytes:
            return None
        return seconds(a, b)(round)

    return value


def to_bound(disk: str, compute: str) -> Callable[[Round], float]:
    return lambda round: round.runs[disk].median("seconds") / bound_seconds(round, disk, compute)


def to_clipped_bound(disk: str, compute: str, ring_bytes: int) -> Callable[[Round], float]:
    def value(round: Round) -> float:
        return round.runs[disk].median("seconds") / clipped_bound_seconds(round, disk, compute, ring_bytes)

    return value


def bytes_per_parameter(case: str, n: int) -> Callable[[Round], float]:
    return lambda round: moved_bytes(round.runs[case]) / n


def memory_share(case: str, work: Work) -> Callable[[Round], float]:
    def value(round: Round) -> float:
        allowed = (
            round.runs["plain-backward"].peak_bytes
            - BYTES["weights"] * work.num_parameters
            + PROCESS_BYTES
            + work.ring_bytes
        )
        return round.runs[case].peak_bytes / allowed

    return value


def rolled_back(case: str, deferred: str) -> Callable[[Round], float | None]:
    """A step whose guesses are undone, against a deferred one: its own time, and what the next step takes longer, which
    makes the updates. None where no step was rolled back, or too few were not."""

    def value(round: Round) -> float | None:
        steps = round.runs[case].steps
        undone = [step["stats"].get("rolled_back", 0.0) for step in steps]
        wrong = [n for n in range(1, len(steps) - 1) if undone[n] > undone[n - 1]]
        after = {n + 1 for n in wrong}
        usual = [step["seconds"] for n, step in enumerate(steps) if n and n not in after and n not in wrong]
        if not wrong or not usual:
            return None
        usual_s = statistics.median(usual)
        pair_s = statistics.median(steps[n]["seconds"] + steps[n + 1]["seconds"] for n in wrong)
        return (pair_s - usual_s) / round.runs[deferred].median("seconds")

    return value


def bound_rows(disk: str, host: str, target: float) -> list[Row]:
    """Step times next to the least that they can be. Cores and memory that serve the disk compute less: the other two
    rows tell how much less, and how near we are to that."""
    beside = f"beside-{disk}"
    return [
        Row(f"{disk} / bound", target, (disk, host), to_bound(disk, host)),
        Row(f"{disk}: in memory beside its bytes / in memory (for information)", 1.0, (beside, host),
            seconds(beside, host)),
        Row(f"{disk} / bound with its bytes moved beside it", target, (disk, beside), to_bound(disk, beside)),
    ]  # fmt: skip


def rows(work: Work, overlap: str) -> list[Row]:
    """All rows for one ``step_overlap``."""
    n = work.num_parameters
    host, half, optimizer, everything = (f"{name}-{overlap}" for name in ("host", "half", "optimizer", "all"))
    tuned = "deepspeed-nvme-tuned"
    targets = (0.30, 0.33) if overlap == "speculative" else (0.48, 0.50)
    bound = 1.2 if n > 8e8 else 1.15
    found = [
        Row(
            "all in host memory / DeepSpeed CPU offload", 0.30, (host, "deepspeed-cpu"), seconds(host, "deepspeed-cpu")
        ),
        Row("half of the state resident / DeepSpeed NVMe tuned", 0.28, (half, tuned), seconds(half, tuned)),
        *against_deepspeed(optimizer, everything, targets),
    ]
    for name in (host, half):
        row = Row(f"{name}, no more memory than DeepSpeed NVMe tuned", 0.15 if name == host else 0.28, (name, tuned),
                  within_memory(name, tuned))  # fmt: skip
        found.append(row)
    if overlap == "none":  # elsewhere the update has no place of its own
        found.append(Row("update / plain loop's update", 0.45, (host, "plain"), seconds(host, "plain", "update_s")))
    found.append(Row("all in host memory / plain loop (for information)", 1.0, (host, "plain"), seconds(host, "plain")))
    for name in (half, optimizer, everything):
        found += bound_rows(name, host, bound)
        if work.clip is not None:
            value = to_clipped_bound(name, host, work.ring_bytes)
            found.append(Row(f"{name} / bound with an idle disk in backward", bound, (name, host), value))
    found += [
        Row("everything on NVMe, with checksums / without", 1.2, (f"verify-{overlap}", everything),
            seconds(f"verify-{overlap}", everything)),
        Row("disk bytes, everything on NVMe", 26.0, (everything,), bytes_per_parameter(everything, n), "B/param"),
        Row("disk bytes, optimizer on NVMe", 20.0, (optimizer,), bytes_per_parameter(optimizer, n), "B/param"),
        Row("peak memory, everything on NVMe / allowed", 1.0, (everything, "plain-backward"),
            memory_share(everything, work)),
    ]  # fmt: skip
    for name in ("optimizer", "all") if overlap == "speculative" else ():
        case, deferred = f"{name}-speculative", f"{name}-deferred"
        found += [
            Row(f"{case}, a step that is rolled back / deferred", 1.25, (f"{case}-sixth", deferred),
                rolled_back(f"{case}-sixth", deferred)),
            Row(f"{case}, every step clips / deferred", 1.02, (f"{case}-clips", deferred),
                seconds(f"{case}-clips", deferred)),
        ]  # fmt: skip
    return found


def order_rows(work: Work, overlap: str) -> list[Row]:
    """What the vertical order of micro-batches saves, for one ``step_overlap``."""
    names = ("host", "optimizer", "all")
    host, optimizer, everything = (f"{name}-{overlap}-vertical" for name in names)
    plain_host, plain_optimizer, plain_everything = (f"{name}-{overlap}" for name in names)
    pairs = (
        ("everything in memory, vertical / horizontal", 1.02, host, plain_host),
        ("optimizer on NVMe, vertical / horizontal", 0.85, optimizer, plain_optimizer),
        ("everything on NVMe, vertical / horizontal", 0.85, everything, plain_everything),
        ("everything on NVMe, vertical / everything in memory", 1.10, everything, plain_host),
    )
    found = [Row(name, target, (a, b), seconds(a, b)) for name, target, a, b in pairs]
    found += against_deepspeed(optimizer, everything, (0.48, 0.50), ", vertical")
    for name in (optimizer, everything):
        found += bound_rows(name, plain_host, 1.15)
    if work.clip is not None:
        value = to_clipped_bound(everything, plain_host, work.ring_bytes)
        found.append(Row(f"{everything} / bound with an idle disk in backward", 1.15, (everything, plain_host), value))
    for name, target, case in (("everything", 26.5, everything), ("optimizer", 20.5, optimizer)):
        value = bytes_per_parameter(case, work.num_parameters)
        found.append(Row(f"disk bytes, {name} on NVMe, vertical", target, (case,), value, "B/param"))
    return found


def evaluate(found: Sequence[Row], rounds: Sequence[Round]) -> list[Result]:
    """The rows whose cases ran, with the median of their rounds."""
    results = []
    for row in found:
        complete = [round for round in rounds if all(case in round.runs for case in row.needs)]
        values = [row.value(round) for round in complete]
        known = tuple(value for value in values if value is not None)
        if complete and len(known) < len(values):
            results.append(Result(row.name, row.target, row.unit, known, float("inf"), False))
        elif known:
            median = statistics.median(known)
            results.append(Result(row.name, row.target, row.unit, known, median, median <= row.target))
    return results
