"""CPU seconds of an estimate for the configurations of public models (public.json), without imports.

    python -m benchmarks.estimate.public --machine machine.json

Prints a line for each model, and exits with 1 where one takes more than ``--most`` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = Path(__file__).with_name("public.json")


def cpu_seconds(name: str, machine: str) -> tuple[float, int]:
    """Of one estimate, in this process, and its exit status."""
    import transformers

    from deepoffload.estimate.__main__ import main

    settings = json.loads(MODELS.read_text())[name]
    getattr(transformers, settings["architectures"][0])  # the imports that are not counted
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(settings))
        begun = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = main(["--config", str(file), "--machine", machine, "--json"])
        return time.process_time() - begun, status


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", required=True, help="a machine file")
    parser.add_argument("--most", type=float, default=5.0, help="CPU seconds of one estimate")
    parser.add_argument("--model", help="only this one, in this process")
    options = parser.parse_args()
    if options.model:
        print(*cpu_seconds(options.model, options.machine))
        return 0
    slow = 0
    for name in json.loads(MODELS.read_text()):
        command = [sys.executable, "-m", "benchmarks.estimate.public", "--machine", options.machine, "--model", name]
        seconds, status = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        too_slow = float(seconds) > options.most
        slow += too_slow
        print(f"{name:20} {float(seconds):6.1f} s, status {status}{'  TOO SLOW' if too_slow else ''}", flush=True)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(run())
