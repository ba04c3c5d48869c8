"""What the program changes in place, and with several ranks: when it may.

`[Note: edits]` Ranks see copies of what they store together. Of what its program writes to a copy, each rank keeps its
own part. A rank that comes later would find the edit in that part already, and make it once more in its copy. So the
ranks meet before an edit, when each has the copy that it will change, and after it, before any of them looks again.
"""

from __future__ import annotations

from deepoffload.copies.rank_link import gradients_number, weights_number
from deepoffload.params.slot import TensorSlot
from deepoffload.params.unit import ParamHandle, Unit


def mutates(name: str) -> bool:
    """Whether a function of that name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__invert__", "__index__"))
    return name.endswith("_")


def meet_edit(slot: TensorSlot) -> None:
    """Wait for the other ranks before and after an edit of a tensor whose bytes are pinned. [Note: edits]

    Raises:
        RankError: not all ranks make this edit.
    """
    link, unit = slot.pager.link, slot.unit
    if link is None or not isinstance(unit, Unit) or slot.block is None:
        return
    if not isinstance(slot, ParamHandle):
        link.meet_edit(gradients_number(unit.index))
    elif not slot.edited_alone:
        link.meet_edit(weights_number(unit.index))
