"""How errors say where a rank was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deepoffload.ranks.rounds import ENDS, NAMED, EndOf, Want, WantKind

OUTSIDE = "outside of the model"
IN_ANOTHER_MODEL = "in a call of another model"
_AT = {
    WantKind.NOTHING: OUTSIDE,
    WantKind.REDUCE: "at reduction of",
    WantKind.WAIT: "waiting for gradients of other ranks",
    WantKind.CLOSING: "at its end",
    WantKind.AWAY: "waiting in a call that all ranks make, such as a save",
    WantKind.ELSEWHERE: IN_ANOTHER_MODEL,
}
_AT_END_OF = {EndOf.PROGRAM: "at the end of its program", EndOf.MODEL: "at the end of its model"}
_HAS_ENDED = {
    EndOf.ENGINE: ("{} has closed its engine", "{} have closed their engines"),
    EndOf.PROGRAM: ("{}'s program has ended", "the programs of {} have ended"),
    EndOf.MODEL: (
        "{} has dropped its model, or its program has ended,",
        "{} have dropped their models, or their programs have ended,",
    ),
}


def at(want: Want, name_of: Callable[[Want], str]) -> str:
    """For example "at gather of layer 'blocks.3'". ``name_of`` says what a want is of."""
    if want.kind is WantKind.WAIT and want.unit > 0:
        name = name_of(Want(WantKind.REDUCE, want.unit - 1)).removesuffix(".grad")
        return f"{_AT[want.kind]} for {layer_in_words(name)}"
    words = _AT.get(want.kind, f"at {want.kind.name.lower()}" + (" of" if want.kind in NAMED else ""))
    if want.kind in ENDS:
        return _AT_END_OF[EndOf(want.content)] if want.content else words
    if want.kind not in NAMED:
        return words
    name = name_of(want)
    return f"{words} {tensor_in_words(name) if want.kind is WantKind.EDIT else layer_in_words(name)}"


def end_in_words(ranks: Sequence[int], end: EndOf, steps: int) -> str:
    """For example "rank 1's program has ended after 1 step"."""
    said = _HAS_ENDED[end][len(ranks) > 1].format(ranks_in_words(ranks))
    return f"{said} after {steps} step{'' if steps == 1 else 's'}"


def tensor_in_words(name: str) -> str:
    """In quotes, if it is a name and no words: that of a layer may be a number."""
    return name if " " in name else f"'{name}'"


def layer_in_words(name: str) -> str:
    """For example "layer '1'": in an ``nn.Sequential`` its name alone looks like a rank's number."""
    if " " in name:
        return name
    layer = name.removesuffix(".grad")
    return f"{'gradients of ' if layer != name else ''}layer '{layer}'"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """For example "rank 1", "ranks 1 and 2", and "ranks 0, 1 and 2"."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def grouped(places: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Which ranks are at each place, in rank order."""
    found: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        found.setdefault(place, []).append(rank)
    return [(ranks, place) for place, ranks in found.items()]


def where_in_words(places: Mapping[int, str]) -> str:
    """For example "ranks 0 and 1 are at step and rank 2 is at close"."""
    said = [f"{ranks_in_words(ranks)} {'are' if ranks[1:] else 'is'} {place}" for ranks, place in grouped(places)]
    return " and ".join((", ".join(said[:-1]), said[-1])) if said[1:] else said[0]


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

    def in_training(self, rank: int) -> str:
        """A sentence about that rank, where others train no more."""
        if self.at == OUTSIDE:
            return self.of(rank)
        return f"rank {rank} is at its step number {self.step + 1} ({self.at})"

    def of(self, rank: int) -> str:
        """A sentence about that rank."""
        if self.at in (OUTSIDE, IN_ANOTHER_MODEL):
            return f"rank {rank}'s program was {self.at} (step {self.step})"
        if self.waits:
            return f"rank {rank} was {self.at} (step {self.step})"
        return f"rank {rank}'s program did not wait for other ranks, and was last {self.at} (step {self.step})"
