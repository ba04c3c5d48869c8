"""What importing deepoffload costs on top of importing torch: `python -m benchmarks.start_up`.

Each round starts three interpreters, one after the other, so that a drift of the machine meets all of them. The line
"everything" also loads what each public name needs, which a program pays when it first uses that name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

PROGRAMS = {
    "torch": "import torch",
    "deepoffload": "import torch, deepoffload",
    "everything": "import torch, deepoffload; [getattr(deepoffload, name) for name in deepoffload.__all__]",
}
TIMED = "import time; start = time.perf_counter(); {program}; print(time.perf_counter() - start)"


def seconds(program: str) -> float:
    command = [sys.executable, "-c", TIMED.format(program=program)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a file for the JSON, which is printed, too")
    options = parser.parse_args()
    rounds = options.rounds
    for program in PROGRAMS.values():  # files into the page cache, bytecode onto the disk
        seconds(program)
    times = [{name: seconds(program) for name, program in PROGRAMS.items()} for _ in range(rounds)]
    report = {
        "torch_s": statistics.median(row["torch"] for row in times),
        "deepoffload_adds_s": statistics.median(row["deepoffload"] - row["torch"] for row in times),
        "everything_adds_s": statistics.median(row["everything"] - row["torch"] for row in times),
        "rounds": rounds,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": version("torch")},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
