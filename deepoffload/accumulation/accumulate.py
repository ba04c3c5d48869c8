"""``deepoffload.accumulate``: forward and backward of several micro-batches, whose gradients add up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.accumulation.activations import Activations, activation_mode
from deepoffload.accumulation.call_gradients import CallGradients
from deepoffload.accumulation.caller_state import refuse_modes_of_caller
from deepoffload.accumulation.orders import runs_one_by_one, vertical_order
from deepoffload.accumulation.random_streams import RandomStreams
from deepoffload.accumulation.recomputed import second_run_differed
from deepoffload.config import ActivationMode
from deepoffload.errors import UsageError
from deepoffload.params.kept_attributes import KeptAttributes
from deepoffload.params.ports import ActivationRegion, GradientDoor
from deepoffload.params.torch_compiler import leave_to_python
from deepoffload.params.torch_private import in_backward
from deepoffload.params.unit import ParamHandle
from deepoffload.params.window import Window
from deepoffload.runtime.context import engine_of
from deepoffload.runtime.engine import Engine
from deepoffload.runtime.loop import check_loss, mean_over

log = logging.getLogger("deepoffload")

LossFunction = Callable[[Any, Any], Tensor]


def accumulate(
    model: nn.Module,
    micro_batches: Iterable[Any],
    loss: LossFunction | None = None,
    order: str | None = None,
    scale: bool = True,
    activations: str | None = None,
) -> list[Tensor]:
    """Run forward and backward of each micro-batch; the gradients add up. ``optimizer.step()`` is the caller's.

    In vertical order all micro-batches go through one unit of the model before any goes on to the next, so that weights
    are read once per step, and not once per micro-batch. The numbers are those of the ordinary order, bit for bit
    (docs/accumulation.md).

    Random numbers: one seed per micro-batch is drawn from torch's CPU generator, and each micro-batch draws from a
    separate stream, in every order; so it does from the generator of the device. A plain loop that calls
    ``torch.manual_seed`` with the same seeds draws the same.

    Args:
        model: paged, or an ordinary one, which is trained in the ordinary order.
        micro_batches: drawn completely before the first forward.
        loss: makes a scalar with a graph of the model and one micro-batch. Not said: the model is called with the
            micro-batch (a mapping: as keyword arguments; a tuple or list: as arguments), and the loss is what it
            returns, or the ``loss`` of that.
        order: ``"vertical"``, ``"horizontal"`` or ``"auto"``; not said: the configuration's ``accumulation_order``.
        scale: divide each loss by the number of micro-batches for backward.
        activations: ``"keep"``, ``"recompute"`` (a unit runs again before its backward, and what remains of its forward
            is what it was called with) or ``"auto"``; not said: the configuration's ``activations``.

    Returns:
        The losses as ``loss`` has returned them, detached, in the order of the micro-batches.

    Raises:
        UsageError: there are no micro-batches, or more than ``gradient_accumulation_steps``; a loss is no scalar with a
            graph; the loss function calls backward or step; or this is inside a forward, a backward or another
            ``accumulate``.
        UnsupportedError: the vertical order is not available here.
        Exception: what a micro-batch has raised, with its number as a note. The gradients of this call are dropped.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"accumulate takes a torch.nn.Module first, not a {type(model).__name__}")
    if not isinstance(micro_batches, Iterable):
        raise UsageError(f"accumulate: micro_batches is no iterable of them, but a {type(micro_batches).__name__}")
    if not isinstance(scale, bool):
        raise UsageError(f"accumulate(scale={scale!r}): say True (losses are divided by their number) or False")
    check_loss_function(loss)
    batches = list(micro_batches)
    _refuse_number(_engine_of(model), len(batches))

    def prepare(found: Tensor) -> Tensor:
        return mean_over(found, len(batches)) if scale else found

    return run_micro_batches(model, batches, loss, prepare, order, activations)


