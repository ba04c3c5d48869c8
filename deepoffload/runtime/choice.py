"""Which cut of a model is placed, decided by sizes: blocks are made of the chosen cut only."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from deepoffload.config import Config
from deepoffload.config.units import format_bytes
from deepoffload.copies.scratch import scratch_bytes
from deepoffload.device import Tier
from deepoffload.errors import DevicePlacementError, PlacementError
from deepoffload.native.aio import round_up
from deepoffload.ranks.exchange import TransferSizes
from deepoffload.runtime.cuts import Cut, Cutter
from deepoffload.runtime.read_shares import read_shares
from deepoffload.runtime.sizes import UnitSizes
from deepoffload.runtime.whole_copies import CopySizes, contribution_bytes, from_other_ranks, in_words, with_copies
from deepoffload.schedule.accumulation_order import with_order
from deepoffload.schedule.cost_model import (
    AccumulationOrder,
    Bandwidths,
    BlockKind,
    LinkRates,
    RankTraffic,
    StepOverlap,
    Workload,
)
from deepoffload.schedule.default_updates import with_updates
from deepoffload.schedule.durable import with_durable_steps
from deepoffload.schedule.nvme_room import set_up_nvme_bytes, within_nvme
from deepoffload.schedule.placement import KIND_NUMBERS, BlockColumns, BlockSpec, Placement, place_columns

UPDATED_WITH = (BlockKind.STATE, BlockKind.GRADIENT)
"""What of a unit lives on a device where its optimizer state does."""

TRIMMED_BYTES_MIN = 64 << 20
"""What is left of a device's budget at least, if it was as much: layers that come later may be larger than all before.
"""


@dataclass(frozen=True)
class Room:
    """What a model may take: memory, NVMe (None: there is no path), and of a device's memory. ``exchange``: moves bytes
    between ranks; None for one rank. ``no_guesses``: why no unit can be updated on a guess, if so."""

    capacity_bytes: int
    nvme_bytes: int | None
    bandwidths: Bandwidths
    device_bytes: int = 0
    exchange: TransferSizes | None = None
    no_guesses: str | None = None


def why_no_guesses(config: Config, *, on_device: bool) -> str | None:
    """Why no unit can be updated on a guess, where nobody asks for it; None where units can."""
    reasons = {
        "with weights on a device units are guessed only where step_overlap asks for it": on_device,
        "steps are made durable": config.durability is not None,
    }
    return next((why for why, holds in reasons.items() if holds), None)


@dataclass(frozen=True)
class ChosenCut:
    """A cut, the sizes of its units' blocks, and where these go. Blocks are numbered from 0 on, in the order in which
    they are made: unit by unit, weights, gradients, pieces of state.

    ``on_device``: numbers of blocks of optimizer state and of its gradients that live on a device. They are no part of
    the placement where the configuration asks for that. Else the placement has room for them, too.
    ``copies_bytes``: memory for whole copies of what several ranks store, which is no part of it either: those that
    tensors show, or where a device computes those on their way there. ``shown_bytes``: for those that tensors show.
    """

    cut: Cut
    sizes: list[UnitSizes]
    placement: Placement
    on_device: list[int]
    copies_bytes: int = 0
    shown_bytes: int = 0

    def content_bytes(self) -> list[int]:
        """What each block stores."""
        return [block.nbytes for unit in self.sizes for block in unit.blocks for _ in range(block.count)]

    def device_bytes(self, capacity_bytes: int) -> int:
        """What is taken, in one piece, of a device budget of ``capacity_bytes``: weights, and what lives there."""
        rooms = [block.room_bytes for unit in self.sizes for block in unit.blocks for _ in range(block.count)]
        meanwhile_bytes = scratch_bytes(capacity_bytes) if self.on_device else 0
        stays_bytes = sum(rooms[number] for number in self.on_device) + meanwhile_bytes
        return min(capacity_bytes, max(weights_on_device_bytes(self.sizes) + stays_bytes, TRIMMED_BYTES_MIN))

    def from_other_ranks(self, accumulation_steps: int) -> RankTraffic | None:
        """What a rank gets from the others in a step; None for one rank."""
        return from_other_ranks(self.cut.division.drafts, self.sizes, self.shown_bytes, accumulation_steps)

    def table(self, host_ranks: int, accumulation_steps: int, rates: LinkRates | None) -> str:
        """The placement for people, with what comes from other ranks. ``rates``: of the link to them, where it is
        known."""
        traffic = self.from_other_ranks(accumulation_steps)
        line = "" if traffic is None else in_words(traffic, rates)
        return "\n".join(filter(None, [self.placement.table(host_ranks), line]))

    def with_ids(self, ids: Sequence[int]) -> Placement:
        """The placement of blocks that have got ``ids``, in the order of their numbers."""
        placement = self.placement
        return replace(
            placement,
            blocks=tuple(replace(block, id=ids[block.id]) for block in placement.blocks),
            resident=frozenset(ids[number] for number in placement.resident),
            paged=frozenset(ids[number] for number in placement.paged),
        )


def choose(cutter: Cutter, config: Config, room: Room) -> ChosenCut:
    """Cut a model as finely as its budget suggests, or in another way where that does not fit.

    Raises:
        DevicePlacementError, PlacementError: no cut fits; see :func:`deepoffload.runtime.plan.plan_model`.
    """
    refusals: list[tuple[PlacementError, Cut]] = []
    too_coarse: list[tuple[DevicePlacementError, Cut]] = []
    for cut in cutter.cuts(room.capacity_bytes):
        try:
            return _placed(cutter, cut, config, room)
        except DevicePlacementError as error:
            too_coarse.append((error, cut))
        except PlacementError as error:
            refusals.append((error, cut))
    on_device: DevicePlacementError | None = None
    if not refusals:  # no cut is fine enough for the device: with the least that one needs there, does the host do?
        on_device = min((error for error, _ in too_coarse), key=_needs)
        room = replace(room, device_bytes=int(_needs(on_device)))
        for cut in (cut for error, cut in too_coarse if _needs(error) == room.device_bytes):
            try:
                _placed(cutter, cut, config, room)
            except PlacementError as error:
                refusals.append((error, cut))
            else:
                raise on_device
    refusal, cut = min(refusals, key=lambda tried: _needs_budgets(tried[0]))
    if refusal.enough_bytes is not None:
        try:
            _placed(cutter, cut, config, replace(room, capacity_bytes=refusal.enough_bytes), with_blocks=False)
        except PlacementError as error:
            raise _both(refusal, error) from None
    raise refusal if on_device is None else PlacementError(f"{on_device}. {refusal}", refusal.enough_bytes)


def least_bytes(cutter: Cutter, cut: Cut, config: Config, room: Room) -> int:
    """The least memory with which ``cut`` is accepted. Of a device's memory it gets what it needs."""
    unlimited = sys.maxsize if room.exchange is not None and room.device_bytes else 0
    try:
        placed = _placed(cutter, cut, config, replace(room, capacity_bytes=0, device_bytes=unlimited))
    except PlacementError as error:
        return error.enough_bytes or 0
    return placed.placement.minimum_bytes


