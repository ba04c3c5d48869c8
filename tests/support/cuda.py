"""Where the tests see CUDA devices: only in the processes that are made for tests on them.

All other tests are of the CPU as the device, also on a machine with a GPU, where models would go to it unasked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
KEPT = "CUDA_VISIBLE_DEVICES_OF_TESTS"
"""What the variable was before; unset where it was."""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it a product may have other bits each time, on several streams (cuBLAS, "Results Reproducibility")."""


def hide() -> None:
    """No CUDA device from here on, in this process and in those that it starts. Before CUDA is initialised."""
    if VISIBLE in os.environ and os.environ.get(VISIBLE) != "":
        os.environ[KEPT] = os.environ[VISIBLE]
    os.environ[VISIBLE] = ""


def visible(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that sees the devices."""
    shown = {key: value for key, value in environment.items() if key not in (VISIBLE, KEPT)}
    return shown | DETERMINISTIC | ({VISIBLE: environment[KEPT]} if KEPT in environment else {})


def missing() -> str | None:
    """Why there is no CUDA device to test on, where that is plain to see without initialising CUDA."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return "there is no CUDA device on this machine"
    return None
