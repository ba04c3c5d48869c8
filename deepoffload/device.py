"""Where bytes can live: the tiers, and the logical device that computes.

Nothing here touches torch: the pure layers (``config``, ``schedule``) name tiers and devices without importing it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deepoffload.errors import ConfigError


class Tier(enum.Enum):
    """A place for bytes, nearest first; ``tier.distance`` orders them."""

    DEVICE = "device"
    """Memory of the computing device (on a CPU device: ordinary memory, one pool with HOST)."""
    HOST = "host"
    """The host arena."""
    NVME = "nvme"
    """Extents of the swap files."""

    @property
    def distance(self) -> int:
        """0 for DEVICE, 1 for HOST, 2 for NVME."""
        return list(Tier).index(self)


class DeviceKind(enum.Enum):
    """What computes. Algorithms never ask for it; only the objects that stand for streams and events differ."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Device:
    """The device a model computes on, by name only."""

    kind: DeviceKind
    index: int | None = None

    @classmethod
    def parse(cls, name: str) -> Device:
        """Read torch's spelling of a device, such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

        Raises:
            ConfigError: the name is of no device that deepoffload can drive.
        """
        kind_name, _, index = name.partition(":")
        known = {kind.value: kind for kind in DeviceKind}
        if kind_name not in known or (":" in name and not index.isdecimal()):
            raise ConfigError(f'device "{name}" is not known; expected one of {", ".join(known)}, or such as "cuda:1"')
        return cls(known[kind_name], int(index) if index else None)

    @property
    def shares_host_memory(self) -> bool:
        """Whether DEVICE and HOST are the same memory, so that the two budgets are one pool."""
        return self.kind is DeviceKind.CPU

    def __str__(self) -> str:
        return self.kind.value if self.index is None else f"{self.kind.value}:{self.index}"