def run_micro_batches(
    model: nn.Module,
    batches: list[Any],
    loss: LossFunction | None,
    prepare: Callable[[Tensor], Tensor],
    order: str | None = None,
    activations: str | None = None,
) -> list[Tensor]:
    """As :func:`accumulate`. ``prepare`` makes of a loss what is differentiated."""
    engine = _engine_of(model)
    _check(engine, batches)
    vertical = vertical_order(engine, model, order, len(batches))
    mode = activation_mode(engine, activations)
    if vertical is not None:
        refuse_modes_of_caller()
    work = _Work(model, engine, batches, loss or model_loss, prepare)
    try:
        if engine is not None and vertical is not None:
            work.run_vertically(engine, mode, asked=vertical.asked)
        else:
            work.run_horizontally(mode)
    except BaseException as error:
        _note(error, work.failed_at, work.gradients.drop())
        if work.advice:
            _add_note(error, work.advice)
        if mode is not ActivationMode.KEEP and second_run_differed(error):
            _add_note(error, 'a unit could not be run again with the same result: use activations="keep"')
        raise
    finally:
        if engine is not None and engine.gradients.early is not None:
            engine.gradients.early.paused = False
        if engine is not None and engine.gradients.speculation is not None:
            engine.gradients.speculation.announce(None)  # backwards that come now may be those of any loop
        if engine is not None and engine.pager.order.attributes is not None:
            known = engine.pager.order.attributes
            if known.first is None or known.edited:  # the first forward has failed, or may have set weights up
                engine.pager.order.attributes = None
    return work.losses


def check_loss_function(loss: object) -> None:
    """Raise UsageError where a loss is given that cannot be called."""
    if loss is not None and not callable(loss):
        raise UsageError(
            f"loss is a function of the model and one micro-batch, not a {type(loss).__name__}; for example "
            "lambda model, batch: model(**batch).loss"
        )


def model_loss(model: Any, batch: Any) -> Any:
    """The loss of models that make it themselves, as those of transformers do.

    Raises:
        UsageError: what the model returns is no number, and has none as its ``loss``.
    """
    if isinstance(batch, Mapping):
        call, output = "model(**batch)", model(**batch)
    elif isinstance(batch, (tuple, list)):
        call, output = "model(*batch)", model(*batch)
    else:
        call, output = "model(batch)", model(batch)
    found: Any = output
    if not isinstance(output, Tensor):
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    if isinstance(found, Tensor):
        what = f"a {'tensor' if found is output else 'loss'} of shape {tuple(found.shape)}"
    else:
        what = f"a {type(output).__name__} without a loss"
    raise UsageError(
        f"{call} returned {what}, and training needs one number: pass loss=, a function of the model and one "
        f"micro-batch, for example loss=lambda model, batch: my_loss({call}). Models of transformers return a loss "
        'where the micro-batch has "labels"'
    )


def _engine_of(model: nn.Module) -> Engine | None:
    """None where the model is not paged."""
    try:
        return engine_of(model)
    except UsageError:
        return None


def _refuse_number(engine: Engine | None, count: int) -> None:
    steps = 1 if engine is None else engine.config.gradient_accumulation_steps
    if 1 < steps < count:
        raise UsageError(
            f"accumulate: {count} micro-batches, but the configuration says gradient_accumulation_steps = {steps}; "
            f"draw {steps}, or leave the key out"
        )


def _check(engine: Engine | None, batches: list[Any]) -> None:
    if not batches:
        raise UsageError("accumulate: there are no micro-batches")
    if in_backward():
        raise UsageError("accumulate inside a backward")
    if engine is None:
        return
    hooks = engine.pager.hooks
    if hooks.opened():
        hooks.close_stale()
    if hooks.turns is not None:
        raise UsageError("accumulate inside accumulate, or in two threads at once")
    if hooks.opened():
        raise UsageError(f"accumulate inside a forward of the model, in {hooks.opened()[-1].window.name or 'its root'}")


class _OneByOne:
    """Stands where ``accumulation.turns`` stands while micro-batches run one after the other.

    Attributes:
        running: the micro-batch that runs.
    """

    def __init__(self, activations: Activations | None) -> None:
        self._activations = activations
        self.running = 0

    def number(self) -> None:
        return None

    def enter(self, window: object, args: object, kwargs: object) -> None:
        return None

    def region(self, window: Window, module: nn.Module, args: Any, kwargs: Any) -> ActivationRegion | None:
        if self._activations is None or in_backward():
            return None
        return self._activations.region(self.running, window, module, args, kwargs)

    def leave(self, window: Window, output: object) -> None:
        if self._activations is not None and not in_backward():
            self._activations.call_ended(self.running, window)

    def land(self, param: Tensor, handle: ParamHandle, gradients: GradientDoor) -> None:
        gradients.land(param, handle)


