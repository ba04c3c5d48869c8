"""How much is updated inside backward on a guess (``step_overlap="speculative"``), and when not at all.

A unit whose update is deferred moves its state during forward, one that is updated on a guess during backward. The disk
is never idle where each phase has a share of the bytes like its share of the time. So :class:`BackwardShare` looks at
which of the two phases waits for the disk. :class:`Trust` counts how often guesses were wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SHARE_STEP = 1 / 8
"""The share changes by so much."""

FIRST_SHARE = 1 / 2
"""Backward takes about two thirds of the time, and keeps what it changes twice."""

FIRST_SHARE_ON_DEVICE = 0.6
"""The same where a device computes: the host lands gradients during backward, and to keep what a guess changes takes no
time. With U and L seconds of updates and landings both phases are as long if this is 2/3 - L / 3U."""

ROOM_MARGIN = 1.25
"""So much of what a guess needs must be free or able to leave, since holes may be too small."""

IDLE_WAIT = 0.02
"""A phase that waits for less than this part of the step leaves the disk idle at times."""

LONG_WAIT = 0.05
"""A phase that waits for more than this part of the step could do with fewer bytes."""

PAYS_FROM_WAIT = 0.3
"""Where guesses are not asked for, they begin when forward waits for this part of the step. (Of 319 M parameters on two
cores: where forward waits for .55 of the step, guesses save .12 to .19 of it; where it waits for .18, nothing, since
the cores have no time left for the copies that guesses keep.)"""

STEPS_TO_SETTLE = 3
"""After a change the first steps are not looked at: the order of uses is learned again."""

STEPS_COMPARED = 5
"""The median of so many steps says how long steps take."""

LEAST_GAIN = 0.02
"""Guesses that nobody asked for make steps shorter by this part at least, or end."""

FIRST_REST_STEPS, LONGEST_REST_STEPS = 100, 3200
"""Where they end for that, they begin again after so many steps at the earliest; each time twice as many."""

WEIGHT_OF_A_STEP = 1 / 8
"""Of the last step in the running share of wrong guesses."""

GIVE_UP_ABOVE = 0.25
TRY_AGAIN_BELOW = 0.1
"""Shares of steps whose guess was, or would have been, wrong. A wrong guess moves its bytes for nothing, which costs
about what a right one saves; two limits, so that it does not switch at each step."""


def choose_evenly(sizes: Sequence[int], share: float) -> list[bool]:
    """Which of some units are chosen, so that everywhere in their order about ``share`` of the bytes so far are."""
    chosen, owed = [], 0.0
    for nbytes in sizes:
        owed += share * nbytes
        take = nbytes > 0 and owed >= nbytes / 2
        chosen.append(take)
        if take:
            owed -= nbytes
    return chosen


@dataclass(frozen=True)
class PhaseWaits:
    """Seconds of one step, and those in which forward and backward waited for transfers. ``forward_s`` is counted from
    the end of the step before."""

    step_s: float
    forward_s: float
    backward_s: float


def would_pay(forward_wait_s: float, step_s: float) -> bool:
    """Whether guesses would save time, by what the forward of a deferred step waits for transfers."""
    return forward_wait_s >= PAYS_FROM_WAIT * step_s


class BackwardShare:
    """The share of the state's bytes that is moved in backward.

    Args:
        asked_for: whether the user asks for guesses. Else the share begins at 0, where every update is deferred, and
            goes back to it when neither phase waits any more, or when steps have not become shorter.
        first_share: where guesses begin.

    Attributes:
        share: at the moment.
    """

    def __init__(self, *, asked_for: bool, first_share: float = FIRST_SHARE) -> None:
        self.share = first_share if asked_for else 0.0
        self._first_share = first_share
        self._least = SHARE_STEP if asked_for else 0.0
        self._settling = STEPS_TO_SETTLE
        self._leaning = 0
        self._seconds: deque[float] = deque(maxlen=STEPS_COMPARED)
        self._deferred_s: float | None = None
        self._resting, self._rest_steps = 0, FIRST_REST_STEPS

    def step_ended(self, waits: PhaseWaits) -> bool:
        """A step was confirmed. Returns whether the share changes: two steps in a row have to ask for it."""
        self._resting = max(0, self._resting - 1)
        if self._settling:
            self._settling -= 1
            return False
        self._seconds.append(waits.step_s)
        if self._has_not_paid():
            self._rest_steps, self._resting = min(2 * self._rest_steps, LONGEST_REST_STEPS), self._rest_steps
            self._change(0.0)
            return True
        towards = self._towards(waits)
        if towards == 0 or towards != self._leaning:
            self._leaning = towards
            return False
        more = towards * SHARE_STEP if self.share else self._first_share
        share = min(1.0, max(self._least, self.share + more))
        self._leaning = 0
        if share == self.share:
            return False
        if not self.share:
            self._deferred_s = median(self._seconds)
        self._change(share)
        return True

    def _change(self, share: float) -> None:
        self.share, self._settling, self._leaning = share, STEPS_TO_SETTLE, 0
        self._seconds.clear()

    def _has_not_paid(self) -> bool:
        """Whether the first steps with guesses are no shorter than the last ones without."""
        if self._deferred_s is None or not self.share or len(self._seconds) < STEPS_COMPARED:
            return False
        before_s, self._deferred_s = self._deferred_s, None
        return median(self._seconds) > (1 - LEAST_GAIN) * before_s

    def _towards(self, waits: PhaseWaits) -> int:
        """Whether the share should grow (1), shrink (-1) or stay. It stays until it is known whether guesses pay."""
        if not self.share:
            known = len(self._seconds) == STEPS_COMPARED and not self._resting
            return int(known and would_pay(waits.forward_s, waits.step_s))
        if self._deferred_s is not None:
            return 0
        idle_s, long_s = IDLE_WAIT * waits.step_s, LONG_WAIT * waits.step_s
        if waits.backward_s < idle_s and waits.forward_s > long_s:
            return 1
        if waits.forward_s < idle_s and (waits.backward_s > long_s or (waits.backward_s < idle_s and not self._least)):
            return -1
        return 0


class Trust:
    """Whether guesses are right often enough.

    Attributes:
        is_on: whether to guess.
        wrong_share: of the last steps, each weighing less than the one after it.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.wrong_share = 0.0

    def step_ended(self, *, wrong: bool) -> bool:
        """A step whose guess was wrong, or would have been. Returns whether :attr:`is_on` changes."""
        self.wrong_share += WEIGHT_OF_A_STEP * (wrong - self.wrong_share)
        before = self.is_on
        if self.is_on:
            self.is_on = self.wrong_share <= GIVE_UP_ABOVE
        else:
            self.is_on = self.wrong_share < TRY_AGAIN_BELOW
        return self.is_on is not before


class UnitPause:
    """For how many steps one unit is left alone after the program looked at it before its step was confirmed: each time
    twice as long."""

    LONGEST = 256

    def __init__(self) -> None:
        self._next = 1
        self._left = 0

    def is_over(self) -> bool:
        return self._left == 0

    def looked_at(self) -> None:
        """The guess had to be undone."""
        self._left = self._next
        self._next = min(2 * self._next, self.LONGEST)

    def step_ended(self, *, confirmed: bool) -> None:
        """``confirmed``: the unit's guess was right."""
        self._left = max(0, self._left - 1)
        if confirmed:
            self._next = max(1, self._next // 2)
