"""A training step without data: what memory its activations take, what it computes, and in which order it uses units.

Forward and backward run on torch's fake tensors, which have shapes and no bytes. So everything that decides the memory
of a step is the program itself: checkpointing, precision, the loss, everything that the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from deepoffload.errors import UsageError
from deepoffload.estimate.fake_maker import FakeMaker
from deepoffload.estimate.kernels import Kernels, KnownCalls
from deepoffload.estimate.recomputed import recomputed
from deepoffload.estimate.recording import DryRun, Recording
from deepoffload.estimate.tracker import Fakes, LoopSeen, Tracker
from deepoffload.params.torch_private import (
    depends_on_values,
    fake_tensors,
)
from deepoffload.runtime.compute_types import KEEP_TYPES, ComputeTypes

LossOf = Callable[[Callable[..., Any]], Tensor]
"""Calls the model it is given (once, with any inputs) and returns the loss."""


def dry_run(
    model: nn.Module,
    loss_of: LossOf,
    *,
    windows: Sequence[nn.Module] = (),
    unit_of: Mapping[int, int] | None = None,
    types: ComputeTypes = KEEP_TYPES,
) -> DryRun:
    """What a forward and backward of ``model`` takes; arguments and errors as of :func:`record`."""
    return record(model, loss_of, windows=windows, unit_of=unit_of, types=types).summary()


class NeedsValues(UsageError):
    """A model cannot be run on shapes: what it does next depends on the values of a tensor (which expert a token takes,
    where a kernel is called for each expert)."""


def record(
    model: nn.Module,
    loss_of: LossOf,
    *,
    windows: Sequence[nn.Module] = (),
    unit_of: Mapping[int, int] | None = None,
    types: ComputeTypes = KEEP_TYPES,
    recompute: bool = False,
    calls_max: int | None = None,
    known: KnownCalls | None = None,
) -> Recording:
    """One forward and backward of ``model``, which may be on any device; it keeps its parameters and state.

    Args:
        loss_of: gets a callable in the place of the model.
        windows: modules whose calls begin a use of units.
        unit_of: ``id(parameter)`` to the number of its unit.
        types: what parameters and buffers compute in; not said: in what they have.
        recompute: ``windows`` run again in backward, and keep nothing else but what they are called with.
        calls_max: how often one visit of the forward may call one kernel with tensors of the same shapes.
        known: what other runs of the model have found out of its kernels.

    Raises:
        NeedsValues: the model looks at values, which nobody has.
        UsageError: it cannot run for another reason, or gives no loss.
        LoopSeen: there were more calls than ``calls_max``.
    """
    with fake_tensors() as (mode, kind):
        fakes = Fakes(model, types)
        tracker = Tracker(fakes, Kernels(FakeMaker(mode, kind), known), unit_of or {}, calls_max)
        with tracker.hooked(windows), recomputed(windows if recompute else ()), tracker:
            try:
                fakes.run(model, lambda: _step(model, loss_of, tracker))
                tracker.end()
            except (UsageError, LoopSeen):
                raise
            except Exception as error:
                raise _refusal(model, error) from error
    return Recording(
        visits=tuple(tracker.visits),
        spans=tuple(tracker.spans),
        made_bytes=tracker.made_bytes,
        head_bytes=tracker.head_bytes,
        largest_chunk_bytes=tracker.largest_chunk_bytes,
        recomputes=tracker.recomputes or recompute,
        calls=tracker.calls,
    )


def _refusal(model: nn.Module, error: Exception) -> UsageError:
    name, reason = type(model).__name__, f"{type(error).__name__}: {error}".splitlines()[0]
    if depends_on_values(error):
        return NeedsValues(
            f"{name} cannot be run on shapes alone: what it computes depends on values ({reason}). Give the number of "
            "parameters, layers and the hidden size instead; the memory for weights, gradients and optimizer state is "
            "right then, seconds and activations are those of a model without experts"
        )
    return UsageError(
        f"{name} cannot be run on shapes alone ({reason}); give a loss function that suits it, or the number of "
        "parameters, layers and the hidden size instead"
    )


def _step(model: nn.Module, loss_of: LossOf, tracker: Tracker) -> None:
    loss = loss_of(model)
    if not isinstance(loss, Tensor):
        raise UsageError(f"the model gave a {type(loss).__name__} where a loss tensor was expected")
    if loss.numel() != 1:
        loss = loss.sum()
    tracker.end_forward()
    loss.backward()
