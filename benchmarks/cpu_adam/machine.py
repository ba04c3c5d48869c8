"""What the kernels are measured on, and where the results go."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import torch

from deepoffload.native import cpu_adam

RESULTS = Path(__file__).resolve().parents[1] / "results"


def parse_size(text: str) -> int:
    factor = {"k": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
    return int(float(text.rstrip("kM")) * factor)


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))}
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    return {
        "cpu": sorted(names),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_before": os.getloadavg(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed") if has_deepspeed else None,
        "capability": cpu_adam.capability(),
        "threads_from": cpu_adam.threading_backend(),
    }
