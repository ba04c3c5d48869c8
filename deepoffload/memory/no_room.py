"""What to tell the user when the budget does not hold a block."""

from __future__ import annotations

from collections.abc import Mapping

from deepoffload.memory.block import Block

SHOWN_MAX = 8


def no_room(block: Block, room_bytes: int, capacity_bytes: int, held: Mapping[Block, str], has_nvme: bool) -> str:
    """The message, with what to change.

    Args:
        room_bytes: what ``block`` takes.
        held: the blocks that cannot leave, and why each cannot.
    """
    what = f"{block.name} ({block.kind.name.lower()}, {block.nbytes:,} bytes)"
    if room_bytes > capacity_bytes:
        return (
            f"{what} alone is larger than the budget of {capacity_bytes:,} bytes. A step needs the largest weight, its "
            f"gradient and pieces of its optimizer state at once: raise host_budget to {3 * block.nbytes:,} bytes or "
            "more."
        )
    if not has_nvme:
        return (
            f"no room for {what}: the budget is {capacity_bytes:,} bytes and nothing can leave memory without NVMe; "
            "set nvme_path, or raise host_budget."
        )
    largest = sorted(held, key=lambda b: -b.nbytes)[:SHOWN_MAX]
    lines = "\n".join(f"  {b.name} ({b.kind.name.lower()}): {b.nbytes:,} bytes, {held[b]}" for b in largest)
    return (
        f"no room for {what}: {capacity_bytes:,} bytes are budgeted and {sum(b.nbytes for b in held):,} must stay:\n"
        f"{lines}\n"
        "Views of weights that the program keeps hold their memory, and one call (torch.cat, say) may need many at "
        "once: drop the views, use the weights one by one, or raise host_budget."
    )