def _needs(error: PlacementError) -> float:
    return math.inf if error.enough_bytes is None else error.enough_bytes


def _needs_budgets(error: PlacementError) -> tuple[float, float]:
    """The least is best: where memory is large enough for some cut, NVMe for that one."""
    nvme_bytes = error.enough_nvme_bytes
    return 0 if nvme_bytes is not None else _needs(error), math.inf if nvme_bytes is None else nvme_bytes


def _both(memory: PlacementError, nvme: PlacementError) -> PlacementError:
    """Memory is too small, and with as much as would do NVMe is, too."""
    said, _, table = str(memory).partition("\n")
    text = f"{said} With so much memory NVMe is too small: {str(nvme).splitlines()[0]}\n{table}"
    return PlacementError(text, memory.enough_bytes, enough_nvme_bytes=nvme.enough_nvme_bytes)


def _placed(cutter: Cutter, cut: Cut, config: Config, room: Room, *, with_blocks: bool = True) -> ChosenCut:
    """``with_blocks``: False where only whether it fits is asked; there may be some 100,000 blocks."""
    sizes, exchange = cutter.sizes(cut, room.capacity_bytes), room.exchange
    if exchange is None:
        return _placed_blocks(cut, sizes, config, room, with_blocks=with_blocks)
    drafts = cut.division.drafts
    copies = CopySizes.of(sizes, (nbytes for _, nbytes in window_bytes(cut, sizes)))
    others_bytes = contribution_bytes(drafts, exchange, room.capacity_bytes)
    left_bytes = room.capacity_bytes - others_bytes
    refusal: PlacementError | None = None
    choices = list(copies.arrivals(left_bytes) if room.device_bytes else copies.choices(left_bytes))
    for copies_bytes in choices:
        rest = replace(room, capacity_bytes=max(left_bytes - copies_bytes, 0))
        try:
            placed = _placed_blocks(cut, sizes, config, rest, with_blocks=with_blocks)
        except DevicePlacementError:
            raise
        except PlacementError as error:
            refusal = error
        else:
            return replace(placed, copies_bytes=copies_bytes, shown_bytes=room.device_bytes or copies_bytes)
    assert refusal is not None, "there is always a choice"
    raise with_copies(refusal, choices[-1], drafts, exchange, room.capacity_bytes, others_bytes)


