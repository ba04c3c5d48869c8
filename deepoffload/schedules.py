"""What changes with the step in some recipes: the share of layers that run, and the length of sequences.

Pure functions of the number of updates made so far, for a plain loop; ``initialize()`` calls them where the
configuration says ``progressive_layer_drop`` or ``curriculum_learning``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from deepoffload.errors import UsageError


def layer_drop(step: int, *, theta: float = 0.5, gamma: float = 0.001) -> float:
    """The ``pld_theta`` of the next forward: with which probability the last layer runs. It falls from 1 to ``theta``.

    Source: M. Zhang and Y. He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer
    Dropping", arXiv:2010.13369; the formula and its begin (1 for the first two updates) as in DeepSpeed's
    ``ProgressiveLayerDrop``. The paper has layer ``i`` of ``n`` run with probability ``1 - i / n * (1 - pld_theta)``.

    Args:
        step: updates made so far.
        theta: where it ends, from 0 to 1.
        gamma: how fast it falls.

    Raises:
        UsageError: an argument is out of range.
    """
    if step < 0 or not 0 <= theta <= 1 or not 0 <= gamma < math.inf:
        raise UsageError(
            f"layer_drop(step={step}, theta={theta}, gamma={gamma}): expected a step of at least 0, theta from 0 to 1 "
            "and gamma of at least 0"
        )
    return (1.0 - theta) * math.exp(-gamma * max(step - 1, 0)) + theta


def sequence_length(
    step: int,
    *,
    min_difficulty: int,
    max_difficulty: int,
    schedule_type: str,
    total_curriculum_step: int | None = None,
    difficulty_step: int | None = None,
    root_degree: float | None = None,
    difficulty: Sequence[int] = (),
    max_step: Sequence[int] = (),
) -> int:
    """To how many tokens a curriculum cuts the sequences of the next forward.

    Source: ``CurriculumScheduler`` of DeepSpeed 0.19.8, whose rule for values below ``min_difficulty`` is newer than
    the key. It counts the update that is being made: the first one is number 1. Once ``max_difficulty`` is reached, the
    length stays.

    Args:
        step: updates made so far.
        min_difficulty, max_difficulty: tokens at the beginning and at the end.
        schedule_type: ``"fixed_linear"``, ``"fixed_root"`` or ``"fixed_discrete"``.
        total_curriculum_step, difficulty_step: of the first two: updates until the end, and what every length is a
            multiple of.
        root_degree: of ``"fixed_root"``: 2 is the square root.
        difficulty, max_step: of ``"fixed_discrete"``: lengths, and the last update of each but the last one.

    Raises:
        UsageError: an argument is missing or out of range.
    """
    if min_difficulty < 1 or max_difficulty < min_difficulty:
        raise UsageError(
            f"min_difficulty = {min_difficulty} and max_difficulty = {max_difficulty}: expected whole numbers of at "
            "least 1, the second not below the first"
        )
    if schedule_type == "fixed_discrete":
        return _discrete(step + 1, min_difficulty, max_difficulty, difficulty, max_step)
    if schedule_type not in ("fixed_linear", "fixed_root"):
        raise UsageError(
            f"schedule_type = {schedule_type!r}: expected fixed_linear, fixed_root or fixed_discrete; a schedule of "
            "your own cuts the batches itself"
        )
    degree = 1.0 if schedule_type == "fixed_linear" else root_degree
    if not total_curriculum_step or not difficulty_step or not degree or degree < 0:
        raise UsageError(
            f"{schedule_type} needs schedule_config with total_curriculum_step and difficulty_step"
            f"{'' if schedule_type == 'fixed_linear' else ' and root_degree'}, all above 0"
        )
    share = (float(step + 1) / total_curriculum_step) ** (1.0 / degree)
    length = math.floor(share * (max_difficulty - min_difficulty) + min_difficulty)
    length -= length % difficulty_step
    length = max(length, -(-min_difficulty // difficulty_step) * difficulty_step)
    return min(length, max_difficulty)


def _discrete(number: int, least: int, most: int, difficulty: Sequence[int], max_step: Sequence[int]) -> int:
    if (
        not max_step
        or len(difficulty) != len(max_step) + 1
        or min(difficulty) < 1
        or list(max_step) != sorted(max_step)
    ):
        raise UsageError(
            "fixed_discrete needs schedule_config with difficulty, a list of lengths of at least 1, and max_step, a "
            "rising list that is one shorter"
        )
    if least >= most:
        return least
    place = bisect_left(max_step, number)
    # A length that no update has is not reached: one whose last update is that of the length before.
    before = (0, *max_step)
    reached = [difficulty[i] for i in range(place + 1) if i == place or max_step[i] > before[i]]
    return next((length for length in reached if length >= most), reached[-1])
