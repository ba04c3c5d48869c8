"""What happened when: spans on lanes, for people (a summary) and for trace viewers (Chrome's JSON format).

Recording is one append per span. Nothing here decides anything, and nobody has to hold a lock: appending to a deque is
one operation of the interpreter.
"""

from __future__ import annotations

import enum
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

SPANS_MAX = 1 << 19
"""Spans kept at most, the newest (some 60 MB; a step of a 24-layer model makes about 500)."""


class Lane(enum.Enum):
    """What a span is an instance of."""

    PROGRAM = "program"
    """Where the training program is: forward or backward of a unit, or its update. One after the other, without
    gaps."""
    PASS = "forward pass"
    """A call of a whole model, where nothing is trained: in generation a token of every sequence."""
    WAIT = "wait"
    """The program stands still for a transfer."""
    UPDATE = "update"
    """A kernel that updates a piece."""
    LANDING = "landing"
    """A kernel that takes a gradient over."""
    READ = "read"
    """A transfer from NVMe, from the first byte handed to the kernel to the last byte reported."""
    WRITE = "write"
    """A transfer to NVMe, likewise."""
    TO_DEVICE = "to device"
    """A copy to a device's memory, from when it was asked for to when its end was noticed."""
    FROM_DEVICE = "from device"
    """A copy from a device's memory, likewise."""
    GATHER = "gather"
    """This rank's shard given to a gather, from its launch to when the end of the others' reading was noticed."""
    REDUCE = "reduce"
    """Gradients of all ranks that are added up, from the launch to when they have landed."""
    ROUND = "round"
    """An exchange in which every rank says what it wants next, from when this rank has said it."""
    SLOWEST = "slowest rank"
    """What this rank has waited longer than the rank that waited least: for that rank, which names the span."""


TRANSFERS = (Lane.READ, Lane.WRITE)


class Span(NamedTuple):
    """Seconds are those of ``time.perf_counter``."""

    lane: Lane
    name: str
    begin_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True)
class Summary:
    """What the last ``steps`` steps were made of: optimizer steps, or forward passes where nothing is trained. Seconds
    are totals over these steps.

    Attributes:
        compute_s: the program's time without waits, updates and landings: forward, backward and all Python.
        backward_s: from where a backward begins to where it ends, with what is updated in it.
        disk_busy_s: when at least one transfer was on its way.
        disk_busy_in_backward_s: the part of it during backward.
        waited_for: seconds by what was waited for ("read weight", "write state", ...), the longest first.
        waited_for_ranks: of the waits, seconds that a slower rank ("rank 1") has cost this one, the longest first.
    """

    steps: int
    seconds: float
    compute_s: float
    wait_s: float
    update_s: float
    landing_s: float
    backward_s: float
    disk_busy_s: float
    disk_busy_in_backward_s: float
    read_bytes: int
    written_bytes: int
    waited_for: Mapping[str, float]
    waited_for_ranks: Mapping[str, float] = field(default_factory=dict)

    @property
    def disk_bytes_per_s(self) -> float:
        """Bytes moved per second while the disk was busy."""
        return (self.read_bytes + self.written_bytes) / self.disk_busy_s if self.disk_busy_s else 0.0

    def table(self) -> str:
        """For people: seconds per step, and what share of the step each part took."""
        if not self.steps:
            return "no whole step has been recorded"
        rows = [
            ("step", self.seconds),
            ("  compute", self.compute_s),
            ("  update", self.update_s),
            ("  landing gradients", self.landing_s),
            ("  waiting", self.wait_s),
            *((f"    {what}", seconds) for what, seconds in self.waited_for.items()),
            ("backward", self.backward_s),
            ("disk busy", self.disk_busy_s),
            ("  during backward", self.disk_busy_in_backward_s),
        ]
        lines = [f"{self.steps} steps{'':18}s per step   share"]
        lines += [f"{name:<26}{s / self.steps:>9.4f}  {s / self.seconds:>6.1%}" for name, s in rows]
        moved = f"{self.read_bytes / self.steps / 1e6:.1f} MB read, {self.written_bytes / self.steps / 1e6:.1f} written"
        lines.append(f"per step {moved}, {self.disk_bytes_per_s / 1e6:.0f} MB/s while busy")
        for rank, seconds in self.waited_for_ranks.items():
            lines.append(f"{rank} was waited for {seconds / self.seconds:.1%} of the time")
        return "\n".join(lines)


