"""What the program changes in place, and with several ranks: when it may.

`[Note: edits]` Ranks see copies of what they store together. Of what its program writes to a copy, each rank keeps its
own part. A rank that comes later would find the edit in that part already, and make it once more in its copy. So the
ranks meet before an edit, when each has the copy that it will change, and after it, before any of them looks again.

What they have written must be the same, or the parts that they keep do not belong together. So they compare a checksum
of it when they meet after the edit. What the program writes past the doors, through ``param.data`` or another view, is
noticed later, on each rank at another time. Its checksums are compared at the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepoffload.copies.payload_numbers import gradients_number, weights_number
from deepoffload.params.slot import TensorSlot
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.ranks.edited import Edited


def written_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call of a function of that name writes to: its first argument (``normal_``, ``relu`` with ``inplace``),
    and what it is given as ``out``."""
    written: list[Any] = []
    if _changes_its_first(name.partition(".")[0]) or kwargs.get("inplace") is True:  # torch.ops has "mul_.Tensor"
        written += args[:1] or list(kwargs.values())[:1]  # the functions of torch.nn.init give keywords only
    if "out" in kwargs:
        written.append(kwargs["out"])
    return written


def _changes_its_first(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__invert__", "__index__"))
    return name.endswith("_")


def before_edit(slot: TensorSlot) -> None:
    """Wait until all ranks are about to edit a tensor, whose bytes are pinned. [Note: edits]

    Raises:
        RankError: not all ranks make this edit.
    """
    if _is_shared(slot):
        _meet(slot, None)


def after_edit(slot: TensorSlot) -> None:
    """Wait until all ranks have made an edit.

    Raises:
        RankError: another rank has written other values.
    """
    if _is_shared(slot):
        crc = slot.crc()
        _meet(slot, crc)
        if isinstance(slot, ParamHandle):
            slot.compared(crc)


def look_for_edits(units: Iterable[Unit]) -> None:
    """Take note of what the program has written into weights past the doors."""
    for unit in units:
        if unit.owner.changed():
            unit.owner.pager.will_change(unit.handles[0])


def _is_shared(slot: TensorSlot) -> bool:
    if isinstance(slot, ParamHandle):
        return slot.is_shared() and slot.block is not None
    return slot.pager.link is not None and isinstance(slot.unit, Unit) and slot.block is not None


def _meet(slot: TensorSlot, checksum: int | None) -> None:
    link, unit = slot.pager.link, slot.unit
    edited: Any = slot  # a parameter's handle or its gradient's slot, which both know the handle
    assert link is not None and isinstance(unit, Unit)
    number = (weights_number if isinstance(slot, ParamHandle) else gradients_number)(unit.index)
    link.meet_edit(number, Edited(unit.handles.index(edited.handle), checksum))
