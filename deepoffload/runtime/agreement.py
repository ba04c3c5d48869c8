"""What ranks tell each other while an engine is set up: that all set up the same thing, and that none has failed.

A model that is built differently on one rank, or a rank that cannot open its disk, would show only later, as a wrong
number or as a wait that ends after minutes. So ranks compare what decides about numbers before anything is built, and
what fails on one rank fails on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepoffload.errors import DeepOffloadError, RankError, UsageError
from deepoffload.ranks.group import RankGroup
from deepoffload.ranks.leaving import text_of
from deepoffload.ranks.notices import kind_of


@dataclass(frozen=True)
class _Said:
    """One rank's message: a value, or what it has failed with: the class of the error, what it was at, and its text."""

    value: Any = None
    error: tuple[str, str, str] | None = None


class Agreement:
    """One rank's part in it. Every method is collective; with one rank there is nobody to ask.

    Args:
        group: the ranks; None with one.
    """

    def __init__(self, group: RankGroup | None) -> None:
        self.group = group
        self._failure: BaseException | None = None

    def gather(self, mine: Any, what: str) -> list[Any]:
        """What every rank gives, in rank order.

        Raises:
            DeepOffloadError: another rank has failed: its error, with the rank's number.
            RankError: another rank does not come.
        """
        return self._gather(_Said(mine), what)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A part of the set-up, which succeeds on all ranks or on none: what fails on one is raised on all, with the
        text of that rank. Other calls may stand inside."""
        try:
            yield
        except Exception as error:
            if error is not self._failure:
                self.tell(error, what)
            raise
        self.gather(None, what)

    def compare(self, facts: Mapping[str, str], what: str, advice: str = "", *, error: type[Exception]) -> None:
        """Raise ``error``, with the same text on all ranks, where a rank has other facts than rank 0. It names the
        first one that differs.

        Args:
            facts: by name, in an order that ranks with the same facts have.
            what: they are, for example ``"the configuration"``.
        """
        if self.group is None:
            return
        mine = list(facts.items())
        digest = hashlib.sha256(repr(mine).encode()).hexdigest()
        if len(set(self.gather(digest, f"comparing {what}"))) == 1:
            return
        everybody = self.gather(mine, f"comparing {what}")
        text = f"{what} differs between ranks: {first_difference(everybody)}"
        self._failure = error(f"{text}. {advice}" if advice else text)
        raise self._failure

    def _gather(self, said: _Said, what: str) -> list[Any]:
        if self.group is None:
            return [said.value]
        if self._failure is not None:
            raise self._failure
        try:
            everybody: list[_Said] = self.group.gather_objects(said, what)
        except RankError as error:
            self._failure = error
            raise
        failed = {rank: each.error for rank, each in enumerate(everybody) if each.error is not None}
        if failed and said.error is None:
            rank, (name, at, text) = next(iter(failed.items()))
            self._failure = kind_of(name)(f"rank {rank} has failed at {at}: {text}")
            raise self._failure
        return [each.value for each in everybody]

    def tell(self, error: Exception, what: str) -> None:
        """Let the others raise what this rank has failed with. They hear it at the next thing that they ask."""
        if self.group is None or self._failure is not None:
            return
        try:
            self._gather(_Said(error=(type(error).__name__, what, told_of(error))), what)
        except RankError:
            pass  # they are gone; what is raised here says what has happened first
        self._failure = error


def told_of(error: Exception) -> str:
    """What other ranks are told of it, who raise one of the same class where it is one of ours."""
    return f"{error}" if isinstance(error, DeepOffloadError) else text_of(error)


def first_difference(everybody: list[list[tuple[str, str]]]) -> str:
    """The first fact in which a rank differs from rank 0, with its number."""
    first = dict(everybody[0])
    for rank, facts in enumerate(everybody[1:], start=1):
        theirs = dict(facts)
        for name, value in first.items():
            if name not in theirs:
                other = next((other for other in theirs if other not in first and _is_part(name, other)), None)
                if other is not None:
                    return f"{name} is {value} on rank 0, and {other} is {theirs[other]} on rank {rank}"
                return f"rank {rank} has no {name}"
            if theirs[name] != value:
                return f"{name} is {value} on rank 0 and {theirs[name]} on rank {rank}"
        for name in theirs:
            if name not in first:
                return f"rank {rank} has {name}, and rank 0 has not"
        if list(theirs) != list(first):
            name = next(one for one, other in zip(first, theirs, strict=True) if one != other)
            return f"rank {rank} has {name} at another place in the order"
    raise UsageError("there is no difference")


def _is_part(name: str, other: str) -> bool:
    """Whether one names a part of what the other one names as a whole, such as a section that is not set."""
    return name.startswith(f"{other}.") or other.startswith(f"{name}.")