class Timeline:
    """Args:
    spans_max: how many spans are kept; older ones are dropped.
    """

    def __init__(self, spans_max: int = SPANS_MAX) -> None:
        self._spans: deque[Span] = deque(maxlen=spans_max)
        self._steps: deque[float] = deque(maxlen=spans_max)
        self._phase = ""
        self._phase_begin_s = 0.0
        self._start_s = time.perf_counter()

    # -- recording ---------------------------------------------------------------------------------------------------

    def add(self, lane: Lane, name: str, begin_s: float, end_s: float, nbytes: int = 0) -> None:
        """Record one span."""
        self._spans.append(Span(lane, name, begin_s, end_s, nbytes))

    def phase(self, name: str) -> None:
        """The program enters ``name``, and leaves where it was."""
        now = time.perf_counter()
        if self._phase:
            self._spans.append(Span(Lane.PROGRAM, self._phase, self._phase_begin_s, now, 0))
        self._phase, self._phase_begin_s = name, now

    def end_of_step(self) -> None:
        """An optimizer step was made, or a forward pass where nothing is trained: here one step ends and the next
        begins."""
        self.phase("between steps")
        self._steps.append(self._phase_begin_s)

    # -- asking ------------------------------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """A copy of what is kept, in the order of recording."""
        return list(self._spans)

    def seconds_since(self, begin_s: float) -> dict[Lane, float]:
        """Seconds by lane of the spans that have ended after ``begin_s`` (of ``time.perf_counter``)."""
        seconds = dict.fromkeys(Lane, 0.0)
        for span in reversed(self.spans()):
            if span.end_s > begin_s:
                seconds[span.lane] += span.end_s - max(span.begin_s, begin_s)
            elif span.lane is Lane.PROGRAM:  # these are recorded when they end
                break
        return seconds

    def summary(self, last_steps: int = 10) -> Summary:
        """Of the last whole steps, at most ``last_steps``; each lasts from the end of one to the end of the next. Steps
        of which spans have been dropped do not count."""
        complete_s = self._complete_from_s()
        ends = [end_s for end_s in self._steps if end_s >= complete_s][-last_steps - 1 :]
        if len(ends) < 2:
            return Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, {})
        begin_s, end_s = ends[0], ends[-1]
        inside = [span for span in self._spans if span.end_s > begin_s and span.begin_s < end_s]
        seconds = {lane: _total(span for span in inside if span.lane is lane) for lane in Lane}
        waited = _by_name(span._replace(name=span.name.partition(":")[0]) for span in inside if span.lane is Lane.WAIT)
        # A transfer counts where it ends: then every byte counts once.
        moved = [span for span in inside if span.lane in TRANSFERS and span.end_s <= end_s]
        busy = _union((max(span.begin_s, begin_s), span.end_s) for span in moved)
        backwards = [(max(begin, begin_s), min(end, end_s)) for begin, end in _backwards(inside)]
        others_s = seconds[Lane.WAIT] + seconds[Lane.UPDATE] + seconds[Lane.LANDING]
        return Summary(
            steps=len(ends) - 1,
            seconds=end_s - begin_s,
            compute_s=max(0.0, end_s - begin_s - others_s),
            wait_s=seconds[Lane.WAIT],
            update_s=seconds[Lane.UPDATE],
            landing_s=seconds[Lane.LANDING],
            backward_s=sum(end - begin for begin, end in backwards),
            disk_busy_s=busy,
            disk_busy_in_backward_s=sum(
                _union((max(span.begin_s, begin), min(span.end_s, end)) for span in moved if span.begin_s < end)
                for begin, end in backwards
            ),
            read_bytes=sum(span.nbytes for span in moved if span.lane is Lane.READ),
            written_bytes=sum(span.nbytes for span in moved if span.lane is Lane.WRITE),
            waited_for=waited,
            waited_for_ranks=_by_name(span for span in inside if span.lane is Lane.SLOWEST),
        )

    def _complete_from_s(self) -> float:
        """From when on every span is kept. Those of the program are recorded when they end, and so tell the time."""
        if len(self._spans) < (self._spans.maxlen or 0):
            return 0.0
        return next((span.end_s for span in self._spans if span.lane is Lane.PROGRAM), math.inf)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the trace event format of Chrome and Perfetto (open it at https://ui.perfetto.dev).

        Source: Nicolas Duca and Dan Sinclair, "Trace Event Format" (complete events, ``"ph": "X"``). Transfers that
        overlap get separate rows.
        """
        rows: dict[str, int] = {}
        events = []
        for lane in Lane:
            mine = sorted((span for span in self._spans if span.lane is lane), key=lambda span: span.begin_s)
            for span, number in zip(mine, _rows(mine), strict=True):
                row = lane.value if number == 0 else f"{lane.value} {number + 1}"
                events.append(
                    {
                        "name": span.name,
                        "cat": lane.value,
                        "ph": "X",
                        "ts": (span.begin_s - self._start_s) * 1e6,
                        "dur": (span.end_s - span.begin_s) * 1e6,
                        "pid": os.getpid(),
                        "tid": rows.setdefault(row, len(rows)),
                        "args": {"bytes": span.nbytes} if span.nbytes else {},
                    }
                )
        names = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": row, "args": {"name": name}}
            for name, row in rows.items()
        ]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": names + events, "displayTimeUnit": "ms"}, file)


def _total(spans: Iterable[Span]) -> float:
    return sum(span.end_s - span.begin_s for span in spans)


def _by_name(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by name, the longest first."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.end_s - span.begin_s
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _backwards(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """When each backward began and ended: updates that come in it belong to it."""
    found: list[tuple[float, float]] = []
    inside = False
    for span in spans:
        if span.lane is not Lane.PROGRAM:
            continue
        phase = span.name.partition(" ")[0]
        if phase == "backward" and not inside:
            found.append((span.begin_s, span.end_s))
        inside = phase == "backward" or (inside and phase == "update")
        if inside:
            found[-1] = (found[-1][0], span.end_s)
    return found


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    covered, end = 0.0, -1.0
    for begin, stop in sorted(intervals):
        covered += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return covered


def _rows(spans: Iterable[Span]) -> list[int]:
    """For spans in order of their begin, the first row in which each does not overlap another."""
    free_s: list[float] = []
    chosen = []
    for span in spans:
        row = next((i for i, end_s in enumerate(free_s) if end_s <= span.begin_s), len(free_s))
        if row == len(free_s):
            free_s.append(0.0)
        free_s[row] = span.end_s
        chosen.append(row)
    return chosen
