"""Is the choice of ``python -m deepoffload.estimate --tune`` near the best of all candidates?

    python -m benchmarks.tune --path /mnt/nvme --memory 2GiB --minutes 12

First the tuner chooses, as the command does. Then every candidate that fits is run in the same way, the best
predictions first, until all are through or ``--minutes`` have passed. The report has predicted and measured seconds of
each, and the choice's time by that of the fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.gpt import SHAPES, VOCABULARY
from benchmarks.end_to_end.runner import RESULTS, end_with_children
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.config import parse_config
from deepoffload.config.units import parse_bytes
from deepoffload.device import Tier
from deepoffload.estimate import measure
from deepoffload.estimate.decoder import DecoderShape
from deepoffload.estimate.progress import MeasuringProgress
from deepoffload.estimate.tuning.candidates import Choices, micro_batches
from deepoffload.estimate.tuning.choice import MEMORY_SHARE, CandidateRow, best
from deepoffload.estimate.tuning.model import ModelForm
from deepoffload.estimate.tuning.prediction import CostModel
from deepoffload.estimate.tuning.table import name
from deepoffload.estimate.tuning.tuner import Tuner
from deepoffload.io.swap_files import check_paths


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--size", choices=sorted(SHAPES), default="125m")
    parser.add_argument("--batch", type=int, default=8, help="sequences per optimizer step")
    parser.add_argument("--seq", type=int, default=128, help="tokens of each sequence")
    parser.add_argument("--memory", default="24GiB", help="that may be used")
    parser.add_argument("--minutes", type=float, default=12.0, help="for everything")
    parser.add_argument("--json", type=Path, help="not said: benchmarks/results/tune_SIZE.json")
    return parser.parse_args(arguments)


def tuner_of(said: argparse.Namespace, progress: MeasuringProgress) -> Tuner:
    shape = SHAPES[said.size]
    form = ModelForm(said.seq, shape=DecoderShape(shape.layers, shape.hidden, shape.hidden // 64, VOCABULARY))
    base = {"precision": "bf16", "nvme_path": said.path, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}
    machine = measure.measure_machine(said.path, progress=progress)
    memory = min(machine.host_memory_bytes, parse_bytes(said.memory))
    config = parse_config(base)
    model = CostModel(form, replace(machine, host_memory_bytes=int(memory * MEMORY_SHARE)), config, progress)
    choices = Choices(said.batch, micro_batches(said.batch), offload_activations=(None, Tier.NVME))
    return Tuner(model, choices, base, config.autotuning, progress=progress, memory_bytes=memory)


def sweep(said: argparse.Namespace, tuner: Tuner, rows: tuple[CandidateRow, ...], end: float) -> list[CandidateRow]:
    """Every candidate that fits, with timed operators and a run; those alone that there was time for."""
    found = []
    for row in rows:
        if row.prediction.problem or time.monotonic() > end:
            continue
        prediction = tuner.model.predict(row.prediction.candidate)
        measured = CandidateRow(prediction, tuner.measure(prediction, len(found) + 1))
        found.append(measured)
        seconds = "failed: " + measured.problem if measured.problem else f"{measured.seconds:.3f} s"
        print(f"{name(measured):45} predicted {prediction.seconds:.3f}  {seconds}", file=sys.stderr, flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    end_with_children()
    said = parse(arguments)
    (directory,) = check_paths([said.path], key="--path")
    begun = time.monotonic()
    with MeasuringProgress(sys.stderr) as progress:
        tuner = tuner_of(said, progress)
        rows = tuner.rows()
        took_s = time.monotonic() - begun
        chosen = best(rows)
        if chosen is None:
            print("nothing fits")
            return 1
        ran = [row for row in sweep(said, tuner, rows, begun + 60 * said.minutes) if not row.problem]
    usable = sum(not row.prediction.problem for row in rows)
    fastest = min(ran, key=lambda row: row.seconds)
    again = next((row for row in ran if row.prediction.candidate == chosen.prediction.candidate), chosen)
    ratios = [row.seconds / row.prediction.seconds for row in ran]
    print(f"{'candidate':45} {'predicted':>9} {'measured':>9} {'ratio':>6}")
    for row in ran:
        print(f"{name(row):45} {row.prediction.seconds:9.3f} {row.seconds:9.3f} "
              f"{row.seconds / row.prediction.seconds:6.2f}")  # fmt: skip
    print(
        f"\nchoice {name(chosen)}: {again.seconds:.3f} s; best of {len(ran)} of {usable} candidates that fit: "
        f"{name(fastest)}: {fastest.seconds:.3f} s; choice / best {again.seconds / fastest.seconds:.3f}; tuning took "
        f"{took_s:.0f} s\nmeasured / predicted: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}"
    )
    report: dict[str, Any] = {
        "question": "choice of --tune against the best of all candidates",
        "machine": describe_machine([directory]),
        "size": said.size,
        "batch": said.batch,
        "seq": said.seq,
        "memory": said.memory,
        "tuning_s": took_s,
        "choice": name(chosen),
        "choice_s": again.seconds,
        "best": name(fastest),
        "best_s": fastest.seconds,
        "candidates_that_fit": usable,
        "rows": [
            {"candidate": name(row), "predicted_s": row.prediction.seconds, "measured_s": row.seconds} for row in ran
        ],
    }
    out = said.json or RESULTS / f"tune_{said.size}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