def _placed_blocks(cut: Cut, sizes: list[UnitSizes], config: Config, room: Room, *, with_blocks: bool) -> ChosenCut:
    drafts = cut.division.drafts
    if room.device_bytes:
        _check_calls(cut, sizes, room.device_bytes)
    alone = all(draft.layout is None for draft in drafts)  # other ranks take part in whole copies only
    shares = read_shares(cut) if config.inference and alone else {}
    columns = _columns(cut, sizes, shares)
    asked = config.offload_optimizer is Tier.DEVICE
    may_stay = room.exchange is None and (asked or _rest_is_for_state(config))
    stays = _state_on_device(sizes, room.device_bytes) if may_stay else set()
    of_updates = np.isin(columns.kinds, [KIND_NUMBERS[kind] for kind in UPDATED_WITH])
    away: Any = of_updates & np.isin(columns.units, [drafts[number].index for number in stays])
    # Where nobody has asked for it, the host has room for all the same: an optimizer may need its state there.
    placed = BlockColumns(*(column[~away] for column in columns)) if asked else columns
    limits = {BlockKind.WEIGHT: config.offload_param, BlockKind.STATE: config.offload_optimizer}
    kept_kinds = [KIND_NUMBERS[kind] for kind, tier in limits.items() if tier is not None and tier is not Tier.NVME]
    event_bytes = max(_event_bytes(cut, sizes, several=config.inference), default=0)
    durable = config.durability is not None
    place = partial(
        place_columns,
        placed,
        tuple,  # no blocks: most placements are refused, or another one is chosen
        capacity_bytes=room.capacity_bytes,
        nvme_capacity_bytes=room.nvme_bytes,
        event_weight_bytes=event_bytes,
        bandwidths=room.bandwidths,
        workload=Workload(
            config.gradient_accumulation_steps,
            config.step_overlap or StepOverlap.DEFERRED,  # guesses move the same bytes
            training=not config.inference,
            order=_sure_order(config),
        ),
        num_parameters=sum(handle.numel for draft in drafts for handle, _ in draft.trained) or None,
        keep=frozenset(placed.ids[np.isin(placed.kinds, kept_kinds)].tolist()),
        set_up_bytes=_set_up_bytes(sizes, can_leave=room.nvme_bytes is not None),
    )

    def placement_of(frugal: bool) -> Placement:
        placement = place(frugal=frugal)
        return with_durable_steps(placement, columns) if durable else placement

    placement = within_nvme(
        placement_of,
        0 if config.optimizer is not None else _relayout_bytes(cut, sizes),
        _set_up_nvme_bytes(cut, sizes, room),
        durable=durable,
    )
    if with_blocks:
        placement = replace(placement, blocks=tuple(_specs(cut, sizes, stays if asked else set(), shares)))
    if not config.inference:
        placement = with_updates(placement, config.step_overlap, room.bandwidths, no_guesses=room.no_guesses)
        if with_blocks:
            said, count = config.accumulation_order, config.gradient_accumulation_steps
            placement = with_order(placement, said, count, on_device=room.device_bytes > 0)
    return ChosenCut(cut, sizes, placement, np.flatnonzero(away).tolist())


