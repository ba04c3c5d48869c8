"""What an estimate takes and says for the configurations of public models (public.json): CPU seconds without imports
and of the imports, and the number of parameters next to that of the model which transformers builds.

    python -m benchmarks.estimate.public --json benchmarks/results/estimate_public.json
    python -m benchmarks.estimate.public --pieces --models kimi-k2 --json benchmarks/results/estimate_pieces.json

``--pieces`` asks another question: how far the seconds of a step are from those with eight times as many pieces of
state played, in several memories. The machine is always the same one, made up. Each model has a process of its own.
Prints a line for each, and exits with 1 where one takes more than ``--most`` seconds or has another number of
parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

MODELS = Path(__file__).with_name("public.json")
MACHINE = {
    "name": "made up",
    "host_memory_bytes": "64 GiB",
    "nvme_bytes": "64 TB",
    "nvme_read_bytes_per_s": 3e9,
    "nvme_write_bytes_per_s": 2e9,
    "nvme_mixed_bytes_per_s": 3e9,
}
MEMORIES_GIB = (64, 256, 1024)
PIECES_REFERENCE = 16_000


def answer(name: str) -> dict[str, Any]:
    """One estimate, in this process."""
    import torch
    import transformers

    from deepoffload.estimate.__main__ import main

    settings = json.loads(MODELS.read_text())[name]
    # its import is not counted; MPT's own file names a class that transformers spells in another way
    kind = getattr(transformers, settings["architectures"][0], None) or transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as directory:
        file, machine = Path(directory) / "config.json", Path(directory) / "machine.json"
        file.write_text(json.dumps(settings))
        machine.write_text(json.dumps(MACHINE))
        out, err = io.StringIO(), io.StringIO()
        begun = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["--config", str(file), "--machine", str(machine), "--json"])
        seconds = time.process_time() - begun
    said = err.getvalue().replace(str(file), "config.json").splitlines()
    if status == 2:
        return {"model": name, "cpu_s": seconds, "status": status, "refused": said[-1]}
    found = json.loads(out.getvalue())
    fields = {key: value for key, value in settings.items() if key != "model_type"}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(settings["model_type"], **fields)
        built = kind(config) if hasattr(kind, "forward") else kind.from_config(config)
    return {
        "model": name,
        "cpu_s": seconds,
        "status": status,
        "parameters": found["model"]["parameters"],
        "transformers_parameters": sum(param.numel() for param in built.parameters()),
        "tokens": found["model"]["batch"]["length"],
        "smallest_budget_bytes": found["smallest_budget_bytes"],
        "step_s": found["step"]["seconds"] if "step" in found else None,
        "advice": found["advice"],
        "notes": [line for line in said if "[transformers]" not in line],
    }


def pieces(name: str) -> dict[str, Any]:
    """Seconds of a step with few and with many pieces of state played."""
    from deepoffload.config import Config, Precision
    from deepoffload.estimate import Batch, from_config, read_machine, step_time
    from deepoffload.estimate.__main__ import without_collections
    from deepoffload.estimate.coarser import PIECES_MAX
    from deepoffload.estimate.questions import estimate
    from deepoffload.schedule.cost_model import BlockKind, Workload

    with tempfile.TemporaryDirectory() as directory:
        config, file = Path(directory) / "config.json", Path(directory) / "machine.json"
        config.write_text(json.dumps(json.loads(MODELS.read_text())[name]))
        file.write_text(json.dumps(MACHINE))
        subject, machine = from_config(config, Batch()), read_machine(file)
    rows = []
    with without_collections():
        for gib in MEMORIES_GIB:
            here = replace(machine, host_memory_bytes=gib << 30)
            found = estimate(subject, here, Config(precision=Precision.BF16))
            if found.blocks is None or found.run is None or found.step is None:
                rows.append({"memory_gib": gib, "problem": found.problem})
                continue
            said = {"tokens": subject.batch.tokens}
            row: dict[str, Any] = {"memory_gib": gib}
            for which, most in (("few", PIECES_MAX), ("many", PIECES_REFERENCE)):
                begun = time.process_time()
                step = step_time.estimate_step(
                    found.blocks, found.run, here, Workload(1, found.step.step_overlap), pieces_max=most, **said
                )
                row |= {f"{which}_step_s": step.seconds, f"{which}_cpu_s": time.process_time() - begun}
            row["pieces"] = sum(block.kind is BlockKind.STATE for block in found.blocks.placement.blocks)
            row["deviation"] = row["few_step_s"] / row["many_step_s"] - 1
            rows.append(row)
    return {"model": name, "memories": rows}


def in_a_process(name: str, ask: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The answer of a process of its own, which has this one's imports and nothing else."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(ask(name)))
    process.start()
    sender.close()
    row: dict[str, Any] = receiver.recv()
    process.join()
    return row | {"load": os.getloadavg()[0]}


def imported() -> float:
    """CPU seconds until everything is imported that all models need."""
    import torch
    import transformers

    import deepoffload.estimate.__main__  # noqa: F401

    _ = torch.float32, transformers.LlamaForCausalLM
    return time.process_time()


def show_answer(row: dict[str, Any], options: argparse.Namespace) -> str:
    said = row["refused"][:150] if "refused" in row else f"{row['parameters'] / 1e9:8.2f} B, {row['tokens']} tokens"
    wrong = row.get("parameters") != row.get("transformers_parameters")
    slow = row["cpu_s"] > options.most
    return (
        f"{row['model']:20} {row['cpu_s']:6.1f} s  {said}{'  TOO SLOW' if slow else ''}"
        f"{'  WRONG: ' + str(row.get('transformers_parameters')) if wrong else ''}"
    )


def show_pieces(row: dict[str, Any], options: argparse.Namespace) -> str:
    parts = (
        each.get("problem", "").splitlines()[0][:40]
        if "problem" in each
        else f"{each['memory_gib']} GiB {each['pieces']} pieces {each['deviation']:+.2%} ({each['few_cpu_s']:.1f} s "
        f"instead of {each['many_cpu_s']:.1f})"
        for each in row["memories"]
    )
    return f"{row['model']:20} {';  '.join(parts)}"


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=float, default=5.0, help="CPU seconds of one estimate")
    parser.add_argument("--models", nargs="+", default=list(json.loads(MODELS.read_text())))
    parser.add_argument("--pieces", action="store_true", help="ask how exact the seconds of a step are")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    ask: Callable[[str], dict[str, Any]] = pieces if options.pieces else answer
    imports_cpu_s = imported()
    rows = []
    for name in options.models:
        rows.append(in_a_process(name, ask))
        print((show_pieces if options.pieces else show_answer)(rows[-1], options), flush=True)
    if options.json:
        import torch
        import transformers

        found = {
            "question": "seconds of a step with few pieces of state"
            if options.pieces
            else "CPU seconds of an estimate",
            "machine": {
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            "estimated_for": MACHINE,
            "imports_cpu_s": imports_cpu_s,
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    wrong = [row for row in rows if row.get("parameters") != row.get("transformers_parameters")]
    return 1 if wrong or any(row.get("cpu_s", 0) > options.most for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run())
