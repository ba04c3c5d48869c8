"""What one rank has of its host: budgets are a host's, and so is the rate of a disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from deepoffload import machine
from deepoffload.config import Config
from deepoffload.config.resolve import Budgets, resolve_budgets
from deepoffload.config.units import format_bytes
from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.device import Device
from deepoffload.errors import ConfigError
from deepoffload.io.named_files import durable_path
from deepoffload.io.probe import Bandwidth
from deepoffload.runtime.agreement import Agreement
from deepoffload.schedule.cost_model import Bandwidths

_LEAST = ("device_bytes", "host_bytes", "nvme_bytes", "activation_bytes")
"""Of these all ranks take what the one with the least has."""


def host_ranks(agreement: Agreement) -> int:
    """How many ranks this host has."""
    return 1 if agreement.group is None else len(agreement.group.ranks.host_ranks)


def measure_machine(agreement: Agreement, paths: Sequence[str], *, durable: bool) -> machine.Machine:
    """The machine, with what durable files in ``paths`` have already taken of the disks counted as free: it is ours, or
    another rank's of this host."""
    measured = machine.measure(paths)
    if not durable:
        return measured
    ours: dict[int, int] = {}
    for disk in measured.disks:
        for rank in (None,) if agreement.group is None else agreement.group.ranks.host_ranks:
            with contextlib.suppress(OSError):
                nbytes = os.stat(durable_path(disk.path, rank)).st_blocks * 512
                ours[disk.filesystem_id] = ours.get(disk.filesystem_id, 0) + nbytes
    disks = [replace(disk, free_bytes=disk.free_bytes + ours.get(disk.filesystem_id, 0)) for disk in measured.disks]
    return replace(measured, disks=tuple(disks))


def find_budgets(
    agreement: Agreement, config: Config, paths: Sequence[str], accelerator: ComputeDevice | None
) -> Budgets:
    """Those of this rank. ``paths``: what those of the configuration lead to.

    Raises:
        BudgetError: a budget is larger than what it is taken from.
    """
    device = Device.parse("cpu" if accelerator is None else str(accelerator.device))
    free_bytes = 0 if accelerator is None else accelerator.free_bytes()
    sharing = _sharing(agreement, device, None if accelerator is None else accelerator.identity())
    measured = measure_machine(agreement, paths, durable=config.durability is not None)
    config = replace(config, nvme_path=tuple(paths))
    if sharing > 1:
        said = config.device_budget
        free_bytes //= sharing
        config = replace(config, device_budget=None if said is None else said // sharing)
    found = resolve_budgets(config, measured, device, free_bytes, host_ranks(agreement))
    return agree_on_budgets(agreement, replace(found, device_ranks=sharing))


def _sharing(agreement: Agreement, device: Device, identity: str | None) -> int:
    """How many ranks compute on this rank's device: its budget is for all of them.

    Raises:
        ConfigError: some ranks compute on another kind of device.
    """
    if agreement.group is None:
        return 1
    everybody: list[tuple[str, str | None]] = agreement.gather((device.kind, identity), "the devices of ranks")
    other = next((rank for rank, (kind, _) in enumerate(everybody) if kind != everybody[0][0]), None)
    if other is not None:
        raise ConfigError(
            f"rank 0 computes on {everybody[0][0]} and rank {other} on {everybody[other][0]}: all ranks compute on one "
            'kind of device. Say device="cpu", or let each see one'
        )
    return 1 if identity is None else [found for _, found in everybody].count(identity)


def agree_on_budgets(agreement: Agreement, budgets: Budgets) -> Budgets:
    """The least that any rank has: all cut their models alike, and each unit is as large on every rank."""
    if agreement.group is None:
        return budgets
    everybody: list[Budgets] = agreement.gather(budgets, "comparing budgets")
    least = {name: min(getattr(each, name) for each in everybody) for name in _LEAST}
    if least == {name: getattr(budgets, name) for name in least}:
        return budgets
    said = (
        f"ranks: all take what the one with the least has, {format_bytes(least['host_bytes'])} of host memory and "
        f"{format_bytes(least['nvme_bytes'])} of NVMe"
    )
    return replace(budgets, **least, reasons=(*budgets.reasons, said))


def measure_together(
    agreement: Agreement, paths: Sequence[str], measure: Callable[[], list[Bandwidth]]
) -> tuple[list[Bandwidth], int]:
    """The rates of the paths' disks, each measured by one rank of its host while the others wait.

    Returns:
        The rates while nobody else uses the disks, and how many ranks of this host use them.
    """
    if agreement.group is None:
        return measure(), 1
    ranks = agreement.group.ranks
    mine = (ranks.hosts[ranks.rank], tuple(paths))
    keys: list[tuple[int, tuple[str, ...]]] = agreement.gather(mine, "the paths of NVMe")
    found: dict[tuple[int, tuple[str, ...]], list[Bandwidth]] = {}
    while set(found) != set(keys):
        # the disks of one host after each other: directories may share one
        turn = {key[0]: rank for rank, key in reversed(list(enumerate(keys))) if key not in found}
        measures = ranks.rank in turn.values()
        rates = agreement.gather(measure() if measures else None, "measuring the disks")
        found |= {keys[rank]: rates[rank] for rank in turn.values()}
    return found[mine], keys.count(mine)


def least_rates(agreement: Agreement, rates: Bandwidths) -> Bandwidths:
    """The least of every rate over all ranks: they plan alike."""
    everybody: list[Bandwidths] = agreement.gather(rates, "comparing the rates of disks")
    return Bandwidths(*(min(getattr(each, field.name) for each in everybody) for field in fields(Bandwidths)))
