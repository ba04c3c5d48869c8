"""Ranks on this host, described to each as torchrun does it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_ranks(command: Sequence[str], count: int, threads: int) -> list[subprocess.Popen[str]]:
    """Start ``command`` once for each rank, with pipes for what it prints. The caller ends the processes."""
    port = free_port()
    processes = []
    for rank in range(count):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
        }
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    return processes
