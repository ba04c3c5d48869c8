"""How errors say where a rank was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepoffload.ranks.rounds import NAMED, Want, WantKind

OUTSIDE = "outside of the model"
IN_ANOTHER_MODEL = "in a call of another model"
_AT = {
    WantKind.NOTHING: OUTSIDE,
    WantKind.REDUCE: "at reduction of",
    WantKind.WAIT: "waiting for gradients of other ranks",
    WantKind.PASS: "at the end of a backward without",
    WantKind.CLOSING: "at its end",
    WantKind.ELSEWHERE: IN_ANOTHER_MODEL,
}


def at(want: Want, name_of: Callable[[Want], str]) -> str:
    """For example "at gather of blocks.3". ``name_of`` says what a want is of."""
    if want.kind is WantKind.WAIT and want.unit > 0:
        return f"{_AT[want.kind]} for {name_of(Want(WantKind.REDUCE, want.unit - 1))}"
    words = _AT.get(want.kind, f"at {want.kind.name.lower()}" + (" of" if want.kind in NAMED else ""))
    return f"{words} {name_of(want)}" if want.kind in NAMED else words


def ranks_in_words(ranks: Sequence[int]) -> str:
    """For example "rank 1" and "ranks 1 and 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is, as it says itself.

    Attributes:
        at: the last thing that it has said in a round, in words.
        step: how many steps it has made.
        waits: whether its program waits for the others; else it computes, or waits for something that is not ours.
    """

    at: str
    step: int
    waits: bool = True

    def of(self, rank: int) -> str:
        """A sentence about that rank."""
        if self.at in (OUTSIDE, IN_ANOTHER_MODEL):
            return f"rank {rank}'s program was {self.at} (step {self.step})"
        if self.waits:
            return f"rank {rank} was {self.at} (step {self.step})"
        return f"rank {rank}'s program did not wait for other ranks, and was last {self.at} (step {self.step})"
