"""``save_pretrained`` by several ranks: each writes its own ranges into one set of files, where all of them see these.

The files are those of one process. What no rank has as a range of a file (a weight that lies in another order in
memory, a buffer) rank 0 writes; it gathers what it does not have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import cast

from deepoffload.checkpoint.expressions import Part
from deepoffload.checkpoint.own_ranges import is_scattered, owned_runs
from deepoffload.checkpoint.safetensors_file import Entry, failure, header_bytes, write_at
from deepoffload.checkpoint.several_ranks import meet, of_rank_0
from deepoffload.checkpoint.shard_filling import OwnPart, own_part, store_edits
from deepoffload.checkpoint.weights import WINDOW_BYTES, WeightOpener, WeightPlan
from deepoffload.errors import IoFailure, UnsupportedError
from deepoffload.memory.block import Block
from deepoffload.params.pager import Pager
from deepoffload.params.passage import Passage
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.ranks.joint_task import JointTask

PROBE_NAME = ".probe"


def shared_directory(task: JointTask, staged: str | None) -> str | None:
    """The directory in which rank 0 makes the files, where all ranks see what it writes there; None where one does not.

    Args:
        staged: that directory on rank 0, None on the others.
    """
    mine = ("", "")
    if staged is not None:
        mine = os.path.abspath(staged), os.urandom(16).hex()
        with open(os.path.join(staged, PROBE_NAME), "x") as probe:
            probe.write(mine[1])
            probe.flush()
            os.fsync(probe.fileno())
    there, wanted = of_rank_0(task, mine)
    sees = task.gather(_content(os.path.join(there, PROBE_NAME)) == wanted)
    if staged is not None:
        os.unlink(os.path.join(staged, PROBE_NAME))
    return there if all(sees) else None


def _content(path: str) -> str:
    with suppress(OSError, UnicodeDecodeError), open(path) as probe:
        return probe.read(64)
    return ""


class RankWriter:
    """Writes what this rank has of the files of a plan.

    Args:
        opener: with which the plan was made.
        progress: told the bytes of every piece once it is written.
    """

    def __init__(
        self, task: JointTask, plan: WeightPlan, opener: WeightOpener, progress: Callable[[int], None]
    ) -> None:
        self._task = task
        self._plan = plan
        self._opener = opener
        self._progress = progress
        self._stored: set[Unit] = set()
        self._passages: dict[Pager, Passage] = {}

    def write(self, path: str, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        """Write one file, together with the other ranks.

        Raises:
            IoFailure: with the errno, path and offset. RankError, DeepOffloadError: of another rank.
        """
        header, is_first = header_bytes(entries, metadata), self._task.rank == 0
        if is_first:
            _make(path, header, len(header) + sum(entry.nbytes for entry in entries))
        meet(self._task)
        offset = len(header)
        rest: list[tuple[int, Entry]] = []
        try:
            with open(path, "r+b", buffering=0) as file:
                for entry in entries:
                    own = self._own_parts(entry)
                    if own is None:
                        rest.append((offset, entry))
                    else:
                        self._write_parts(file.fileno(), path, offset, own)
                    offset += entry.nbytes
                for begin, entry in rest if is_first else ():
                    for piece in entry.pieces():
                        begin = write_at(file.fileno(), path, begin, piece)
                        self._progress(piece.nbytes)
                os.fsync(file.fileno())
        except IoFailure:
            raise  # also of reading a weight
        except OSError as error:
            raise failure("writing", error, path, offset) from error
        meet(self._task)

    def _own_parts(self, entry: Entry) -> list[tuple[Part, OwnPart]] | None:
        """The parts of a stored tensor, if ranks have ranges of all of them."""
        try:
            parts = list(self._plan.expressions.parts(self._plan.tensors[entry.name]))
        except UnsupportedError:
            return None  # it is computed from weights
        found = []
        for part in parts:
            target = self._opener.targets[part.source.open]
            own = own_part(target) if isinstance(target, ParamHandle) and target.cut is not None else None
            if own is None or is_scattered(part.view):
                return None
            found.append((part, own))
        return found

    def _write_parts(self, descriptor: int, path: str, offset: int, parts: Iterable[tuple[Part, OwnPart]]) -> None:
        """``offset``: of the tensor in the file."""
        for part, own in parts:
            itemsize = own.handle.itemsize
            self._bring_up_to_date(own)
            tiers = own.handle.pager.tiers
            tiers.acquire(own.block)
            try:
                for element, position, numel in owned_runs(part, own.run):
                    at = offset + position * itemsize
                    for start in range(element, element + numel, WINDOW_BYTES // itemsize):
                        piece = own.stored(start, min(WINDOW_BYTES // itemsize, element + numel - start))
                        at = write_at(descriptor, path, at, piece)
                        self._progress(piece.nbytes)
            finally:
                tiers.release(own.block)
            offset += (part.stop - part.start) * itemsize

    def _bring_up_to_date(self, own: OwnPart) -> None:
        unit, pager = own.handle.unit, cast(Pager, own.handle.pager)
        if unit is not None and unit not in self._stored:
            self._stored.add(unit)
            store_edits(unit)
        if pager not in self._passages:
            self._passages[pager] = Passage(pager, self._blocks_of(pager))
        self._passages[pager].at(own.block)

    def _blocks_of(self, pager: Pager) -> Iterator[Block]:
        for target in self._opener.targets.values():
            if isinstance(target, ParamHandle) and target.pager is pager and target.block is not None:
                yield target.block


def _make(path: str, header: bytes, nbytes: int) -> None:
    """A file of its full length that begins with its header."""
    try:
        with open(path, "xb") as file:
            file.write(header)
            file.truncate(nbytes)
    except OSError as error:
        raise failure("writing", error, path, 0) from error
