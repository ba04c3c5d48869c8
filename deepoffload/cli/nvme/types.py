"""The words of ``ds_nvme_bench``: a setting, what is done with it, and what came of it."""

from __future__ import annotations

import enum
import statistics
from dataclasses import dataclass

from deepoffload.config.units import format_bytes
from deepoffload.errors import DeepOffloadError


class Pattern(enum.Enum):
    """What is done to the files."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    """Reads and writes of equal size in turns."""


class DataMismatch(DeepOffloadError, RuntimeError):
    """What was read is not what was written. The message says which file, offset and how much of it."""


@dataclass(frozen=True, order=True)
class Setting:
    """One point of the sweep."""

    backend: str
    block_bytes: int
    queue_depth: int
    """Blocks in flight per device."""
    direct: bool
    files: int
    """Files used at once, per path."""

    @property
    def flight_bytes(self) -> int:
        """Bytes that the device is given to work on at a time."""
        return self.block_bytes * self.queue_depth

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        files = "" if self.files == 1 else f", {self.files} files"
        return f"{self.backend}, {format_bytes(self.block_bytes)} x {self.queue_depth}, {how}{files}"


@dataclass(frozen=True)
class Sample:
    """One measurement: bytes moved in ``seconds``, and the CPU time of this process for it."""

    bytes_read: int
    bytes_written: int
    seconds: float
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        """Both directions together."""
        return (self.bytes_read + self.bytes_written) / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds per 10**9 bytes."""
        return self.cpu_s / ((self.bytes_read + self.bytes_written) / 1e9)


@dataclass(frozen=True)
class Result:
    """All samples of a setting and pattern. ``samples`` is not empty."""

    setting: Setting
    pattern: Pattern
    samples: tuple[Sample, ...]

    @property
    def bytes_per_s(self) -> float:
        """The median."""
        return statistics.median(sample.bytes_per_s for sample in self.samples)

    @property
    def spread(self) -> float:
        """How far the samples lie apart, as a share of the median: (largest - smallest) / median."""
        rates = [sample.bytes_per_s for sample in self.samples]
        return (max(rates) - min(rates)) / self.bytes_per_s

    @property
    def cpu_s_per_gb(self) -> float:
        """The median."""
        return statistics.median(sample.cpu_s_per_gb for sample in self.samples)
