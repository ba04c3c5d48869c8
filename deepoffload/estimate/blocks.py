"""The placement that the engine would choose for a model, worked out without any of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from deepoffload.config import Config
from deepoffload.errors import PlacementError, UsageError
from deepoffload.estimate.rank_share import PlannedLink, RankShare, rank_share
from deepoffload.native.aio import PAGE_BYTES, round_up
from deepoffload.optim.device_landing import ring_of
from deepoffload.runtime.building import WINDOW_SHARE, kept_bytes, shares_of
from deepoffload.runtime.choice import ChosenCut, Room, choose, why_no_guesses
from deepoffload.runtime.compute_types import ComputeTypes
from deepoffload.runtime.plan import cutter_of, dry_pager
from deepoffload.runtime.refusals import in_ring
from deepoffload.schedule.cost_model import Bandwidths, BlockKind
from deepoffload.schedule.placement import BlockSpec, Placement

UNBOUNDED_BYTES = 1 << 62


@dataclass(frozen=True)
class BlockPlan:
    """Units and blocks of a model and where they would go.

    ``modules``: those that have windows. ``unit_of``: ``id(parameter)`` to the number of its unit.
    ``content_bytes``: by block, what it stores (``BlockSpec.nbytes`` is what it takes in memory).
    ``trained_by_unit``: how many trainable parameters (tensors) each unit has.
    ``registered_bytes``: parameters as the model registers them. ``largest_bytes``: the largest one, so registered.
    ``device_bytes``: what the engine takes of a device's memory, in one piece; 0 where the CPU computes.
    ``ring_bytes``: of the host budget, what the engine takes for gradients on their way from the device, where one rank
    trains alone.
    ``rank``: where this is one rank's part of a model, what else the rank has.
    """

    placement: Placement
    modules: tuple[nn.Module, ...]
    unit_of: dict[int, int]
    content_bytes: dict[int, int]
    registered_bytes: int
    largest_bytes: int
    num_parameters: int
    trained_by_unit: dict[int, int]
    device_bytes: int = 0
    ring_bytes: int = 0
    rank: RankShare | None = None

    def table(self) -> str:
        """The placement for people, as the engine logs it."""
        return self.placement.table() if self.rank is None else self.rank.table

    def extent_bytes(self, block: BlockSpec) -> int:
        """What a block takes on NVMe: its content, in whole pages."""
        return round_up(self.content_bytes[block.id])

    def in_use_bytes(self) -> int:
        """Weights in use, those of the next unit, and one unit's gradients: what passes through a device."""
        sizes = {kind: [b.nbytes for b in self.placement.blocks if b.kind is kind] for kind in BlockKind}
        return 2 * max(sizes[BlockKind.WEIGHT], default=0) + max(sizes[BlockKind.GRADIENT], default=0)

    def kind_bytes(self, kind: BlockKind, ids: frozenset[int]) -> int:
        return sum(block.nbytes for block in self.placement.blocks if block.kind is kind and block.id in ids)


