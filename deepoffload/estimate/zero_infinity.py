"""ZeRO-Infinity's analysis of memory and bandwidth (arXiv 2104.07857, sections 3 to 5), and what it published.

With ``T = batch * sequence`` tokens in a step of one device, hidden size ``hd``, and a checkpoint every ``ci`` layers,
the floating-point operations for each byte moved are

    parameters and gradients   T        2 * 4 * T operations per parameter, over 4 transfers of 2 bytes
    optimizer states           T / 4    the same over reading and writing 16 bytes
    activation checkpoints     24 * hd * ci

and, where nothing overlaps, ``efficiency = ait * bandwidth / (ait * bandwidth + peak)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from deepoffload.estimate.checks import positive

STATE_BYTES = 20
"""Of model states per parameter in ZeRO-Infinity: fp16 weight and gradient, fp32 weight, gradient and two moments."""


class Moved(Enum):
    """What moves between the device and a slower tier."""

    PARAMETERS = "parameters and gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activation checkpoints"


def arithmetic_intensity(moved: Moved, tokens: float, hidden: int = 1, interval: int = 1) -> float:
    """Floating-point operations per byte moved. ``interval``: layers from one activation checkpoint to the next."""
    positive("tokens", tokens)
    if moved is Moved.ACTIVATIONS:
        return 24.0 * positive("hidden", hidden) * positive("interval", interval)
    return tokens if moved is Moved.PARAMETERS else tokens / 4


def efficiency(intensity: float, bytes_per_s: float, peak_flops_per_s: float) -> float:
    """Share of the peak that is reached when moving and computing take turns."""
    moved = positive("intensity", intensity) * positive("bytes_per_s", bytes_per_s)
    return moved / (moved + positive("peak_flops_per_s", peak_flops_per_s))


def bandwidth_for(share: float, intensity: float, peak_flops_per_s: float) -> float:
    """Bytes per second for an efficiency of ``share`` (between 0 and 1, both excluded)."""
    positive("1 - share", 1 - share)
    return positive("share", share) / (1 - share) * peak_flops_per_s / positive("intensity", intensity)


@dataclass(frozen=True)
class Node:
    """One machine of the paper: bytes of each tier in all, and its devices."""

    devices: int
    device_bytes: float
    host_bytes: float
    nvme_bytes: float


DGX2 = Node(devices=16, device_bytes=32e9, host_bytes=1.5e12, nvme_bytes=28e12)
V100_FLOPS_PER_S = 70e12
"""What the paper takes as achievable on a V100."""
BATCH, SEQUENCE = 1, 1024
WORKING_SHARE = 0.8
"""Of each tier that model states may take: the rest is activations, buffers and fragmentation."""


@dataclass(frozen=True)
class Strategy:
    """Where a strategy keeps its model states.

    Bytes per parameter: ``replicated`` on every device, ``device`` over all devices of the node, ``host`` and ``nvme``
    of the node.
    """

    name: str
    replicated: float = 0.0
    device: float = 0.0
    host: float = 0.0
    nvme: float = 0.0

    def largest(self, node: Node) -> tuple[float, str]:
        """The most parameters, and the tier that ends it."""
        limits = {
            "device": WORKING_SHARE * node.device_bytes / (self.replicated + self.device / node.devices or math.nan),
            "host": WORKING_SHARE * node.host_bytes / (self.host or math.nan),
            "nvme": WORKING_SHARE * node.nvme_bytes / (self.nvme or math.nan),
        }
        tier = min((name for name in limits if limits[name] == limits[name]), key=lambda name: limits[name])
        return limits[tier], tier


STRATEGIES = (
    Strategy("data parallel", replicated=STATE_BYTES),
    Strategy("ZeRO-2", replicated=2, device=18),
    Strategy("ZeRO-Offload", replicated=2, host=18),
    Strategy("3D parallelism", device=STATE_BYTES),
    Strategy("ZeRO-3", device=STATE_BYTES),
    Strategy("ZeRO-Infinity, CPU", host=STATE_BYTES),
    Strategy("ZeRO-Infinity, NVMe", nvme=STATE_BYTES),
)


@dataclass(frozen=True)
class PublishedValue:
    """A published number, what the formulas give, and the condition. ``deviation``: of ours, in parts of theirs."""

    what: str
    published: float
    ours: float
    unit: str
    note: str = ""

    @property
    def deviation(self) -> float:
        return self.ours / self.published - 1


PUBLISHED_LARGEST = {
    "data parallel": 1.4e9,
    "ZeRO-2": 10e9,
    "ZeRO-Offload": 13e9,
    "3D parallelism": 20e9,
    "ZeRO-3": 20e9,
    "ZeRO-Infinity, CPU": 70e9,
    "ZeRO-Infinity, NVMe": 1000e9,
}
"""Largest models on one DGX-2 node: the authors' SC'21 slides; the value of ZeRO-2 is from memory."""


def compare_largest() -> list[PublishedValue]:
    """Largest model per strategy on one DGX-2, side by side with the published ones."""
    rows = []
    for strategy in STRATEGIES:
        ours, tier = strategy.largest(DGX2)
        rows.append(
            PublishedValue(strategy.name, PUBLISHED_LARGEST[strategy.name], ours, "parameters", f"ends at {tier}")
        )
    return rows


def compare_bandwidths() -> list[PublishedValue]:
    """The bandwidths that the paper names for an efficiency, side by side with the formulas."""
    tokens = BATCH * SEQUENCE

    def needed(share: float, intensity: float) -> float:
        return bandwidth_for(share, intensity, V100_FLOPS_PER_S)

    parameters = arithmetic_intensity(Moved.PARAMETERS, tokens)
    states = arithmetic_intensity(Moved.OPTIMIZER, 2 * tokens)
    small = arithmetic_intensity(Moved.ACTIVATIONS, tokens, hidden=2048)
    large = arithmetic_intensity(Moved.ACTIVATIONS, tokens, hidden=8192)
    return [
        PublishedValue("parameters and gradients, 50 %, batch 1", 70e9, needed(0.5, parameters), "bytes/s"),
        PublishedValue(
            "optimizer states, 90 %, batch 2", 1.5e12, needed(0.9, states), "bytes/s", "all devices together"
        ),
        PublishedValue(
            "activations, 50 %, hidden 2048", 2e9, needed(0.5, small), "bytes/s", "the paper: enough for more"
        ),
        PublishedValue(
            "activations, 50 %, hidden 8192", 1e9, needed(0.5, large), "bytes/s", "the paper: less than this"
        ),
    ]


def curve(moved: Moved, bandwidths: list[float], **shape: int) -> list[float]:
    """Efficiency at each bandwidth (bytes per second); ``shape``: arguments of :func:`arithmetic_intensity`."""
    intensity = arithmetic_intensity(moved, **shape)
    return [efficiency(intensity, bandwidth, V100_FLOPS_PER_S) for bandwidth in bandwidths]
