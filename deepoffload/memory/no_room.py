"""What to tell the user when the budget does not hold a block."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import NamedTuple

from deepoffload.errors import BudgetError
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block, host_view_owner

SHOWN_MAX = 8


class EnoughBytes(NamedTuple):
    """Budgets that are enough: for what is kept now, and for a program that comes to keep views of all weights."""

    kept: int
    every_view: int


BudgetFor = Callable[[Collection[Block], int, int], EnoughBytes]
"""From the blocks that are kept or in use, further bytes that are kept, and a budget that is needed in any case, to
budgets that are enough."""

_SYSTEM = (
    "The system does not let pages have other addresses (ulimit -v, mlockall, vm.overcommit_memory = 2): let it, or"
)
_DRIVER = "Pages cannot have other addresses, because the device's driver knows them by these:"


class Hold(enum.Enum):
    """Why a block cannot leave memory."""

    IN_USE = "in use"
    REFERRED_TO = "still referred to by the program"
    STATIC = "static"
    NO_NVME = "nowhere to go without NVMe"


def _why_it_stays(block: Block, static: Container[int], has_nvme: bool) -> Hold | None:
    owner = host_view_owner(block)
    if block.leases:
        return Hold.IN_USE
    if owner is not None and not owner.can_release():
        return Hold.REFERRED_TO
    if not has_nvme:
        return Hold.NO_NVME
    return Hold.STATIC if block.id in static else None


def no_room(
    block: Block,
    arena: Arena,
    resident: Iterable[Block],
    static: Container[int],
    viewed: Sequence[int],
    together: Iterable[Block],
    *,
    budget_for: BudgetFor | None,
    has_nvme: bool,
    table: str,
) -> BudgetError:
    """The error, with what to change. Its ``enough_bytes`` is a budget with which the program gets past this.

    Args:
        viewed: offsets of memory that was given back while the program has views of it.
        together: blocks that the running operation needs at once; the budget that is named holds them all.
        budget_for: finds a budget for what is kept; None while there are no models yet.
    """
    what = f"{block.name} ({block.kind.name.lower()}, {block.nbytes:,} bytes)"
    budget_bytes = arena.capacity_bytes
    shared = f", which {arena.sharers} ranks of a host share" if arena.sharers > 1 else ""
    if block.room_bytes > budget_bytes:
        return BudgetError(
            f"{what} alone is larger than the budget of {budget_bytes:,} bytes: raise host_budget to at least "
            f"{arena.host_budget_of(block.room_bytes)} bytes{shared}, for this one alone.{table}",
            arena.host_budget_of(block.room_bytes),
        )
    present = list(resident)
    held = {b: hold for b in present if (hold := _why_it_stays(b, static, has_nvme)) is not None}
    unowned_bytes = arena.used_bytes - sum(b.room_bytes for b in present)
    stay_bytes = sum(b.room_bytes for b in held) + unowned_bytes
    coming = [b for b in together if b not in held and b is not block]
    coming_bytes = sum(b.room_bytes for b in coming)
    lacking_bytes = block.room_bytes - (budget_bytes - stay_bytes)
    viewed_bytes = sum(arena.size_of(offset) for offset in viewed)
    lines = [f"no room for {what}: {budget_bytes:,} bytes are budgeted and {stay_bytes:,}, in whole pages, must stay:"]
    staying = sorted(held, key=lambda b: (held[b] in (Hold.STATIC, Hold.NO_NVME), -b.room_bytes))
    for b in staying[:SHOWN_MAX]:
        lines.append(f"  {b.name} ({b.kind.name.lower()}): {b.room_bytes:,} bytes, {held[b].value}")
    if more := staying[SHOWN_MAX:]:
        lines.append(f"  and {len(more)} more: {sum(b.room_bytes for b in more):,} bytes")
    if viewed_bytes:
        lines.append(f"  memory that was given back and that the program has views of: {viewed_bytes:,} bytes")
    if unowned_bytes > viewed_bytes:
        lines.append(f"  copies of whole units, or gradients on their way: {unowned_bytes - viewed_bytes:,} bytes")
    if coming:
        lines.append(f"  and the same operation takes {len(coming)} more, which are still away: {coming_bytes:,} bytes")
    if lacking_bytes <= 0:
        enough_bytes = arena.host_budget_of(budget_bytes + block.room_bytes + coming_bytes)  # one more hole, at the end
        lines.append(
            f"Memory is fragmented: {budget_bytes - stay_bytes:,} bytes are free, or can be, but lie in pieces between "
            "what must stay. "
            + (_SYSTEM if arena.lends else _DRIVER)
            + f" raise host_budget to {enough_bytes} bytes{shared}."
        )
        return BudgetError("\n".join(lines) + table, enough_bytes)
    enough_bytes, every_view_bytes = budget_bytes + lacking_bytes + coming_bytes, 0
    if budget_for is not None:
        kept = [b for b, hold in held.items() if hold in (Hold.IN_USE, Hold.REFERRED_TO)]
        enough_bytes, every_view_bytes = budget_for([block, *kept, *coming], viewed_bytes, enough_bytes)
    enough_bytes, every_view_bytes = arena.host_budget_of(enough_bytes), arena.host_budget_of(every_view_bytes)
    lines.append(
        "Views of weights that the program keeps hold their memory, and one call (torch.cat, for example) may need "
        "many at once: drop the views, use the weights one by one,"
        if has_nvme
        else "Nothing can leave memory without NVMe: set nvme_path,"
    )
    more_bytes = enough_bytes - arena.host_budget_of(budget_bytes)
    lines.append(f"or raise host_budget by {more_bytes:,} bytes, to {enough_bytes} bytes{shared}.")
    if every_view_bytes > enough_bytes and Hold.REFERRED_TO in held.values():
        lines.append(f"(A program that keeps more views later needs more: {every_view_bytes} bytes if of all weights.)")
    return BudgetError("\n".join(lines) + table, enough_bytes)
