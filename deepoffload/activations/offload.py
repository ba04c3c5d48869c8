"""The activation offload of one engine, from its configuration."""

from __future__ import annotations

from deepoffload.activations.copies import DeviceWay, HostWay, Way
from deepoffload.activations.hooks import ActivationHooks
from deepoffload.activations.order_of_return import OrderOfReturn
from deepoffload.activations.store import ActivationStore
from deepoffload.config import Config
from deepoffload.config.resolve import Budgets
from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.copies.host_link import HostLink
from deepoffload.device import Tier
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena
from deepoffload.memory.tier_manager import TierManager
from deepoffload.params.pager import Pager


def open_activations(
    pager: Pager, config: Config, budgets: Budgets, space: SwapSpace | None, accelerator: ComputeDevice | None
) -> ActivationStore | None:
    """Have what autograd saves leave, as the configuration says; None where nothing does.

    Args:
        budgets: of which the store gets its part.
        space: where they go when that is full.
        accelerator: what computes, where that has its own memory.
    """
    if not budgets.activation_bytes:
        return None
    order = OrderOfReturn()
    tiers = TierManager(
        Arena(budgets.activation_bytes, lends=accelerator is None),
        space if config.offload_activations is Tier.NVME else None,
        order,
        poison=config.debug.poison,
        timeline=pager.tiers.timeline,
    )
    way: Way
    if accelerator is None:
        way = on_host = HostWay(tiers)
        pager.freed = on_host.freed
    else:
        way = DeviceWay(HostLink(tiers, accelerator))
    store = ActivationStore(tiers, way, order, evict_always=config.debug.evict_always)
    hooks = ActivationHooks(pager, store, config.offload_activations_above)
    pager.hooks.put_below((hooks.pack, hooks.unpack))
    return store