def _sure_order(config: Config) -> AccumulationOrder:
    """The order that traffic is counted with. Where nobody says one, the program may as well call backward itself."""
    said = config.accumulation_order
    return AccumulationOrder.HORIZONTAL if said is AccumulationOrder.AUTO else said


def _check_calls(cut: Cut, sizes: Sequence[UnitSizes], device_bytes: int) -> None:
    """Raise where a call of a module takes more weights at once than the device may hold."""
    name, nbytes = max(window_bytes(cut, sizes), key=lambda window: window[1], default=("", 0))
    if nbytes > device_bytes:
        raise DevicePlacementError(
            f"device_budget is {format_bytes(device_bytes)} ({device_bytes} bytes), but a call of "
            f"{name or 'the model'} needs {nbytes} bytes of weights on the device at once; raise it to at least "
            f"{nbytes} bytes",
            nbytes,
        )


def _columns(cut: Cut, sizes: Sequence[UnitSizes], shares: Mapping[int, float]) -> BlockColumns:
    """All blocks of a cut. ``shares``: by number of a draft, where a use does not read all of it."""
    rows = [
        (KIND_NUMBERS[block.kind], block.room_bytes, draft.index, unit.backed, number, block.count)
        for number, (draft, unit) in enumerate(zip(cut.division.drafts, sizes, strict=True))
        for block in unit.blocks
    ]
    *columns, counts = np.array(rows, np.int64).reshape(-1, 6).T
    kinds, nbytes, units, backed, numbers = (np.repeat(column, counts) for column in columns)
    read_shares = np.ones(len(kinds))
    for number, share in shares.items():
        read_shares[numbers == number] = share
    return BlockColumns(np.arange(len(kinds)), kinds.astype(np.int8), nbytes, units, backed.astype(bool), read_shares)


def _specs(cut: Cut, sizes: Sequence[UnitSizes], stays: set[int], shares: Mapping[int, float]) -> Iterator[BlockSpec]:
    """The blocks of a cut, without the state and gradients of the units whose numbers are in ``stays``."""
    number = 0
    for at, (draft, unit) in enumerate(zip(cut.division.drafts, sizes, strict=True)):
        piece = 0
        for block in unit.blocks:
            for _ in range(block.count):
                name = draft.block_name(block.kind, piece)
                piece += block.kind is BlockKind.STATE
                if block.kind not in UPDATED_WITH or at not in stays:
                    share = shares.get(at, 1.0)
                    yield BlockSpec(number, name, block.kind, block.room_bytes, draft.index, unit.backed, share)
                number += 1


def weights_on_device_bytes(sizes: Sequence[UnitSizes]) -> int:
    """Device memory that all weights take, and the largest block of gradients, of which one is there when looked at."""
    gradients = max((unit.whole_gradient_bytes for unit in sizes), default=0)
    return sum(unit.whole_weight_bytes for unit in sizes) + gradients


