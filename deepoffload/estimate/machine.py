"""The machine that is estimated for: a small JSON file, or this machine, measured."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from deepoffload.config.resolve import unsaid_device_bytes
from deepoffload.config.units import format_bytes, parse_bytes
from deepoffload.errors import ConfigError
from deepoffload.estimate.checks import at_least, positive, positive_integer
from deepoffload.schedule.cost_model import Bandwidths, LinkRates

PROCESS_BYTES = 220 << 20
"""Python, torch without CUDA and deepoffload, as measured; a process with CUDA takes some 500 MiB more."""

RANKS_MAX = 1 << 16
"""Of a machine that estimates are about: they look at each rank."""
DEVICE_RATES = ("flops_per_s", "device_bytes_per_s", "link_bytes_per_s")
"""What a file has to say of a device."""


@dataclass(frozen=True)
class MachineSpec:
    """One node, and how many there are. Rates per second, for one device where it says device. Where the CPU computes
    in several ranks, each of them is a device: ``devices_per_node`` says how many share a node's cores.

    Attributes:
        ranks_per_device: processes that compute on one device, and share its memory, its rates and its bus.
        flops_per_s: what matrix products of the model's size reach, in the precision computed in.
        device_memory_bytes: of one device; 0: the CPU computes, in host memory.
        device_bytes_per_s: memory bandwidth of what computes.
        link_bytes_per_s: between host and one device, each direction (PCIe).
        host_bytes_per_s: memory bandwidth of an optimizer's update: reads and writes together.
        rank_gather_bytes_per_s, rank_reduce_bytes_per_s: what one rank gets from the others: shards for whole copies,
            and gradients until they have been added up.
        nvme_bytes: free space on the node; 0: no NVMe.
        nvme_mixed_bytes_per_s: reads and writes together, when both are under way.
        nvme_share_while_computing: what is left of these rates while the processor computes; 1 where it has cores to
            spare.
        nvme_endurance_bytes: what may be written in the drives' life (TBW); 0: not known.
        process_bytes: what a process takes before there is a model.
        op_overhead_s: of one operator's call.
        visit_overhead_s, landing_overhead_s, piece_overhead_s, plan_overhead_s: of deepoffload itself: per use of a
            unit, per parameter's gradient, per piece of optimizer state, and per event where something moves.
        round_overhead_s: until ranks have agreed on a transfer, and what a program takes to ask for one.
    """

    name: str = "described machine"
    nodes: int = 1
    devices_per_node: int = 1
    ranks_per_device: int = 1
    flops_per_s: float = 5e11
    device_memory_bytes: int = 0
    device_bytes_per_s: float = 2e10
    link_bytes_per_s: float = 1.2e10
    host_memory_bytes: int = 16 << 30
    host_bytes_per_s: float = 2e10
    rank_gather_bytes_per_s: float = 4e9
    rank_reduce_bytes_per_s: float = 3e9
    nvme_bytes: int = 0
    nvme_read_bytes_per_s: float = 2e9
    nvme_write_bytes_per_s: float = 2e9
    nvme_mixed_bytes_per_s: float = 2e9
    nvme_share_while_computing: float = 1.0
    nvme_endurance_bytes: int = 0
    process_bytes: int = PROCESS_BYTES
    op_overhead_s: float = 1e-5
    visit_overhead_s: float = 3e-4
    landing_overhead_s: float = 1e-4
    piece_overhead_s: float = 2e-4
    plan_overhead_s: float = 2e-4
    round_overhead_s: float = 3e-4

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node", "ranks_per_device", "host_memory_bytes"):
            positive_integer(name, getattr(self, name))
        if self.ranks > RANKS_MAX:
            raise ConfigError(f"nodes x devices_per_node x ranks_per_device = {self.ranks}: at most {RANKS_MAX} ranks")
        if self.ranks_per_device > 1 and not self.device_memory_bytes:
            raise ConfigError("ranks_per_device is about devices with their own memory: say device_memory_bytes, too")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_per_s"):
                positive(field.name, value)
            elif field.name.endswith(("_bytes", "_overhead_s")):
                at_least(field.name, value, 0)
        if positive("nvme_share_while_computing", self.nvme_share_while_computing) > 1:
            raise ConfigError(f"nvme_share_while_computing must be at most 1, not {self.nvme_share_while_computing}")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        return self.devices_per_node * self.ranks_per_device

    @property
    def has_device(self) -> bool:
        return self.device_memory_bytes > 0

    @property
    def device_share_bytes(self) -> int:
        """Of a device's memory, the part of one of the ranks that compute there."""
        return self.device_memory_bytes // self.ranks_per_device

    def device_budget_bytes(self, said: int | None) -> int:
        """What ``offload_context`` takes of a device at most, in one rank. ``said``: ``device_budget``, a device's.

        Raises:
            ConfigError: it is more than the device has, or nothing.
        """
        if not self.has_device:
            return 0
        if said is not None and said < self.ranks_per_device:
            raise ConfigError(
                f"a device budget of {said} bytes, but a call needs its weights on the device: raise it, or leave it "
                "out for half of the device's memory"
            )
        if said is not None and said > self.device_memory_bytes:
            has = format_bytes(self.device_memory_bytes)
            raise ConfigError(f"a device budget of {format_bytes(said)}, but a device has {has}; lower it")
        return unsaid_device_bytes(self.device_share_bytes) if said is None else said // self.ranks_per_device

    @property
    def bus_bytes_per_s(self) -> float:
        """Between host and device, each direction, of one rank. Its bytes pass through the host's memory, which all
        ranks share."""
        return min(self.link_bytes_per_s / self.ranks_per_device, self.host_bytes_per_s / self.ranks_per_node)

    def bandwidths(self) -> Bandwidths:
        """What one rank has of them: the ranks of a node share its disks and its memory."""
        share = self.ranks_per_node
        return Bandwidths(
            self.nvme_read_bytes_per_s / share,
            self.nvme_write_bytes_per_s / share,
            self.nvme_mixed_bytes_per_s / share,
            self.host_bytes_per_s / share,
        )

    def link_rates(self) -> LinkRates:
        """Between ranks."""
        return LinkRates(self.rank_gather_bytes_per_s, self.rank_reduce_bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_machine(path: str | os.PathLike[str]) -> MachineSpec:
    """A machine from a JSON file whose keys are the attributes of :class:`MachineSpec`; bytes may be text ("1.5TB").

    Raises:
        ConfigError: the file cannot be read, has an unknown key, a number that makes no sense, or a device without its
            rates.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the JSON file that describes the machine") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold one JSON object")
    return machine_from(found, str(path))


def machine_from(found: dict[str, Any], where: str) -> MachineSpec:
    """The same from a mapping. ``where``: named in errors."""
    known = {field.name: field for field in fields(MachineSpec)}
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in known:
            raise ConfigError(f"{where}: {key} is not known; the keys are {', '.join(known)}")
        values[key] = _number(f"{where}: {key}", key, value)
        if key != "name" and (isinstance(values[key], bool) or not isinstance(values[key], (int, float))):
            raise ConfigError(f"{where}: {key} must be a number, not {value!r}")
    missing = [key for key in DEVICE_RATES if values.get("device_memory_bytes") and key not in values]
    if missing:
        raise ConfigError(
            f"{where}: describes a device (device_memory_bytes) without {', '.join(missing)}, and what is not said is "
            "a CPU's. Say how fast the device is"
        )
    try:
        return MachineSpec(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _number(what: str, key: str, value: Any) -> Any:
    if not (key.endswith("_bytes") and isinstance(value, str)):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from None
