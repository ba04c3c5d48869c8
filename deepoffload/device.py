"""Where bytes can live: the tiers, and the logical device that computes.

Nothing here touches torch: the pure layers (``config``, ``schedule``) name tiers and devices without importing it.
"""

from __future__ import annotations

import enum
import re
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


@dataclass(frozen=True)
class Device:
    """The device a model computes on, by name only: ``kind`` is torch's name for its sort. Whether torch has such a
    device, :class:`deepoffload.copies.accelerator.Accelerator` finds out."""

    kind: str
    index: int | None = None

    @classmethod
    def parse(cls, name: str) -> Device:
        """Read torch's spelling of a device, such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

        Raises:
            ConfigError: this is no name of a device, or one that cannot be computed on piece by piece.
        """
        kind, _, index = name.partition(":")
        malformed = re.fullmatch("[a-z][a-z0-9_]*", kind) is None or (":" in name and not index.isdecimal())
        if malformed or kind in ("meta", "mps") or (kind == "cpu" and index not in ("", "0")):
            raise ConfigError(f'device "{name}" cannot be used; expected "cpu", "cuda", or such as "cuda:1"')
        return cls(kind, int(index) if index and kind != "cpu" else None)

    @property
    def shares_host_memory(self) -> bool:
        """Whether DEVICE and HOST are the same memory, so that the two budgets are one pool."""
        return self.kind == "cpu"

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"
