"""From what was asked and what the machine has to the numbers that are kept.

A pure function: the machine is measured by :func:`deepoffload.machine.measure` and handed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepoffload.config.schema import Config
from deepoffload.config.units import format_bytes
from deepoffload.device import Device, Tier
from deepoffload.errors import BudgetError, ConfigError
from deepoffload.machine import Machine

HOST_SHARE = 0.7
"""Of the available memory, when no host budget is given: activations and everything else need the rest. (How much they
need depends on what the program will do with the model, which nobody knows while it is built.)"""
DEVICE_SHARE = 0.5
"""Of the free device memory, when no device budget is given: the rest is for activations. No more is taken than the
weights need."""
DISK_SHARE = 0.9
"""Of the free disk space, when no NVMe budget is given."""

_PAGE_BYTES = 4096

ACTIVATION_SHARES = {Tier.HOST: 0.25, Tier.NVME: 0.125}
"""Of the host budget, where no activation budget is given: on NVMe a part of them is under way, or comes next."""


def activation_part(config: Config, host_bytes: int, *, on_cpu: bool, host_ranks: int = 1) -> tuple[int, str]:
    """What activations get of one rank's host budget, and why.

    On a CPU device they are in host memory when they are made: with ``host`` a copy of them saves nothing, and is made
    only where ``activation_budget`` says that it is to bound them.

    Args:
        on_cpu: what computes is the CPU.

    Raises:
        BudgetError: there would be nothing left for the model.
    """
    tier, said = config.offload_activations, config.activation_budget
    if tier is None or tier is Tier.DEVICE:
        return 0, ""
    if on_cpu and tier is Tier.HOST and said is None:
        return 0, (
            'stay where they are made: a CPU device computes in host memory, so offload_activations = "host" saves '
            'nothing there ("nvme" does, and activation_budget would bound them)'
        )
    part_bytes = int(host_bytes * ACTIVATION_SHARES[tier]) if said is None else said // host_ranks
    if part_bytes >= host_bytes:
        raise BudgetError(
            f"activation_budget is {format_bytes(part_bytes)}, and all of the host budget, of which it is a part, "
            f"{format_bytes(host_bytes)}: lower activation_budget or raise host_budget"
        )
    if said is not None and part_bytes < _PAGE_BYTES:
        raise BudgetError(
            f"activation_budget gives {part_bytes} bytes, less than a page of memory ({_PAGE_BYTES} bytes): raise it "
            "(was a unit forgotten, as in '64MiB'?)"
        )
    beyond = "and beyond that on NVMe" if tier is Tier.NVME else "and no more"
    what = "inputs of checkpointed blocks"
    if config.offload_activations_above is not None:
        what += f" and saved tensors from {format_bytes(config.offload_activations_above)} on"
    copied = ", where they were before, too" if on_cpu and tier is Tier.HOST else ""
    return part_bytes, f"{what} in at most {format_bytes(part_bytes)} of host memory{copied}, {beyond}"


def unsaid_host_bytes(available_bytes: int) -> int:
    """The host budget where the configuration says none; the estimators take the same."""
    return int(available_bytes * HOST_SHARE)


def unsaid_nvme_bytes(free_bytes: int) -> int:
    """The NVMe budget where the configuration says none; the estimators take the same."""
    return int(free_bytes * DISK_SHARE)


def least_free_bytes(nvme_bytes: int) -> int:
    """Free disk space of which :func:`unsaid_nvme_bytes` is at least ``nvme_bytes``."""
    return math.ceil(nvme_bytes / DISK_SHARE) + 1


def may_use_nvme(config: Config) -> bool:
    """Whether the configuration lets anything go to NVMe."""
    return config.nvme_budget != 0 and Tier.NVME in (
        config.offload_param or Tier.NVME,
        config.offload_optimizer or Tier.NVME,
        config.offload_activations,
    )


@dataclass(frozen=True)
class Budgets:
    """Bytes that one rank may use on each tier, and why these.

    On a CPU device ``device_bytes`` is 0: DEVICE and HOST are one pool of ``host_bytes``, without ``debug.copies``.
    ``host_bytes`` and ``nvme_bytes`` are the rank's equal share of what its host has.
    """

    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    reasons: tuple[str, ...]
    """One line per tier."""
    host_ranks: int = 1
    """Ranks of the host, which share its budgets."""
    device_ranks: int = 1
    """Ranks that compute on one device, and share its budget."""
    activation_bytes: int = 0
    """Of ``host_bytes``, the part for activations."""
    activation_share: float = 0.0
    """The share of ``host_bytes`` that this is; 0 where the configuration says bytes."""
    activations: str = ""
    """Where these are, and why."""

    @property
    def block_bytes(self) -> int:
        """Of ``host_bytes``, for weights, gradients and optimizer state."""
        return self.host_bytes - self.activation_bytes

    def host_bytes_for(self, block_bytes: int) -> int:
        """The host budget that leaves so much for these."""
        if self.activation_share:
            return math.ceil(block_bytes / (1 - self.activation_share)) + 1
        return block_bytes + self.activation_bytes


def resolve_budgets(
    config: Config, machine: Machine, device: Device, device_free_bytes: int = 0, host_ranks: int = 1
) -> Budgets:
    """The budgets in bytes, of one rank.

    Args:
        machine: measured with the paths of ``config.nvme_path``.
        device_free_bytes: free memory of a device that has its own.
        host_ranks: how many ranks share the machine.

    Raises:
        ConfigError: an NVMe path was not measured.
        BudgetError: a budget is larger than what it is taken from.
    """
    if device.shares_host_memory and not config.debug.copies:
        device_bytes, device_reason = 0, "device: the CPU, one pool with host memory"
        said = [budget for budget in (config.host_budget, config.device_budget) if budget is not None]
        host_said = sum(said) if said else None
    else:
        device_bytes, device_reason = _device(config.device_budget, device, device_free_bytes)
        host_said = config.host_budget
    host_bytes, host_reason = _host(host_said, machine, may_grow=config.memory_may_grow)
    nvme_bytes, nvme_reason = _nvme(config, machine)
    if host_ranks > 1:
        host_bytes, nvme_bytes = host_bytes // host_ranks, nvme_bytes // host_ranks
        host_reason += f"; {format_bytes(host_bytes)} for each of its {host_ranks} ranks"
        nvme_reason += f"; {format_bytes(nvme_bytes)} for each of its {host_ranks} ranks" if nvme_bytes else ""
    on_cpu = device.shares_host_memory and not config.debug.copies
    part_bytes, where = activation_part(config, host_bytes, on_cpu=on_cpu, host_ranks=host_ranks)
    reasons = (device_reason, host_reason, nvme_reason)
    share = ACTIVATION_SHARES[config.offload_activations] if part_bytes and config.offload_activations else 0.0
    share = share if config.activation_budget is None else 0.0
    return Budgets(device_bytes, host_bytes, nvme_bytes, reasons, host_ranks, 1, part_bytes, share, where)


def unsaid_device_bytes(free_bytes: int) -> int:
    """The device budget where nobody says one."""
    return int(free_bytes * DEVICE_SHARE)


def _device(said: int | None, device: Device, free_bytes: int) -> tuple[int, str]:
    if said is None:
        taken = unsaid_device_bytes(free_bytes)
        share = f"{DEVICE_SHARE:.0%} of the {format_bytes(free_bytes)} free"
        return taken, f"device: up to {format_bytes(taken)} for weights on {device}, {share}"
    if said > free_bytes:
        raise BudgetError(
            f"device_budget is {format_bytes(said)}, but {device} has {format_bytes(free_bytes)} free; lower it"
        )
    return said, f"device: {format_bytes(said)} as device_budget says"


def _host(said: int | None, machine: Machine, *, may_grow: bool) -> tuple[int, str]:
    available = machine.memory_available_bytes
    if said is None:
        taken = unsaid_host_bytes(available)
        return taken, f"host: {format_bytes(taken)}, {HOST_SHARE:.0%} of the {format_bytes(available)} available"
    most = machine.most_bytes(may_grow=may_grow)
    if most is not None and said > most:
        forced = "" if may_grow else ", or set memory_may_grow where the machine gets more memory as it is used"
        raise BudgetError(
            f"host_budget is {format_bytes(said)}, but this process may use {format_bytes(most)} of memory at most; "
            f"lower host_budget{forced}"
        )
    reason = f"host: {format_bytes(said)} as the configuration says"
    if said > available:
        reason += f" (only {format_bytes(available)} are available at the moment)"
    return said, reason


def _nvme(config: Config, machine: Machine) -> tuple[int, str]:
    if not config.nvme_path:
        return 0, "nvme: none, nvme_path is not set"
    if config.nvme_budget == 0:
        return 0, "nvme: none, nvme_budget is 0"
    if config.durability is None and not may_use_nvme(config):
        return 0, "nvme: none, offload_param and offload_optimizer keep everything nearer"
    measured = {disk.path: disk for disk in machine.disks}
    missing = [path for path in config.nvme_path if path not in measured]
    if missing:
        raise ConfigError(f"{config.path_key} {missing[0]}: its free space was not measured")
    filesystems = {measured[path].filesystem_id: measured[path].free_bytes for path in config.nvme_path}
    free = sum(filesystems.values())
    if config.nvme_budget is None:
        taken = unsaid_nvme_bytes(free)
        return taken, f"nvme: {format_bytes(taken)}, {DISK_SHARE:.0%} of the {format_bytes(free)} free"
    if config.nvme_budget > free:
        raise BudgetError(
            f"nvme_budget is {format_bytes(config.nvme_budget)}, but {', '.join(config.nvme_path)} "
            f"{'has' if len(filesystems) == 1 else 'have'} {format_bytes(free)} free; lower it or free some space"
        )
    return config.nvme_budget, f"nvme: {format_bytes(config.nvme_budget)} as nvme_budget says"
