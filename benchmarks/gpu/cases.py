"""What is measured: each case runs in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        side: who trains: ``plain``, ``ours``, ``fsdp2``, ``torchao`` or ``deepspeed``.
        hidden, layers: the GPT's shape; its vocabulary is 8192.
        batch, seq: tokens of one step.
        settings: of ``offload_context``, for our side; ``disk`` gives it the NVMe path.
        device_bytes: of device memory that the whole process may take; None: all of it.
    """

    name: str
    side: str
    hidden: int
    layers: int
    batch: int
    seq: int
    settings: dict[str, Any]
    device_bytes: int | None = None
    steps: int = 6

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _gpt(name: str) -> tuple[int, int]:
    return {"319m": (1024, 24), "1.24b": (2048, 24), "3.2b": (3072, 28), "7b": (4096, 35), "13b": (5120, 41)}[name]


def _case(name: str, side: str, size: str, *, batch: int = 16, seq: int = 1024, **rest: Any) -> Case:
    settings = rest.pop("settings", {})
    return Case(f"{size} {name}", side, *_gpt(size), batch, seq, settings, **rest)


HOST = {"disk": False}
DISK = {"disk": True}

STEPS = (
    _case("plain PyTorch", "plain", "1.24b"),
    _case("ours, state in host memory", "ours", "1.24b", settings=HOST),
    _case("ours, without overlap", "ours", "1.24b", settings={**HOST, "step_overlap": "none", "prefetch": False}),
    _case("FSDP2 CPU offload", "fsdp2", "1.24b"),
    _case("torchao CPUOffloadOptimizer", "torchao", "1.24b"),
    _case("DeepSpeed ZeRO-3, optimizer on CPU", "deepspeed", "1.24b"),
    _case("plain PyTorch", "plain", "319m"),
    _case("ours, state in host memory", "ours", "319m", settings=HOST),
)
"""1.24 B and 319 M parameters, 16 k tokens per step."""

LARGE = (
    _case("ours, host memory", "ours", "3.2b", batch=8, settings=HOST, steps=4),
    _case("ours, host memory", "ours", "7b", batch=8, settings={**HOST, "host_budget": "104GiB"}, steps=3),
    _case("ours, NVMe", "ours", "3.2b", batch=8, settings={**DISK, "host_budget": "16GiB"}, steps=3),
    _case("ours, NVMe", "ours", "1.24b", settings={**DISK, "host_budget": "8GiB"}, steps=4),
)
"""Models of 1 to 7 B parameters with host and NVMe tiers."""

LIMITED = tuple(
    _case(
        f"ours, {gib} GB of device memory",
        "ours",
        size,
        batch=1,
        settings={**DISK, "device_budget": f"{gib // 3}GiB"},
        device_bytes=gib * GIB,
        steps=2,
    )
    for gib, sizes in ((8, ("13b", "7b", "3.2b")), (16, ("13b", "7b")), (24, ("13b",)))
    for size in sizes
)
"""The largest model that trains in so much device memory: the first of each that does. (Host memory may end first.)"""

SMOKE = (
    Case("tiny plain PyTorch", "plain", 128, 2, 2, 32, {}, steps=3),
    Case("tiny ours, state in host memory", "ours", 128, 2, 2, 32, HOST, steps=3),
    Case("tiny ours, NVMe", "ours", 128, 2, 2, 32, {**DISK, "host_budget": "8MiB"}, steps=3),
    Case("tiny FSDP2 CPU offload", "fsdp2", 128, 2, 2, 32, {}, steps=3),
)
"""Checks the script."""
