"""From the name of a device to the memory that tensors show on it."""

from __future__ import annotations

import os

import torch

from deepoffload.config import Config
from deepoffload.config.resolve import Budgets
from deepoffload.copies.accelerator import Accelerator, ComputeDevice
from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.copies.cpu_device import CpuDevice
from deepoffload.copies.gathered import Gathered
from deepoffload.copies.host_link import HostLink
from deepoffload.copies.rank_device import RankDevice
from deepoffload.copies.rank_link import RankLink
from deepoffload.copies.scratch import scratch_bytes
from deepoffload.copies.shown import ShownMemory
from deepoffload.device import Device
from deepoffload.errors import BudgetError, ConfigError
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import DeviceCopies
from deepoffload.memory.eviction import EvictionPolicy
from deepoffload.memory.tier_manager import TierManager
from deepoffload.optim.device_kernels import choose_kernels
from deepoffload.optim.device_landing import DeviceLandings, ring_of
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.optim.threads import num_threads
from deepoffload.params.torch_private import outside_modes, outside_user_modes, storage_at
from deepoffload.ranks.group import RankGroup
from deepoffload.ranks.places import RankMap, read_launch
from deepoffload.ranks.transport import open_exchange
from deepoffload.runtime.link_rates import link_rates
from deepoffload.runtime.plan import ModelPlan
from deepoffload.timeline import Timeline

CPU = torch.device("cpu")


def with_ring(capacity_bytes: int) -> int:
    """The host budget that leaves ``capacity_bytes`` for blocks next to the ring of gradients from a device."""
    budget_bytes = capacity_bytes
    for _ in range(64):  # a larger budget has a larger ring, but never by more than a 32nd part
        slot_bytes, slots = ring_of(budget_bytes)
        if budget_bytes - slot_bytes * slots >= capacity_bytes:
            break
        budget_bytes = capacity_bytes + slot_bytes * slots
    return budget_bytes


def device_of(config: Config) -> torch.device:
    """What ``config.device`` names, perhaps without an index. Not said: the accelerator that torch sees, or the CPU.
    Starts nothing on it.

    Raises:
        ConfigError: torch knows no device of this name.
    """
    if config.device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return CPU if found is None else torch.device(found.type)
    if Device.parse(config.device).shares_host_memory:
        return CPU
    try:
        return torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(
            f'device = "{config.device}" is not known to torch; expected "cpu", "cuda", or such as "cuda:1"'
        ) from error


def find_accelerator(config: Config, ranks: RankMap | None = None) -> ComputeDevice | None:
    """What computes, or None for the CPU. With ``debug.copies`` the CPU is a device like the others.

    Args:
        ranks: who trains together. Where neither the configuration nor the program says which device, each rank of a
            host gets another one, and the program's current device becomes that one, as launchers' scripts do it.

    Raises:
        ConfigError: torch has no such device here, or knows none of this name.
    """
    device = device_of(config)
    if device.type == "cpu":
        return CpuDevice() if config.debug.copies else None
    is_chosen_here = device.index is None and torch.accelerator.is_available()
    if is_chosen_here and ranks is not None and ranks.world_size > 1:
        launch = read_launch(os.environ)  # these ranks may be some of the host's processes, as along one axis of a mesh
        said = None if launch is None else launch.local_rank
        number = ranks.local_rank if said is None else said
        if torch.accelerator.current_device_index() == 0:
            torch.accelerator.set_device_index(number % torch.accelerator.device_count())
    return Accelerator(device)


def open_arena(budgets: Budgets, *, lends: bool) -> Arena:
    """This rank's host memory. Its errors name budgets of the host."""
    return Arena(budgets.block_bytes, lends=lends, budget_of=budgets.host_bytes_for, sharers=budgets.host_ranks)


def open_memory(
    arena: Arena,
    space: SwapSpace | None,
    policy: EvictionPolicy,
    accelerator: ComputeDevice | None,
    device_bytes: int,
    *,
    poison: bool,
    timeline: Timeline | None,
) -> tuple[TierManager, CopyMemory | None]:
    """The blocks' books, and the copies on ``accelerator`` that tensors show; None where they show the arena.

    Raises:
        BudgetError: a budget is too small for it.
    """

    def tiers_over(copies: DeviceCopies | None) -> TierManager:
        return TierManager(arena, space, policy, copies=copies, poison=poison, timeline=timeline)

    if accelerator is None:
        return tiers_over(None), None
    memory = CopyMemory(
        tiers_over,
        accelerator,
        device_bytes,
        outside_user_modes=outside_user_modes,
        storage_at=storage_at,
        poison=poison,
    )
    return memory.tiers, memory


def open_rank_memory(
    arena: Arena,
    space: SwapSpace | None,
    policy: EvictionPolicy,
    group: RankGroup,
    accelerator: ComputeDevice | None = None,
    device_bytes: int = 0,
    *,
    transport: str,
    timeout_s: float,
    poison: bool,
    timeline: Timeline | None,
) -> tuple[TierManager, CopyMemory, RankLink]:
    """The blocks' books of one of several ranks, the whole copies that tensors show, and the way to the other ranks.
    Collective. The copies lie on ``accelerator``, in at most ``device_bytes``; where the CPU computes in ``arena``, of
    which :func:`take_device_memory` takes what they get.

    Raises:
        ConfigError, UnsupportedError, RankError: as :func:`deepoffload.ranks.transport.open_exchange`.
    """
    exchange = open_exchange(group, transport, num_threads())
    rates = link_rates(group, exchange)
    links: list[RankLink] = []
    device = RankDevice() if accelerator is None else accelerator

    def join(host: HostLink) -> Gathered:
        links.append(RankLink(group, exchange, host.tiers.lock, timeout_s=timeout_s, rates=rates, timeline=timeline))
        links[0].rounds.outside_modes = outside_modes
        return Gathered(host, links[0])

    memory = CopyMemory(
        lambda copies: TierManager(arena, space, policy, copies=copies, poison=poison, timeline=timeline),
        device,
        arena.capacity_bytes if accelerator is None else device_bytes,
        outside_user_modes=outside_user_modes,
        storage_at=storage_at,
        join=join,
        poison=poison,
    )
    if isinstance(device, RankDevice):
        device.tiers = memory.tiers
    links[0].before_meeting.append(memory.finish_rewrites)
    return memory.tiers, memory, links[0]


def take_device_memory(memory: ShownMemory, plan: ModelPlan, landings: DeviceLandings | None) -> None:
    """Take what the model can use of the device budget; with several ranks, what it has of the host's for whole copies,
    which stay there or go on to a device. Nothing to do where tensors show the arena. Where optimizer state lives on
    the device, ``landings`` gets the kernels that update it.

    Raises:
        BudgetError: the device, or the arena, does not have what the budget says.
    """
    if memory.on_host:
        return
    whole_bytes = plan.chosen.copies_bytes
    if not memory.device_bytes:
        memory.reserve(whole_bytes)
        return
    meanwhile_bytes = scratch_bytes(memory.capacity_bytes) if plan.on_device else 0
    try:
        memory.reserve(plan.chosen.device_bytes(memory.capacity_bytes), meanwhile_bytes, whole_bytes)
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"{memory.device} has no {memory.capacity_bytes} bytes in one piece for weights, as device_budget "
            f"says: {error}. Lower device_budget, or let go of other memory on the device first"
        ) from error
    if plan.on_device and landings is not None:
        trained = {dtype for draft in plan.drafts for _, dtype in draft.trained if dtype in NATIVE_DTYPES}
        landings.kernels = choose_kernels(memory.device, sorted(trained, key=str))
