"""The result of a tuning, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepoffload.config.units import at_least, format_bytes
from deepoffload.estimate.report import table
from deepoffload.estimate.tuning.choice import MEMORY_SHARE, CandidateRow, most_frugal

ROWS_MAX = 12
"""Candidates that are shown to people; JSON has all."""


@dataclass(frozen=True)
class TuningResult:
    """What was compared, and what was chosen (None: nothing can be used). ``rows``: the best first, those that cannot
    be used last. ``settings``: what the chosen one is written as; ``program``: what the program does in addition."""

    model: str
    batch: int
    rows: tuple[CandidateRow, ...]
    chosen: CandidateRow | None
    settings: Mapping[str, Any]
    program: tuple[str, ...]
    metric: str
    took_s: float
    notes: tuple[str, ...] = ()


def as_text(result: TuningResult) -> str:
    """The table of candidates, what was chosen, and why others were not."""
    usable = [row for row in result.rows if not row.prediction.problem]
    shown = usable[:ROWS_MAX] + [row for row in usable[ROWS_MAX:] if row.measurement is not None]
    lines = [
        (
            f"{result.model}: {len(result.rows)} candidates for {result.batch} sequences per optimizer step, "
            f"{len(usable)} of them fit"
        ),
        "",
    ]
    if shown:
        lines += table([_HEAD, *(_cells(row, result.chosen) for row in shown)])
        left = len(usable) - len(shown)
        lines += [f"and {left} more, predicted to be slower"] if left else []
        lines += ["~: by usual rates; the others by this machine's operators"]
    lines += _problems(result)
    if result.chosen is None:
        return "\n".join([*lines, "", "None of them can be used.", *_way_out(result.rows)])
    row = result.chosen
    how = "measured" if row.measurement is not None else "predicted, not run"
    tokens = row.prediction.tokens
    speed = f"{row.seconds:.3g} s per step, {tokens / row.seconds:,.0f} tokens/s ({how})"
    lines += ["", f"chosen by {result.metric}: {speed}; tuning took {result.took_s:.0f} s"]
    return "\n".join([*lines, *(f"  in the program: {line}" for line in result.program)])


_HEAD = (
    "", "micro x steps", "checkpointing", "loss", "order", "activations", "host budget", "s/step", "us/token", "peak",
    "NVMe", "disk/step", "measured",
)  # fmt: skip


def _cells(row: CandidateRow, chosen: CandidateRow | None) -> tuple[str, ...]:
    found, candidate = row.prediction, row.prediction.candidate
    offload = candidate.offload_activations
    about = "" if found.measured_operators else "~"
    return (
        "->" if row is chosen else "",
        f"{candidate.micro_batch} x {candidate.accumulation}",
        "yes" if candidate.checkpointing else "no",
        "tiled" if candidate.tiled_loss else "whole",
        candidate.order.value if candidate.accumulation > 1 else "-",
        "stay" if offload is None else f"to {offload.value}",
        format_bytes(found.host_budget_bytes),
        f"{about}{found.seconds:.3g}",
        f"{about}{found.seconds_per_token * 1e6:.3g}",
        format_bytes(found.peak_bytes),
        format_bytes(found.nvme_bytes) if found.nvme_bytes else "-",
        format_bytes(found.moved_bytes) if found.moved_bytes else "-",
        _measured(row),
    )


def _measured(row: CandidateRow) -> str:
    run = row.measurement
    if run is None:
        return ""
    if run.problem:
        return "failed, see below"
    part = "" if run.accumulation == row.prediction.candidate.accumulation else f", by {run.accumulation} micro-batches"
    return f"{run.seconds:.3g} s, peak {format_bytes(run.peak_bytes)}, {run.steps} steps{part}"


def _problems(result: TuningResult) -> list[str]:
    """Of candidates that cannot be used: each reason once, with how many have it."""
    ran = [
        f"{name(row)}: {row.measurement.problem}" for row in result.rows if row.measurement and row.measurement.problem
    ]
    counts: dict[str, int] = {}
    for row in result.rows:
        if row.prediction.problem:
            first = row.prediction.problem.splitlines()[0]
            counts[first] = counts.get(first, 0) + 1
    lines = [*ran]
    if counts:
        most = max(counts, key=lambda reason: counts[reason])
        lines.append(f"{sum(counts.values())} do not fit, most of them because {most}")
    return [*lines, *result.notes]


def _way_out(rows: Sequence[CandidateRow]) -> list[str]:
    row = most_frugal(rows)
    if row is None:
        return []
    memory = at_least(math.ceil(row.prediction.least_memory_bytes / MEMORY_SHARE))
    return [f"With {memory} of memory this one fits: {name(row)}. Free or allow so much, or use shorter sequences."]


def name(row: CandidateRow) -> str:
    """A candidate in a few words."""
    candidate = row.prediction.candidate
    parts = [f"{candidate.micro_batch} x {candidate.accumulation}"]
    parts += ["checkpointing"] if candidate.checkpointing else []
    parts += ["tiled loss"] if candidate.tiled_loss else []
    parts += [candidate.order.value] if candidate.accumulation > 1 else []
    offload = candidate.offload_activations
    return ", ".join([*parts, *([f"activations to {offload.value}"] if offload is not None else [])])


def as_json(result: TuningResult) -> dict[str, Any]:
    """All candidates; bytes, seconds."""
    return {
        "model": result.model,
        "train_batch_size": result.batch,
        "metric": result.metric,
        "took_s": result.took_s,
        "notes": list(result.notes),
        "chosen": None if result.chosen is None else _plain(result.chosen),
        "settings": dict(result.settings),
        "program": list(result.program),
        "candidates": [_plain(row) for row in result.rows],
    }


def _plain(row: CandidateRow) -> dict[str, Any]:
    said = asdict(row.prediction)
    candidate: dict[str, Any] = said.pop("candidate")
    candidate["order"] = row.prediction.candidate.order.value
    offload = row.prediction.candidate.offload_activations
    candidate["offload_activations"] = None if offload is None else offload.value
    return {**candidate, "predicted": said, "measured": None if row.measurement is None else asdict(row.measurement)}


def in_order(rows: Sequence[CandidateRow]) -> tuple[CandidateRow, ...]:
    """Those that can be used by their predictions, then the others."""
    usable = sorted((row for row in rows if not row.prediction.problem), key=lambda row: row.prediction.weighed)
    return (*usable, *(row for row in rows if row.prediction.problem))