class Planner:
    """Plans of one model, on any device (the meta device, too). What does not depend on the room is worked out once.

    Args:
        link: joins the ranks that train it; None with one. Plans are one rank's then.
        on_device: where it is to run, weights are on a device.

    Raises:
        UsageError: the model has no parameters.
    """

    def __init__(
        self, model: nn.Module, config: Config, link: PlannedLink | None = None, *, on_device: bool = False
    ) -> None:
        pager, gradients, handles = dry_pager(model, link=link)
        if not handles:
            raise UsageError(f"{type(model).__name__} has no parameters that could be placed")
        self._config = config
        self._link = link
        # One of several ranks plans for memory through which its copies come to the device. What is asked of the
        # host alone is asked with as much of the device as it takes.
        self._any_device_bytes = UNBOUNDED_BYTES if link is not None and on_device else 0
        self._has_ring = link is None and on_device
        self._no_guesses = why_no_guesses(config, on_device=on_device)
        self._params = [handle.tensor for handle in handles if handle.tensor is not None]
        self._cutter = cutter_of(pager, gradients, config, [model], handles)

    @property
    def types(self) -> ComputeTypes:
        """What the parameters and buffers compute in."""
        return self._cutter.types

    def plan(
        self, *, capacity_bytes: int, nvme_bytes: int | None, bandwidths: Bandwidths, device_bytes: int | None = None
    ) -> BlockPlan:
        """Place the model as ``offload_context`` would.

        Args:
            capacity_bytes: the host budget without the part of activations.
            device_bytes: the device budget; None: enough.

        Raises:
            PlacementError: it does not fit; the message carries the table. It names memory for blocks, which
                :meth:`budget_of` makes a budget.
        """
        exchange = None if self._link is None else self._link.exchange
        device_bytes = self._any_device_bytes if device_bytes is None else device_bytes
        capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        ring_bytes = self._ring_bytes(capacity_bytes)
        left_bytes = max(capacity_bytes - ring_bytes, 0)
        room = Room(left_bytes, nvme_bytes, bandwidths, device_bytes, exchange, self._no_guesses)
        choice = choose(self._cutter, self._config, room)
        plan = _block_plan(choice, choice.device_bytes(device_bytes), ring_bytes)
        if self._link is None:
            return plan
        steps = self._config.gradient_accumulation_steps
        share = rank_share(choice, self._link, room.capacity_bytes, plan.device_bytes, steps)
        return replace(plan, rank=share, registered_bytes=self._registered_bytes(room.capacity_bytes))

    def _ring_bytes(self, capacity_bytes: int) -> int:
        slot_bytes, slots = ring_of(capacity_bytes) if self._has_ring else (0, 0)
        return slot_bytes * slots

    def budget_of(self, capacity_bytes: int) -> tuple[int, str]:
        """The host budget that leaves so much for blocks, and what else it is for."""
        return in_ring(capacity_bytes, "the device") if self._has_ring else (capacity_bytes, "")

    def _registered_bytes(self, capacity_bytes: int) -> int:
        """What one of several ranks has of the parameters while the model is built: its part of each, and the last ones
        whole, in a part of its memory."""
        sizes = [param.nbytes for param in self._params]
        whole_bytes = sum(map(round_up, sizes))
        if shares_of(sizes, capacity_bytes, self._world_size) == 1:
            return whole_bytes
        parts_bytes = sum(kept_bytes(nbytes, self._world_size) for nbytes in sizes)
        return min(parts_bytes + capacity_bytes // WINDOW_SHARE, whole_bytes)

    @property
    def _world_size(self) -> int:
        return 1 if self._link is None else self._link.ranks.world_size

    def smallest_capacity(self, *, nvme_bytes: int | None, bandwidths: Bandwidths) -> int:
        """The smallest memory budget with which the model can be placed.

        Raises:
            PlacementError: NVMe is too small for any budget up to all of the model.
        """

        def attempt(capacity_bytes: int) -> BlockPlan:
            budget_bytes, _ = self.budget_of(capacity_bytes)
            return self.plan(capacity_bytes=budget_bytes, nvme_bytes=nvme_bytes, bandwidths=bandwidths)

        capacity_bytes = self._smallest_for_blocks(attempt, nvme_bytes)
        return self.budget_of(capacity_bytes)[0]

    def _smallest_for_blocks(self, attempt: Callable[[int], BlockPlan], nvme_bytes: int | None) -> int:
        least_bytes = self._surely_needed()
        try:
            attempt(least_bytes)
        except PlacementError as error:
            if error.enough_bytes is not None and error.enough_nvme_bytes is None:
                return error.enough_bytes
        else:
            return least_bytes
        # NVMe ends before the budget does: what it cannot hold has to stay in memory.
        everything = attempt(UNBOUNDED_BYTES).placement.resident_bytes
        least = max(0, everything - (nvme_bytes or 0))
        return round_up(first_that_fits(lambda capacity: _fits(attempt, capacity), everything, least))

    def _surely_needed(self) -> int:
        """What the largest parameter alone takes while it moves into its unit: as registered, and in the dtype it
        computes in. No budget below that will do, and plans for much smaller ones would be of very many very small
        blocks."""
        part = self._world_size
        needs = (param.nbytes + param.numel() * self.types.of(param).itemsize // part for param in self._params)
        return max(needs, default=PAGE_BYTES)


def first_that_fits(fits: Callable[[int], bool], most: int, least: int = 0) -> int:
    """The least number up to ``most`` (which fits) from which on it fits, to one part in 512. None below ``least``
    fits, and the answer is sought near it."""
    low, high, step = least, most, max(most >> 6, 1)
    while least and low + step < high:
        if fits(low + step):
            high = low + step
            break
        low, step = low + step, 2 * step
    while high - low > max(high >> 9, 1):
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _fits(attempt: Callable[[int], object], capacity_bytes: int) -> bool:
    try:
        attempt(capacity_bytes)
    except PlacementError:
        return False
    return True


def _block_plan(choice: ChosenCut, device_bytes: int, ring_bytes: int) -> BlockPlan:
    drafts = choice.cut.division.drafts
    handles = [handle for draft in drafts for handle in draft.handles]
    return BlockPlan(
        placement=choice.placement,
        modules=tuple(module for _, module in choice.cut.division.windows),
        unit_of={id(handle.tensor): draft.index for draft in drafts for handle in draft.handles},
        content_bytes=dict(enumerate(choice.content_bytes())),
        registered_bytes=sum(round_up(handle.nbytes) for handle in handles),
        largest_bytes=max(handle.nbytes for handle in handles),
        num_parameters=sum(handle.numel for handle in handles),
        trained_by_unit={draft.index: len(draft.trained) for draft in drafts},
        device_bytes=device_bytes,
        ring_bytes=ring_bytes,
    )
