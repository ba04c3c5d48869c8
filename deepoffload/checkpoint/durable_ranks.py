"""Durable steps of several ranks: which one they resume from, and whether it is cut as their model is now.

Each rank keeps what it owns, in its own files. So a durable state belongs to as many ranks as have made it, and to the
cut of the model that their budget led to. A checkpoint belongs to neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from deepoffload.checkpoint.durable_source import DurableSource
from deepoffload.checkpoint.values import parse_json
from deepoffload.checkpoint.weights import handle_of
from deepoffload.errors import UsageError
from deepoffload.io.durable_store import DurableStep
from deepoffload.io.swap_space import SwapSpace
from deepoffload.ranks.joint_task import JointTask

_REMEDY = "Load a checkpoint, which every number of ranks and every budget can: state.load(directory)"
_GIVE_UP = "state.discard() gives the durable state up"


def newest_of_all(
    space: SwapSpace, left: Mapping[int, DurableStep], task: JointTask | None, *, is_first: bool
) -> int | None:
    """The newest step that an earlier run has left on every rank; None where it has left nothing, or died before all
    had their first one.

    Args:
        left: the steps on this rank. task: with several ranks, which all call this.
        is_first: this rank has never made any other step durable.

    Raises:
        UsageError: it was another number of ranks, or they have no step in common.
    """
    folder = f"the durable state in {', '.join(space.paths)}"
    mine = {step: _ranks_of(found, folder) for step, found in left.items()}
    here = (0, 1) if task is None else (task.rank, task.world_size)
    for rank, world_size in mine.values():
        if (rank, world_size) != here:
            raise UsageError(
                f"{folder} is that of rank {rank} of {world_size}, and this process is rank {here[0]} of {here[1]}: "
                f"each rank has its own part. Start {world_size} again. {_REMEDY}. {_GIVE_UP}"
            )
    told: Sequence[tuple[list[int], bool]] = [(sorted(mine), is_first)]
    told = told if task is None else task.gather(told[0])
    everybody = [steps for steps, _ in told]
    common = set(everybody[0]).intersection(*everybody)
    if not common and not all(first for steps, first in told if steps):
        there = ", ".join(f"rank {rank} {_listed(steps)}" for rank, steps in enumerate(everybody))
        raise UsageError(
            f"{folder}: there is no step that all ranks have ({there}). Its files are not those of one run, or some "
            f"are gone. {_REMEDY}. {_GIVE_UP}"
        )
    return max(common, default=None)


def _ranks_of(found: DurableStep, folder: str) -> tuple[int, int]:
    """Which rank of how many has written a step."""
    said = parse_json(found.content, folder)
    ranks = said.get("ranks", [0, 1]) if isinstance(said, dict) else None
    if not isinstance(ranks, list) or len(ranks) != 2 or not all(isinstance(number, int) for number in ranks):
        raise UsageError(f"{folder} is damaged: it does not say of which rank it is")
    return ranks[0], ranks[1]


def _listed(steps: Sequence[int]) -> str:
    return f"has {' and '.join(map(str, steps))}" if steps else "has none"


def check_same_cut(module: nn.Module, source: DurableSource) -> None:
    """Raise UsageError where this rank owns other elements now than when the step was made."""
    for name, param in module.named_parameters():
        handle, stored = handle_of(param), source.own_parts.get(name)
        if handle is None or handle.cut is None or stored is None:
            continue
        run = handle.cut.run()
        first, numel = (0, 0) if run is None else (run.start, run.numel)
        if stored.numel != numel or (numel and stored.first != first):
            raise UsageError(
                f"{source.folder} has {stored.numel} elements of {name} from {stored.first} on, and this rank owns "
                f"{numel} from {first} on: with another budget or precision the model is cut otherwise. Resume with "
                f"the settings of the run that made it. {_REMEDY}"
            )
