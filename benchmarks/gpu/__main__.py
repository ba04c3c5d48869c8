"""Training with a GPU: step time, tokens per second and utilisation next to plain PyTorch and peers, transfers, and
what fits.

python -m benchmarks.gpu --path /mnt/nvme            # after the build; benchmarks/gpu/run.sh does everything
python -m benchmarks.gpu --simulate                  # checks the script on the tests' simulated GPU

Every case runs in a process of its own. Peers that are not installed are left out, and so are models for which memory
or disk is too small, with the reason. The figures go to benchmarks/results/gpu_<device>.json with the machine's
description, each when it is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import ROWS, Case
from benchmarks.gpu.goals import in_words, judge
from deepoffload import machine
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.config.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]

NEEDS = {"torchao": "torchao", "deepspeed": "deepspeed"}
"""Packages of the peers."""

DENSE_BF16_FLOPS_PER_S = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
    "3090": 71e12,
    "V100": 125e12,
}
"""Of the makers' data sheets, without sparsity (V100: fp16)."""

CASE_SECONDS_MAX = 150.0
LEAST_SECONDS = 20.0
"""With less time left no row is begun."""


def main() -> int:
    said = arguments()
    started = time.monotonic()
    device = describe_device(said.simulate)
    out = said.folder / f"gpu_{device['name'].lower().replace(' ', '_')}.json"
    report: dict[str, Any] = {
        "question": "training with a GPU",
        "machine": describe_machine([said.path]),
        "device": device,
        "transfers": run("transfers", [str((1 << 20) if said.simulate else (1 << 30))], said.simulate, 60.0),
        "cases": [],
        "goals": [],
    }
    show_transfers(report["transfers"])
    write(report, out)
    for case in (case.tiny() if said.simulate else case for case in ROWS):
        left_s = said.seconds - (time.monotonic() - started)
        row = {"case": case.as_json(), **measure(case, said, left_s, device["memory_bytes"])}
        report["cases"].append(row)
        report["goals"] = judge(report)
        show(case, row, device)
        write(report, out)  # what comes next may be the end of the machine's time
    if said.simulate:
        print("goals, as they are judged; figures of a simulated device say nothing of a real one:")
    for goal in report["goals"]:
        print(in_words(goal))
    print(f"written to {out}")
    failed = "error" in report["transfers"] or any("error" in row and not may_fail(row) for row in report["cases"])
    return int(failed)


def write(report: dict[str, Any], out: Path) -> None:
    """Whole or not at all: a run may be ended at any moment."""
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="directory on the NVMe disk")
    parser.add_argument("--seconds", type=float, default=480.0, help="stop starting cases after so long")
    parser.add_argument(
        "--host-bytes", type=parse_bytes, help="memory that rows may take, where it grows as it is used"
    )
    parser.add_argument("--simulate", action="store_true", help="tiny cases on the tests' simulated GPU")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results", help="where the results go")
    return parser.parse_args()


def measure(case: Case, said: argparse.Namespace, left_s: float, device_bytes: int) -> dict[str, Any]:
    """The figures of a case, or ``left_out`` with the reason, or ``error``."""
    package = NEEDS.get(case.side)
    if package is not None and importlib.util.find_spec(package) is None:
        return {"left_out": f"{package} is not installed"}
    if left_s < LEAST_SECONDS:
        return {"left_out": f"the time of {said.seconds:.0f} s is over"}
    found = machine.measure([said.path])
    host_bytes = said.host_bytes or found.memory_available_bytes
    lacking = case.lacks(host_bytes, found.disks[0].free_bytes, device_bytes)
    if lacking is not None:
        return {"left_out": lacking}
    return run("child", [json.dumps(case.as_json()), said.path], said.simulate, min(left_s, CASE_SECONDS_MAX))


def may_fail(row: dict[str, Any]) -> bool:
    """Peers may; what is ours may not."""
    return row["case"]["side"] not in ("ours", "plain")


def run(script: str, words: list[str], simulate: bool, limit_s: float) -> dict[str, Any]:
    """What a module of this package prints last."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{script}", *words, *(["--simulate"] if simulate else [])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, start_new_session=True) as child:
        try:
            out, errors = child.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # also what it has started, such as compilers
            if isinstance(error, subprocess.TimeoutExpired):
                return {"error": f"not done in {limit_s:.0f} s"}
            raise
    if child.returncode != 0:
        lines = [line for line in errors.strip().splitlines() if line.strip()]
        return {"error": "\n".join(lines[-8:]) or f"ended with status {child.returncode}"}
    return dict(json.loads(out.strip().splitlines()[-1]))


def describe_device(simulate: bool) -> dict[str, Any]:
    if simulate:
        return {"name": "simulated", "memory_bytes": 4 << 30, "peak_flops_per_s": None}
    import torch

    properties = torch.cuda.get_device_properties(0)
    peak = next((flops for key, flops in DENSE_BF16_FLOPS_PER_S.items() if key in properties.name), None)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "peak_flops_per_s": peak,
    }


def show_transfers(found: dict[str, Any]) -> None:
    if "error" in found:
        print(f"transfers: {found['error']}")
        return
    print(f"{found['locked_bytes']} of {found['bytes']} bytes of our memory are page-locked")
    for direction in ("in", "out", "both"):
        ours, plain = (found[f"{side}_{direction}_bytes_per_s"] / 1e9 for side in ("ours", "pinned"))
        print(f"copies {direction:4}: {ours:6.1f} GB/s, plain pinned {plain:6.1f} GB/s, {ours / plain:.2f}")


def show(case: Case, row: dict[str, Any], device: dict[str, Any]) -> None:
    if "left_out" in row:
        print(f"{case.name:44} left out: {row['left_out']}", flush=True)
    elif "error" in row:
        print(f"{case.name:44} failed: {row['error'].splitlines()[-1]}", flush=True)
    else:
        peak = device["peak_flops_per_s"]
        share = f"{row['flops_per_step'] / row['step_s'] / peak:5.1%} of peak" if peak else ""
        print(
            f"{case.name:44} {row['step_s']:7.3f} s  {row['tokens_per_s']:9.0f} tokens/s  {share}  "
            f"device {row['device_peak_bytes'] / 2**30:5.1f} GiB  host {row['host_peak_bytes'] / 2**30:5.1f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
