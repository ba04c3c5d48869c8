"""``deepoffload.join``: ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from deepoffload.copies.rank_link import RankLink
from deepoffload.optim.joined_steps import JoinedSteps
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.runtime.context import engine_of


@contextmanager
def join(model: nn.Module, *, after_step: Callable[[], object] | None = None) -> Iterator[None]:
    """Train inside it where ranks may have different numbers of batches, also none.

    ``with deepoffload.join(model): for batch in loader: ...``. A rank that comes to the end of the block serves the
    others, and makes their optimizer steps with them, until all ranks are at the end. All ranks use it, in the same
    places. With one rank it does nothing.

    Gradients stay sums over the ranks that have batches, divided by the number of all ranks, as torch's ``Join`` does
    with ``divide_by_initial_world_size=True``. When the block ends, gradients that have made a step are cleared.

    Args:
        after_step: called on a rank without batches after each step that it makes with the others, for what the loop
            does there, such as ``scheduler.step``. The settings of the optimizer's groups come from the others.

    Raises:
        UnsupportedError: no optimizer of deepoffload's has the model's parameters.
        UsageError: the model is not paged; or, on all ranks, a step cannot be made on ranks without batches: the
            program keeps its gradients from step to step, or changes them or the weights.
        RankError: another rank has failed, inside the block or later.
    """
    engine = engine_of(model)
    link, gradients = engine.link, engine.gradients
    if link is None or not isinstance(gradients, RankGradients):
        yield
        return
    steps = JoinedSteps(engine.pager, gradients)
    try:
        yield
        steps.make(after_step)
    except BaseException as error:
        _tell(link, error)
        raise


def _tell(link: RankLink, error: BaseException) -> None:
    """The other ranks must not wait for one that will not come to the end of the block."""
    if not link.rounds.has_failed:
        link.fail(f"{type(error).__name__}: {error}, inside deepoffload.join")
