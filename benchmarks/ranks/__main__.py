"""What ranks cost each other: `python -m benchmarks.ranks collectives`, `rounds`, `training` or `saving`.

`collectives`: to gather a unit's shards and to reduce its contributions in order, by either transport, next to gloo's
own collectives. `rounds`: to agree on what comes next, by itself and in steps with and without it. `training`: whole
steps, next to DDP, FSDP2 and DeepSpeed. `saving`: a training state that all ranks save and load. All contenders take
turns in every round; reported are medians of seconds and of a round's ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.launch import start_ranks
from benchmarks.ranks import saving
from benchmarks.ranks.training import Work, cases, measure


def launch(module: str, ranks: int, arguments: list[str], limit_s: float) -> str:
    """Run a module on every rank, each with one thread, and return what rank 0 prints."""
    processes = start_ranks([sys.executable, "-m", module, *arguments], ranks, threads=1)
    try:
        printed = [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise SystemExit(f"ranks {failed} of {module} have failed")
    return printed[0]


def table(report: dict[str, object]) -> str:
    rows: dict[str, dict[str, float]] = report["rows"]
    lines = [f"{'':44}{'ms':>9}{'CPU ms':>9}"]
    lines += [f"{name:44}{row['ms']:9.2f}{row['cpu_ms']:9.2f}" for name, row in rows.items()]
    ratios: dict[str, dict[str, float]] = report["ratios"]
    lines += ["", f"{'ratio of a round':68}{'median':>8}{'lowest':>8}{'highest':>8}"]
    lines += [
        f"{name:68}{ratio['median']:8.3f}{ratio['lowest']:8.3f}{ratio['highest']:8.3f}"
        for name, ratio in ratios.items()
    ]
    return "\n".join(lines)


def report_training(said: argparse.Namespace) -> None:
    if not said.path:
        raise SystemExit("training needs --path: a directory on a real disk")
    report = measure(
        Work(said.size, said.accumulate, said.steps, said.warmup, clip=said.clip),
        ranks=said.ranks,
        rounds=said.rounds,
        rows=said.rows or (),
        path=said.path,
        host_budget=said.host_budget,
        deepspeed_python=said.deepspeed_python,
    )
    names: dict[str, dict[str, Any]] = report["ratios"]
    for name, ratio in names.items():
        memory, cpu = report["memory_ratios"][name]["median"], report["cpu_ratios"][name]["median"]
        print(
            f"{name:40} time {ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})  CPU {cpu:.2f}"
            f"  memory {memory:.2f}"
        )
    for name, kinds in report["of_bound"].items():
        time = kinds["time"]
        print(
            f"{name:40} of max(memory, bytes / disk) {time['median']:.2f} ({time['lowest']:.2f} to "
            f"{time['highest']:.2f}); its processor time alone {kinds['CPU']['median']:.2f}"
        )
    if said.json:
        Path(said.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def report_saving(said: argparse.Namespace) -> None:
    if not said.path:
        raise SystemExit("saving needs --path: a directory on a real disk")
    report = saving.measure(
        ranks=said.ranks, size=said.size, rounds=said.rounds, host_budget=said.host_budget, path=said.path
    )
    for phase, found in report["found"].items():
        print(f"{phase:6} {found['peak_bytes'] / 1e9:6.3f} GB of memory")
    for phase in ("save", "load"):
        found = report["found"][phase]
        print(f"{phase:6} {found['bytes_per_s'] / 1e9:6.2f} GB/s, {found['of_disk']:.2f} of what the disk does")
    if said.json:
        Path(said.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["collectives", "rounds", "training", "saving"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=float, default=25.0, help="size of the unit in bf16, 10^6 bytes")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--units", type=int, default=26, help="rounds: of a step")
    parser.add_argument(
        "--compute-ms", type=float, default=20.0, help="rounds: of a unit's forward; backward has twice"
    )
    parser.add_argument("--transport", choices=["group", "memory"], default="group", help="rounds: of the payload")
    parser.add_argument("--path", help="training: a directory on a real disk")
    parser.add_argument("--size", default="319m", help="training: of the model")
    parser.add_argument("--accumulate", type=int, default=1, help="training: micro-batches per step")
    parser.add_argument("--steps", type=int, default=3, help="training: timed ones of a run")
    parser.add_argument("--warmup", type=int, default=2, help="training: steps before; guesses need 6 or more")
    parser.add_argument("--clip", type=float, default=1.0, help="training: global norm; guesses need one that holds")
    parser.add_argument("--rows", nargs="+", choices=list(cases("")), help="training: contenders; all when not said")
    parser.add_argument("--host-budget", default="1GiB", help="training: of the rows on NVMe")
    parser.add_argument("--deepspeed-python", help="training: the Python of an environment with DeepSpeed")
    parser.add_argument("--json", help="also write the report to this file")
    said = parser.parse_args()
    if said.what == "training":
        report_training(said)
        return
    if said.what == "saving":
        report_saving(said)
        return
    arguments = ["--mb", str(said.mb), "--rounds", str(said.rounds)]
    if said.what == "rounds":
        arguments += ["--units", str(said.units), "--compute-ms", str(said.compute_ms), "--transport", said.transport]
    report = json.loads(launch(f"benchmarks.ranks.{said.what}", said.ranks, arguments, limit_s=600))
    print(table(report))
    print(json.dumps({key: value for key, value in report.items() if key not in ("rows", "ratios")}, indent=2))
    if said.json:
        Path(said.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
