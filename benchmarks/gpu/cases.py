"""What is measured: each case runs in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common.gpt import num_parameters
from deepoffload.config.resolve import DISK_SHARE, HOST_SHARE
from deepoffload.config.units import parse_bytes
from examples.gpt.model import Shape

GIB = 1 << 30

HOST_BYTES_PER_PARAMETER = {"plain": 4, "ours": 14, "fsdp2": 18, "torchao": 10, "deepspeed": 20}
"""At most: plain PyTorch builds its model there; ours keeps bf16 weights and gradients, remainders and two moments."""

DEVICE_BYTES_PER_PARAMETER = {"plain": 20, "ours": 0, "fsdp2": 0, "torchao": 4, "deepspeed": 4}
"""At least, before activations. Plain PyTorch has all of it there; torchao and ZeRO with an offloaded optimizer keep
bf16 weights and gradients. FSDP2 and ours bring what they need; ours says itself what a budget cannot hold."""

TINY_BUDGETS = {"98GiB": "64MiB", "24GiB": "8MiB", "8GiB": "8MiB"}


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

    @property
    def parameters(self) -> int:
        return num_parameters(Shape(self.hidden, self.layers), self.seq)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def tiny(self) -> Case:
        """The same row for a simulated device of a few GiB: what it measures there says nothing."""
        settings = {key: TINY_BUDGETS.get(value, value) for key, value in self.settings.items()}
        if self.device_bytes is None:
            return replace(self, hidden=128, layers=2, batch=2, seq=32, settings=settings, steps=3)
        mib = self.device_bytes // GIB * 8  # enough that activations count, as they do at full size
        settings |= {"device_budget": f"{mib // 3}MiB", "host_budget": "256MiB"}
        return replace(self, hidden=256, layers=6, batch=2, seq=128, settings=settings, device_bytes=mib << 20, steps=3)

    def lacks(self, host_bytes: int, disk_bytes: int, device_bytes: int) -> str | None:
        """Why the row cannot be made with so much free memory, disk and memory of the device; None where it can."""
        on_device_bytes = DEVICE_BYTES_PER_PARAMETER[self.side] * self.parameters
        if on_device_bytes > device_bytes:
            return (
                f"{on_device_bytes / 1e9:.0f} GB of device memory are needed before activations, "
                f"{device_bytes / 1e9:.0f} GB are there"
            )
        if self.device_bytes is not None and self.device_bytes > device_bytes:
            return f"the device has {device_bytes / 1e9:.0f} GB of memory"
        needed_bytes = HOST_BYTES_PER_PARAMETER[self.side] * self.parameters
        said = self.settings.get("host_budget")
        if not self.settings.get("disk"):
            if needed_bytes > host_bytes:
                return f"{needed_bytes / 1e9:.0f} GB of host memory are needed, {host_bytes / 1e9:.0f} GB are free"
            return None
        memory_bytes = host_bytes * HOST_SHARE if said is None else parse_bytes(said)
        on_disk_bytes = max(0, needed_bytes - int(memory_bytes))
        if on_disk_bytes > DISK_SHARE * disk_bytes:
            return f"{on_disk_bytes / 1e9:.0f} GB of disk are needed, {disk_bytes / 1e9:.0f} GB are free"
        return None


def _gpt(name: str) -> tuple[int, int]:
    return {"319m": (1024, 24), "1.24b": (2048, 24), "3.2b": (3072, 28), "7b": (4096, 35), "13b": (5120, 41)}[name]


def _case(name: str, side: str, size: str, *, batch: int = 16, seq: int = 1024, **rest: Any) -> Case:
    settings = rest.pop("settings", {})
    return Case(f"{size} {name}", side, *_gpt(size), batch, seq, settings, **rest)


HOST = {"disk": False}
DISK = {"disk": True}
EVERYTHING = {"disk": False, "offload_optimizer": "device"}
FEW = "16 tokens"
"""Rows that are nearly all launches: what they take longer than plain's is Python and calls of the driver."""

SPECULATIVE = {**HOST, "step_overlap": "speculative"}


def _peers(size: str, **rest: Any) -> tuple[Case, ...]:
    return (
        _case("torchao CPUOffloadOptimizer", "torchao", size, **rest),
        _case("FSDP2 CPU offload", "fsdp2", size, **rest),
        _case("DeepSpeed ZeRO-3, optimizer on CPU", "deepspeed", size, **rest),
    )


def _limited(gib: int, size: str) -> Case:
    """``gib`` of device memory for the whole process."""
    settings = {**DISK, "device_budget": f"{gib // 3}GiB"}
    name = f"ours, {gib} GB of device memory"
    return _case(name, "ours", size, batch=1, settings=settings, device_bytes=gib * GIB, steps=2)


ROWS = (
    _case("plain PyTorch", "plain", "1.24b"),
    _case("ours, state in host memory", "ours", "1.24b", settings=HOST),
    _case("ours, speculative updates", "ours", "1.24b", settings=SPECULATIVE),
    _case("plain PyTorch", "plain", "319m"),
    _case("ours, everything on the device", "ours", "319m", settings=EVERYTHING),
    _case(f"plain PyTorch, {FEW}", "plain", "319m", batch=1, seq=16, steps=20),
    _case(f"ours, everything on the device, {FEW}", "ours", "319m", batch=1, seq=16, settings=EVERYTHING, steps=20),
    _case("ours, state in host memory", "ours", "319m", settings=HOST),
    _case("ours, state in host memory", "ours", "7b", batch=8, settings={**HOST, "host_budget": "98GiB"}, steps=3),
    _case("ours, optimizer on NVMe", "ours", "3.2b", batch=8, settings={**DISK, "host_budget": "24GiB"}, steps=3),
    _case("plain PyTorch", "plain", "3.2b", batch=8, steps=3),
    _limited(24, "7b"),
    _limited(16, "7b"),
    _limited(8, "7b"),
    *_peers("1.24b"),
    *_peers("7b", batch=8, steps=3),
    _case("ours, host memory", "ours", "3.2b", batch=8, settings=HOST, steps=4),
    _case("ours, without overlap", "ours", "1.24b", settings={**HOST, "step_overlap": "none", "prefetch": False}),
    _case("ours, NVMe", "ours", "1.24b", settings={**DISK, "host_budget": "8GiB"}, steps=4),
    _limited(24, "13b"),
)
"""The most important first: plain and ours, the models that do not fit, then the peers."""
