"""Predictions against real runs: peak memory, bytes on NVMe, and the time of a step.

    python -m benchmarks.estimate --path /mnt/nvme --sizes 125m 319m 620m 1.24b

Every row trains a decoder in a process of its own. Right before it the disk, the update and the operators of that
model are measured, so that prediction and run meet the same machine. Prints a table; --json writes it with the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepoffload.config import Config, Precision, StepOverlap
from deepoffload.device import Tier
from deepoffload.estimate import Batch, Estimate, estimate
from deepoffload.estimate.decoder import DecoderShape
from deepoffload.estimate.measure import measure_machine, measure_ops
from deepoffload.estimate.subject import from_shape

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "tiny": (4, 256),
    "125m": (16, 768),
    "319m": (24, 1024),
    "620m": (21, 1536),
    "1.24b": (24, 2048),
}
"""Layers and hidden size."""
VOCABULARY = 8192
RING_BYTES = 400_000_000
BYTES = {"bf16": (2, 2, 10), "fp32": (4, 4, 8)}
"""Per parameter: weights, gradients, optimizer state."""


@dataclass(frozen=True)
class Row:
    """One run. Bytes and seconds; ``step_s`` is the median of the steps after the first two."""

    size: str
    case: str
    overlap: str
    budget_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int
    nvme_bytes: int
    predicted_nvme_bytes: int
    step_s: float
    predicted_step_s: float
    read_bytes: int
    predicted_read_bytes: int
    written_bytes: int
    predicted_written_bytes: int
    bound: str
    load: float


def budgets(parameters: int, precision: str) -> dict[str, tuple[int, dict[str, str]]]:
    weights, gradients, state = (parameters * nbytes for nbytes in BYTES[precision])
    ring = min(RING_BYTES, state // 8)
    return {
        "host": (int((weights + gradients + state) * 1.01) + (64 << 20), {}),
        "half": (int((weights + gradients + state // 2) * 1.01) + ring, {}),
        "optimizer": (int((weights + gradients) * 1.01) + ring, {"offload_param": "cpu"}),
        "all": (int(gradients * 1.01) + ring, {}),
    }


def predict(
    options: argparse.Namespace, shape: DecoderShape, budget: int, more: dict[str, str], overlap: str
) -> Estimate:
    """Everything is measured now."""
    torch.set_num_threads(options.threads)
    config = Config(
        host_budget=budget,
        precision=Precision(options.precision),
        step_overlap=StepOverlap(overlap),
        gradient_accumulation_steps=options.accumulation,
        offload_param=Tier.HOST if more else None,
    )
    subject = from_shape(shape, Batch(options.batch, options.seq), checkpointing=options.checkpointing)
    machine = measure_machine(options.path)
    first = estimate(subject, machine, config)
    if first.run is None:
        raise SystemExit(first.problem)
    return estimate(subject, machine, config, time_ops=measure_ops)


def real(options: argparse.Namespace, shape: DecoderShape, budget: int, more: dict[str, str], overlap: str) -> Any:
    settings = {
        "shape": asdict(shape),
        "checkpointing": options.checkpointing,
        "batch": options.batch,
        "length": options.seq,
        "accumulation": options.accumulation,
        "precision": options.precision,
        "steps": options.steps + 2,
        "threads": options.threads,
        "config": {"host_budget": budget, "step_overlap": overlap, **more},
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "estimate" / "child.py"), options.path, json.dumps([settings])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def row(options: argparse.Namespace, size: str, case: str, overlap: str) -> Row:
    layers, hidden = SHAPES[size]
    shape = DecoderShape(layers, hidden, hidden // 64, VOCABULARY, biased=False, tied=False)
    parameters = from_shape(shape, Batch(1, 8)).num_parameters
    budget, more = budgets(parameters, options.precision)[case]
    expected = predict(options, shape, budget, more, overlap)
    found = real(options, shape, budget, more, overlap)
    if expected.memory is None or expected.step is None or expected.blocks is None:
        raise SystemExit(expected.problem)
    # The process is measured by the run itself, as the machine is: it is no part of what is predicted.
    process = found["process_bytes"] - expected.machine.process_bytes
    steady = found["steps"][2:]
    return Row(
        size=size,
        case=case,
        overlap=overlap,
        budget_bytes=budget,
        peak_bytes=found["peak_bytes"],
        predicted_peak_bytes=expected.memory.host_bytes + process,
        nvme_bytes=sum(found["paged_nvme_bytes"].values()),
        predicted_nvme_bytes=expected.memory.nvme_bytes,
        step_s=statistics.median(step["seconds"] for step in steady),
        predicted_step_s=expected.step.seconds,
        read_bytes=round(statistics.mean(step["read"] for step in steady)),
        predicted_read_bytes=expected.step.times.read_bytes,
        written_bytes=round(statistics.mean(step["written"] for step in steady)),
        predicted_written_bytes=expected.step.times.written_bytes,
        bound=expected.step.bound,
        load=os.getloadavg()[0],
    )


def show(row: Row) -> str:
    return (
        f"{row.size:>6} {row.case:>9} {row.overlap:>8}  peak {row.peak_bytes / 1e6:7.0f} MB, predicted "
        f"{row.predicted_peak_bytes / row.peak_bytes - 1:+6.1%};  NVMe {row.nvme_bytes / 1e6:7.0f} MB, off by "
        f"{row.predicted_nvme_bytes - row.nvme_bytes} bytes;  step {row.step_s:6.2f} s, predicted "
        f"{row.predicted_step_s:6.2f} ({row.predicted_step_s / row.step_s - 1:+.0%});  load {row.load:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--sizes", nargs="+", default=["125m"], choices=SHAPES)
    parser.add_argument("--cases", nargs="+", default=["host", "half", "optimizer", "all"])
    parser.add_argument("--overlaps", nargs="+", default=["deferred"], choices=("deferred", "none", "in_backward"))
    parser.add_argument("--precision", default="bf16", choices=BYTES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        for overlap in options.overlaps:
            for case in options.cases:
                rows.append(row(options, size, case, overlap))
                print(show(rows[-1]), flush=True)
    if options.json:
        machine = {"cores": os.cpu_count(), "processor": platform.processor(), "torch": torch.__version__}
        found = {
            "question": "predicted against measured: peak memory, bytes on NVMe, time of a step",
            "machine": machine | {"time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
