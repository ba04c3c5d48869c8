"""Weights that several ranks load together: from the same files, each rank its own part.

Nobody may gather a weight before all ranks have written their parts. So what shows weights is brought up to date when
all are through.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from deepoffload.checkpoint.own_ranges import show_again
from deepoffload.checkpoint.plain_files import PlainFile
from deepoffload.checkpoint.shard_filling import OwnPart, own_part, store_edits
from deepoffload.checkpoint.weights import Target
from deepoffload.errors import UsageError
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle
from deepoffload.ranks.joint_task import JointTask
from deepoffload.runtime.building import BuildingMemory

SAMPLES, SAMPLE_BYTES = 64, 4096
"""How much of each file is compared between ranks, spread over it: the files of one architecture have equal headers."""


def digests(files: Sequence[PlainFile]) -> Mapping[str, str]:
    """By the name of each file, what tells it from others: its length, its header, and samples of its values."""
    return {file.path.rpartition("/")[2]: _digest(file) for file in files}


def _digest(file: PlainFile) -> str:
    found = hashlib.sha256(str(file.nbytes).encode())
    with open(file.path, "rb") as content:
        found.update(content.read(file.header_bytes))
        step = max(SAMPLE_BYTES, (file.nbytes - file.header_bytes) // SAMPLES)
        for offset in range(file.header_bytes, file.nbytes, step):
            content.seek(offset)
            found.update(content.read(SAMPLE_BYTES))
    return found.hexdigest()


def refuse_other_files(task: JointTask, mine: Mapping[str, str]) -> None:
    """Raise UsageError, on all ranks, where these have other digests."""
    everybody: list[Mapping[str, str]] = task.gather(mine)
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        name = next((name for name in [*first, *theirs] if theirs.get(name) != first.get(name)), None)
        if name is not None:
            raise UsageError(f"{name} is another file on rank {rank} than on rank 0: give all ranks the same ones")


class PartsToLoad:
    """What this rank writes of weights that are going to be overwritten, by all ranks together.

    Args:
        source: says where all ranks have the values from.
    """

    def __init__(self, source: Mapping[str, str], handles: Iterable[ParamHandle]) -> None:
        self._source = hashlib.sha256(repr(sorted(source.items())).encode()).hexdigest()
        self._parts: dict[ParamHandle, OwnPart] = {}
        for handle in handles:
            part = own_part(handle)
            if part is not None:
                self._parts[handle] = part
        for unit in {id(h.unit): h.unit for h in self._parts if h.unit is not None}.values():
            store_edits(unit)

    def of(self, target: Target) -> OwnPart | None:
        """None where this rank writes all of it."""
        return self._parts.get(target) if isinstance(target, ParamHandle) else None

    def finish(self) -> None:
        """All ranks have written, or one has failed: show what is stored now."""
        for handle in self._parts:
            handle.count_update()  # graphs that have kept the old values must not go on
            handle.master_stale = True
            if isinstance(handle.memory, BuildingMemory) and handle.block is not None:
                handle.memory.loaded(handle.block, f"that of {self._source}")
        for pager in {cast(Pager, handle.pager) for handle in self._parts}:
            show_again(pager)