class _Work:
    """Forward and backward of each micro-batch.

    Attributes:
        failed_at: the micro-batch that runs, or has raised.
        advice: what the program is told about that, if anything.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine | None,
        batches: list[Any],
        loss_of: LossFunction,
        prepare: Callable[[Tensor], Tensor],
    ) -> None:
        self._model, self._engine, self._batches = model, engine, batches
        self._loss_of, self._prepare = loss_of, prepare
        self._found: dict[int, Tensor] = {}
        self._changes_of_others: Callable[[int], int] = lambda number: 0
        self.gradients = CallGradients(model, engine)
        self.failed_at: int | None = None
        self.advice = ""

    @property
    def losses(self) -> list[Tensor]:
        return [self._found[number] for number in range(len(self._batches))]

    def run_vertically(self, engine: Engine, mode: ActivationMode, *, asked: bool) -> None:
        """``asked``: the program has said that it wants this order."""
        from deepoffload.accumulation.turns import Turns  # the only order that needs the package greenlet

        attributes = _attributes_of(engine, self._model)
        first_alone: Callable[[], bool] | None = None
        if attributes.first is None:
            first_alone = partial(runs_one_by_one, self._model, attributes, asked=asked)
        turns = Turns(
            engine.pager,
            engine.gradients,
            RandomStreams(len(self._batches), self._device()),
            Activations(mode, len(self._batches), engine.pager, attributes),
            len(self._batches),
            forward=self._forward,
            resumed=self._resumed,
            changes=lambda: _changes(engine),
            first_alone=first_alone,
        )
        self._changes_of_others = turns.changes_of_others
        try:
            turns.run()
        finally:
            self.failed_at, self.advice = turns.failed_at, turns.advice

    def run_horizontally(self, mode: ActivationMode) -> None:
        """Autograd keeps the activations of one micro-batch, where they are not to be computed again: those that every
        loop keeps."""
        streams = RandomStreams(len(self._batches), self._device())
        engine = self._engine
        activations = None
        if engine is not None and mode is ActivationMode.RECOMPUTE:
            activations = Activations(mode, 1, engine.pager, _attributes_of(engine, self._model))
        turns, hooks = _OneByOne(activations), None if engine is None else engine.pager.hooks
        if hooks is not None:
            hooks.turns = turns
        try:
            for number in range(len(self._batches)):
                self.failed_at = turns.running = number
                with streams.of(number):
                    loss = self._forward(number)
                    if activations is not None:
                        activations.forward_ended(number)
                    self._resumed(number)
                    loss.backward()
                    del loss
        except BaseException:
            if hooks is not None:
                hooks.close_leaked()  # torch ends no call of a module for Ctrl-C
            raise
        finally:
            if hooks is not None:
                hooks.turns = None

    def _device(self) -> torch.device:
        """On which the model computes."""
        if self._engine is not None:
            return self._engine.pager.memory.device
        return next((param.device for param in self._model.parameters()), torch.device("cpu"))

    def _forward(self, number: int) -> Tensor:
        changes = self._changes(number)
        loss = self._loss_of(self._model, self._batches[number])
        if self._changes(number) != changes:
            raise UsageError(
                "the loss function changes gradients (backward, zero_grad): accumulate calls backward itself, and "
                "optimizer.step() and zero_grad() come after it"
            )
        check_loss(
            loss, f"accumulate (micro-batch {number})", "have the function given as loss= return one, as .mean() does"
        )
        self._found[number] = loss.detach()
        return self._prepare(loss)

    def _changes(self, number: int) -> int:
        """How often a micro-batch has changed gradients, from some moment on."""
        return 0 if self._engine is None else _changes(self._engine) - self._changes_of_others(number)

    def _resumed(self, number: int) -> None:
        """The backward of a micro-batch goes on. What updates units inside backward has to know the last one."""
        if self._engine is None:
            return
        is_last = number == len(self._batches) - 1
        if self._engine.gradients.early is not None:
            self._engine.gradients.early.paused = not is_last
        if self._engine.gradients.speculation is not None:
            self._engine.gradients.speculation.announce(is_last)


def _attributes_of(engine: Engine, model: nn.Module) -> KeptAttributes:
    """What forwards of this model are known to change, or are going to show."""
    known = engine.pager.order.attributes
    if known is None or not known.is_of(model) or known.first is None:
        known = engine.pager.order.attributes = KeptAttributes(model)
    return known


def _changes(engine: Engine) -> int:
    """How often this process's program has changed gradients. Sums of several ranks land at any time."""
    return engine.gradients.changes - engine.gradients.sums_landed


def _note(error: BaseException, number: int | None, lost: bool) -> None:
    """Where it was, and what became of the gradients."""
    notes = [] if number is None else [f"deepoffload.accumulate: in micro-batch {number}"]
    notes += ["its gradients are dropped"]
    if lost:
        notes.append("and with them what the same parameters had before the call")
    _add_note(error, ", ".join(notes))


def _add_note(error: BaseException, text: str) -> None:
    """What people see below the traceback, and in an older Python in the log before it."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10 has no notes
        log.warning("%s: %s", type(error).__name__, text)


leave_to_python(accumulate, "micro-batches stop in the middle of the model, which Python has to see to")
