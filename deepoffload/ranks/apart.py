"""What is said where ranks are at different places that can never meet, or have written different values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from deepoffload.ranks.edited import Edited
from deepoffload.ranks.rounds import ENDS, EndOf, Want, WantKind
from deepoffload.ranks.words import Whereabouts, at, end_in_words, ranks_in_words, tensor_in_words


class PeersApartError(RuntimeError):
    """Ranks wait for each other in vain. ``wants`` and ``steps`` say where every rank is, in rank order."""

    def __init__(self, wants: Sequence[Want], steps: Sequence[int]) -> None:
        super().__init__(tuple(wants))
        self.wants, self.steps = tuple(wants), tuple(steps)

    def text(self, name_of: Callable[[Want], str]) -> str:
        """What all ranks raise; ``name_of`` says what a want is of."""
        if _same_edit(self.wants):
            return differing_values(name_of(self.wants[0]), [want.content for want in self.wants])
        closed = [rank for rank, want in enumerate(self.wants) if want.kind in ENDS]
        there = {
            rank: Whereabouts(at(want, name_of), self.steps[rank])
            for rank, want in enumerate(self.wants)
            if rank not in closed
        }
        if closed:
            return self._text_at_end(closed, ", ".join(where.in_training(rank) for rank, where in there.items()))
        places = ", ".join(where.of(rank) for rank, where in there.items())
        return (
            f"ranks write to different weights or gradients, or not all of them do: {places}. All ranks make the same "
            "changes in the same places of the program, and none inside deepoffload.join; clip with the optimizer's "
            "max_grad_norm there, not with torch's clip_grad_norm_"
        )

    def _text_at_end(self, closed: list[int], places: str) -> str:
        """What all ranks raise where some are at their end, and where the others are."""
        alike: dict[tuple[EndOf, int], list[int]] = {}
        for rank in closed:
            alike.setdefault((EndOf(self.wants[rank].content), self.steps[rank]), []).append(rank)
        ended = ", ".join(end_in_words(ranks, *end) for end, ranks in alike.items())
        is_exit = any(end is not EndOf.ENGINE for end, _ in alike)
        return (
            f"{ended}, but others train on: {places}. All ranks make the same number of steps (where they have "
            "different numbers of batches: with deepoffload.join(model)), and end, or close the engine, after the "
            f"last one{'; the launcher says with which status it has ended' if is_exit else ''}"
        )


def differing_values(name: str, values: Sequence[object]) -> str:
    """What all ranks raise that have written ``values`` (or something that stands for them, in rank order) to the same
    tensor. Those that most ranks have written count as right."""
    (right, _), *_ = Counter(values).most_common(1)
    others = [rank for rank, value in enumerate(values) if value != right]
    return (
        f"{tensor_in_words(name)} was given other values on {ranks_in_words(others)} than on "
        f"{ranks_in_words([values.index(right)])}. Each rank keeps its part of what it writes, so all ranks have to "
        "write the same: seed the random numbers alike, broadcast the values from one rank, or average them before"
    )


def _same_edit(wants: Sequence[Want]) -> bool:
    """Whether all ranks have changed the same tensor."""
    if any(want.kind is not WantKind.EDIT or want.unit != wants[0].unit for want in wants):
        return False
    edits = [Edited.unpacked(want.content) for want in wants]
    return all(edit.checksum is not None and edit.tensor == edits[0].tensor for edit in edits)