def _state_on_device(sizes: Sequence[UnitSizes], device_bytes: int) -> set[int]:
    """The numbers of as many units, first to last, as there is room for the state and the gradients of next to the
    weights, and to what their updates need meanwhile."""
    left = device_bytes - weights_on_device_bytes(sizes) - scratch_bytes(device_bytes)
    kept = set()
    for number, unit in enumerate(sizes):
        state_bytes = unit.room_bytes(BlockKind.STATE)
        nbytes = state_bytes + unit.room_bytes(BlockKind.GRADIENT)
        if state_bytes and nbytes <= left:
            left -= nbytes
            kept.add(number)
    return kept


def _rest_is_for_state(config: Config) -> bool:
    """Whether what the weights leave of the device budget holds optimizer state although nobody has asked for it: where
    the configuration says how much that is, and neither where state goes nor an optimizer that a device cannot run."""
    if config.device_budget is None or config.offload_optimizer is not None or config.inference:
        return False
    said = config.optimizer
    if said is None:
        return True
    params = said.params
    narrow = params.get("fp32_optimizer_states") is False or params.get("state_dtype", "fp32") != "fp32"
    return said.type in ("adam", "adamw") and not narrow and not params.get("amsgrad")


def _set_up_bytes(sizes: Sequence[UnitSizes], *, can_leave: bool) -> int:
    """What must be in memory at once while the parameters move, one by one, into their units."""
    if can_leave:
        return max((unit.set_up_bytes for unit in sizes), default=0)
    used = sum(unit.registered_bytes for unit in sizes)
    most = used
    for unit in sizes:
        most = max(most, used + unit.set_up_peak_bytes)
        used += unit.set_up_net_bytes
    return most


def _relayout_bytes(cut: Cut, sizes: Sequence[UnitSizes]) -> int:
    """What may be there twice at once: the state of one unit, when an optimizer that nobody knows of before has it laid
    out again. Where the state completes no weights, nothing is in it yet."""
    units = zip(cut.division.drafts, sizes, strict=True)
    splits = (unit for draft, unit in units if any(dtype is not torch.float32 for _, dtype in draft.trained))
    return max((unit.room_bytes(BlockKind.STATE) for unit in splits), default=0)


def _set_up_nvme_bytes(cut: Cut, sizes: Sequence[UnitSizes], room: Room) -> int:
    """NVMe that is certainly enough while the parameters move into their units, and then to where they stay."""
    own = [draft for draft in cut.division.drafts if draft.backing is None]
    rooms = [round_up(handle.nbytes) for draft in own for handle in draft.handles]
    unbacked = [unit for unit in sizes if not unit.backed]
    rooms += [block.room_bytes for unit in unbacked for block in unit.blocks if block.kind is not BlockKind.GRADIENT]
    most_bytes = _set_up_bytes(unbacked, can_leave=False)
    return set_up_nvme_bytes(room.capacity_bytes, most_bytes, max(rooms, default=0))


def window_bytes(cut: Cut, sizes: Sequence[UnitSizes]) -> Iterator[tuple[str, int]]:
    """Each window's name, and the memory that the weights of one call of its module take, on the host or as copies."""
    yield from _window_sums(cut, [unit.whole_weight_bytes for unit in sizes])


def _event_bytes(cut: Cut, sizes: Sequence[UnitSizes], *, several: bool) -> Iterator[int]:
    """The weights that one call takes at once, as a rank stores them. ``several``: of calls that take several units.
    One unit alone counts as paged or as resident, not as both."""
    windows = zip(_stored_window_bytes(cut, sizes), cut.division.window_units, strict=True)
    return (nbytes for (_, nbytes), (_, numbers) in windows if len(numbers) > 1 or not several)


def _stored_window_bytes(cut: Cut, sizes: Sequence[UnitSizes]) -> Iterator[tuple[str, int]]:
    """The same of what a rank stores of them."""
    yield from _window_sums(cut, [unit.room_bytes(BlockKind.WEIGHT) for unit in sizes])


def _window_sums(cut: Cut, rooms: Sequence[int]) -> Iterator[tuple[str, int]]:
    for name, numbers in cut.division.window_units:
        yield name, sum(rooms[number] for number in numbers)
