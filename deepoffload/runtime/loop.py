"""What a training loop does around a model and its optimizer: accumulate, scale, clip, skip, schedule."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import LossScaleError, UsageError
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.handles import gradients_of, handle_of
from deepoffload.optim.loss_scale import LossScale
from deepoffload.optim.rank_step import EMPTY_STEP, EmptyStepError
from deepoffload.runtime.engine import Engine

log = logging.getLogger("deepoffload")


class TrainingLoop:
    """Counts micro-steps and updates the weights at accumulation boundaries.

    Args:
        core: the engine that moves the model's bytes.
        accumulation_steps: micro-steps for each update.
        gradient_clipping: largest global norm of the gradients; 0.0 is off.
        loss_scale: for fp16, else None.

    Attributes:
        micro_steps: calls of :meth:`step`. updates: those at a boundary, applied or skipped.
        skipped: those of the latter whose gradients held an infinity or NaN.
        applied: whether the last :meth:`step` updated the weights.
        grad_norm: L2 norm of all gradients before clipping, at the last boundary; None before the first.
        forced_boundary: whether the steps from now on are boundaries; None counts them.
    """

    def __init__(
        self,
        module: nn.Module,
        core: Engine,
        optimizer: torch.optim.Optimizer | None,
        schedule: Any,
        *,
        accumulation_steps: int,
        gradient_clipping: float,
        loss_scale: LossScale | None,
    ) -> None:
        self.module = module
        self.core = core
        self.optimizer = optimizer
        self.schedule = schedule
        self.accumulation_steps = accumulation_steps
        self.gradient_clipping = gradient_clipping
        self.micro_steps = 0
        self.updates = 0
        self.skipped = 0
        self.applied = False
        self.grad_norm: float | None = None
        self.forced_boundary: bool | None = None
        self._counted_from = 0
        self._scale = loss_scale
        self._scaled = False
        self._has_backward = False
        self._differentiated = False  # by calls of the loop, since the last update
        self._gradients_before = core.gradients.changes  # of any other way, when the last update had ended
        self._tell_scale()

    @property
    def is_boundary(self) -> bool:
        """True when the next :meth:`step` updates."""
        if self.forced_boundary is not None:
            return self.forced_boundary
        return (self.micro_steps - self._counted_from + 1) % self.accumulation_steps == 0

    @property
    def micro_steps_waiting(self) -> int:
        """Micro-steps that the next update consists of so far; 0 after an update, and where boundaries are forced."""
        if self.forced_boundary is not None:
            return 0
        return (self.micro_steps - self._counted_from) % self.accumulation_steps

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by before backward; 1.0 unless the precision is fp16."""
        return 1.0 if self._scale is None else self._scale.value

    def backward(self, loss: Tensor, *, retain_graph: bool, take_mean: bool) -> Tensor:
        """Backward of a scalar loss. ``take_mean`` divides it by the accumulation steps.

        Returns:
            What was differentiated, before the loss scale.

        Raises:
            UsageError: ``loss`` is no scalar tensor, or has no graph.
        """
        self.core.pager.hooks.refuse_between_turns("engine.backward()")
        check_loss(loss, "engine.backward")
        self._has_backward = self._differentiated = True
        if take_mean:
            loss = mean_over(loss, self.accumulation_steps)
        self._times_scale(loss).backward(retain_graph=retain_graph)
        return loss

    def begin_whole_step(self) -> int:
        """All micro-steps of an update are about to be made at once. Returns how many.

        Raises:
            UsageError: there is no optimizer, or an update is not complete; or boundaries are not counted.
        """
        if self.optimizer is None:
            raise UsageError("engine.train_batch(): initialize() was given no optimizer, so the engine only infers")
        if self.forced_boundary is not None:
            raise UsageError(
                "engine.train_batch() makes a whole update, and set_gradient_accumulation_boundary() says when the "
                "next one is; give it None, or call backward() and step()"
            )
        if self._has_backward:
            raise UsageError(
                "engine.train_batch() after an engine.backward() without engine.step(): its gradients would be added "
                "to those of a whole update; call step() or zero_grad()"
            )
        made = (self.micro_steps - self._counted_from) % self.accumulation_steps
        if made:
            raise UsageError(
                f"engine.train_batch() in the middle of an update, of which {made} of {self.accumulation_steps} "
                "micro-steps are made"
            )
        return self.accumulation_steps

    def differentiated(self, loss: Tensor) -> Tensor:
        """What the backward of one loss of a whole step begins with."""
        self._differentiated = True
        return self._times_scale(mean_over(loss, self.accumulation_steps))

    def end_whole_step(self) -> None:
        """All its backwards are made; the next :meth:`step` updates."""
        self.micro_steps += self.accumulation_steps - 1

    def scaled(self, loss: Tensor) -> Tensor:
        """What a program that calls ``backward()`` itself differentiates: in fp16 the loss times the scale.

        Raises:
            UsageError: there is no optimizer, or ``loss`` is no scalar tensor, or has no graph.
        """
        if self.optimizer is None:
            raise UsageError("engine.scale(): initialize() was given no optimizer, so the engine only infers")
        self.core.pager.hooks.refuse_between_turns("engine.scale()")
        check_loss(loss, "engine.scale")
        self._has_backward = self._differentiated = True
        return self._times_scale(loss)

    def _times_scale(self, loss: Tensor) -> Tensor:
        early = self.core.gradients.early
        if early is not None:
            early.paused = not self.is_boundary
        speculation = self.core.gradients.speculation
        if speculation is not None:
            speculation.announce(self.is_boundary)
        if self._scale is None:
            return loss
        self._scaled = True
        return loss.float() * self._scale.value

    def set_accumulation_steps(self, steps: int) -> None:
        """Another number of micro-steps for each update, from the next one on.

        Raises:
            UsageError: micro-steps of an update that is not complete have been made.
        """
        if self.micro_steps_waiting:
            raise UsageError(
                "the number of accumulation steps cannot change in the middle of an update; change it after the "
                "engine.step() that updates"
            )
        self.accumulation_steps = steps
        self._counted_from = self.micro_steps

    def step(self, schedule_arguments: Mapping[str, Any] | None = None) -> bool:
        """End a micro-step. At a boundary: clip, update, clear the gradients, advance the schedule; True then.

        Gradients with an infinity or NaN update nothing: they are dropped and counted in ``skipped``.

        Raises:
            UsageError: there is no optimizer; or fp16, and no :meth:`backward` has scaled the loss; or no gradient has
                come since the last update, on any rank.
            LossScaleError: fp16 gradients overflow with the loss scale at its minimum. The step counts as skipped.
        """
        optimizer = self._ready_optimizer()
        self.core.pager.hooks.refuse_between_turns("engine.step()")
        self._check_arguments(schedule_arguments)
        boundary = self.is_boundary
        is_empty = boundary and self._is_without_gradients(optimizer)
        if is_empty and self.core.ranks.world_size == 1:
            raise UsageError(EMPTY_STEP)
        self.micro_steps += 1
        before, self.applied, self._has_backward = self.applied, False, False
        if not boundary:
            self._scaled = False
            return False
        try:
            with self._needing_gradients(optimizer, is_empty):
                self.applied = self._update(optimizer)
        except EmptyStepError:
            self.micro_steps -= 1
            self.applied = before
            raise UsageError(EMPTY_STEP) from None
        self.zero_grad()
        self._end_update(schedule_arguments or {})
        return True

    def count_joined_step(self) -> None:
        """This rank has no batches, and its optimizer has made a step with the other ranks. Micro-steps count from
        here."""
        if isinstance(self.optimizer, HostOptimizer):
            self.applied, self.grad_norm = self.optimizer.applied, self.optimizer.grad_norm
        self._counted_from = self.micro_steps
        self._end_update({})

    def _end_update(self, schedule_arguments: Mapping[str, Any]) -> None:
        self._scaled = self._differentiated = False
        self._gradients_before = self.core.gradients.changes
        self.updates += 1
        if self.applied:
            if self.schedule is not None:
                self.schedule.step(**schedule_arguments)
        else:
            self.skipped += 1
            log.warning(
                "step %d was skipped: its gradients hold an infinity or NaN (%d skipped so far)",
                self.updates,
                self.skipped,
            )
        if self._scale is not None:
            self._update_scale(self._scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the optimizer's and the model's parameters."""
        self._has_backward = False
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        self.module.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Counters and loss scale."""
        return {
            "micro_steps": self.micro_steps,
            "updates": self.updates,
            "skipped": self.skipped,
            "applied": self.applied,
            "grad_norm": self.grad_norm,
            "loss_scale": {} if self._scale is None else self._scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, after a boundary. A loop without a dynamic loss scale ignores it."""
        self.micro_steps = self._counted_from = int(state["micro_steps"])
        self.updates, self.skipped = int(state["updates"]), int(state["skipped"])
        self.applied, self.grad_norm = bool(state["applied"]), state["grad_norm"]
        self._scaled = False
        if self._scale is not None:
            self._scale.load_state_dict(state["loss_scale"])
        self._tell_scale()

    def _ready_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise UsageError(
                "engine.step(): initialize() was given no optimizer, so the engine only infers; pass optimizer=..., or "
                'say optimizer in the configuration, for example {"type": "AdamW", "params": {"lr": 1e-4}}'
            )
        if self._scale is not None and not self._scaled:
            raise UsageError(
                "engine.step() in fp16 without engine.backward(loss): loss.backward() does not scale the loss, and its "
                "gradients would be divided by the scale; call engine.backward(loss)"
            )
        return self.optimizer

    def _is_without_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether none has come since the last update. With several ranks the others may have what this one has not."""
        if self._differentiated or self.core.gradients.changes != self._gradients_before:
            return False
        params = (param for group in optimizer.param_groups for param in group["params"])
        return not any(map(_keeps_gradient, params))

    @staticmethod
    @contextlib.contextmanager
    def _needing_gradients(optimizer: torch.optim.Optimizer, needs: bool) -> Iterator[None]:
        """The ranks find out together whether one of them has gradients."""
        if not isinstance(optimizer, HostOptimizer):
            yield
            return
        optimizer.needs_gradients = needs
        try:
            yield
        finally:
            optimizer.needs_gradients = False

    def _check_arguments(self, said: object) -> None:
        """Before the update: an error of the schedule would come after it."""
        if said is None:
            return
        if not isinstance(said, Mapping):
            raise UsageError(f"engine.step(lr_kwargs=...) takes a dict, not a {type(said).__name__}")
        if self.schedule is not None:
            try:
                inspect.signature(self.schedule.step).bind(**said)
            except TypeError as error:
                name = type(self.schedule).__name__
                raise UsageError(f"engine.step(lr_kwargs=...): {name}.step does not take these: {error}") from None

    def _update(self, optimizer: torch.optim.Optimizer) -> bool:
        if isinstance(optimizer, HostOptimizer):
            with self._unscaling(optimizer):
                optimizer.step()
            self.grad_norm = optimizer.grad_norm
            return optimizer.applied
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if self.gradient_clipping > 0:
            norm = torch.nn.utils.clip_grad_norm_(params, self.gradient_clipping)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        self.grad_norm = float(norm)
        if not math.isfinite(self.grad_norm):
            return False
        optimizer.step()
        return True

    @contextlib.contextmanager
    def _unscaling(self, optimizer: HostOptimizer) -> Iterator[None]:
        """Tell the optimizer what the gradients were scaled by, as ``torch.amp.GradScaler`` does."""
        if self._scale is None:
            yield
            return
        optimizer.grad_scale = self._scale.value
        try:
            yield
        finally:
            del optimizer.grad_scale

    def _update_scale(self, scale: LossScale) -> None:
        before = scale.value
        try:
            scale.update(overflow=not self.applied)
        except LossScaleError as error:
            raise LossScaleError(f"step {self.updates}: {error}") from None
        finally:
            self._tell_scale()
        if scale.value != before:
            log.info("step %d: loss scale %g becomes %g", self.updates, before, scale.value)

    def _tell_scale(self) -> None:
        """Scripts written for DeepSpeed read the scale from the optimizer."""
        if isinstance(self.optimizer, HostOptimizer):
            self.optimizer.loss_scale = self.loss_scale


def mean_over(loss: Tensor, count: int) -> Tensor:
    """One of ``count`` losses, so that the gradients of all add up to those of their mean. In fp32 at least."""
    if count == 1:
        return loss
    return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) / count


def check_loss(loss: object, call: str, remedy: str = "reduce the loss first") -> None:
    """Raise UsageError where ``loss`` is no scalar tensor, or has no graph. ``call`` names who was given it."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"{call} takes a tensor with one number, not {shown}; {remedy}")
    if not loss.requires_grad:
        raise UsageError(f"{call}: the loss has no graph (computed under no_grad, detached, or all weights are frozen)")


def _keeps_gradient(param: Tensor) -> bool:
    """Whether autograd keeps a gradient of it: one that is not paged, or of a type that does not land."""
    handle = handle_of(param)
    return param.grad is not None if handle is None else gradients_of(handle.pager).present(handle)
