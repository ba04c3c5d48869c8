"""The training engine in DeepSpeed's manner: ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from deepoffload.config import Config
from deepoffload.errors import ClosedError, LossScaleError, UnsupportedError, UsageError
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.loss_scale import LossScale
from deepoffload.runtime.engine import Engine
from deepoffload.timeline import Summary

log = logging.getLogger("deepoffload")


class TrainingEngine:
    """A paged model with its optimizer and schedule. Made by :func:`deepoffload.initialize`.

    What is not an attribute here is looked up on the model, so ``engine.generate(...)`` and ``engine.config`` work.

    Attributes:
        module: the model. optimizer, lr_scheduler: as in the tuple of ``initialize``; either may be None.
        core: the :class:`~deepoffload.runtime.engine.Engine` that moves the bytes.
        gradient_clipping: largest global norm of the gradients; 0.0 is off.
        micro_steps: calls of :meth:`step`. global_steps: those at a boundary, applied or skipped.
        skipped_steps: those of the latter whose gradients held an infinity or NaN.
    """

    def __init__(
        self,
        module: nn.Module,
        core: Engine,
        config: Config,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: LRScheduler | ReduceLROnPlateau | Any | None,
        gradient_clipping: float,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.module = module
        self.core = core
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.gradient_clipping = gradient_clipping
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self._config = config
        self._loss_scale = loss_scale
        self._scaled = False
        self._boundary: bool | None = None
        self._applied = False
        self._grad_norm: float | None = None
        self._seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        self._tell_scale()

    @property
    def device(self) -> torch.device:
        """Where the model computes, and its inputs have to be."""
        return self.core.pager.memory.device

    @property
    def local_rank(self) -> int:
        """Which of the node's processes this is; the index of its device for scripts that move batches to it."""
        return self.device.index or 0

    # -- the step --------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. With ``fp16.auto_cast``, floating-point tensors in ``args`` become fp16 first."""
        if self._loss_scale is not None and self._config.fp16.auto_cast:
            args = _to_half(args)
        with self._timed("forward"):
            return self.module(*args, **kwargs)

    forward = __call__

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of ``loss`` over the accumulation steps, so that accumulated gradients are those of the mean.

        In fp16 the loss is multiplied by :attr:`loss_scale` first, and the gradients are that much too large until
        :meth:`step`.

        Args:
            loss: a scalar with a graph.
            scale_wrt_gas: False leaves the loss as it is.

        Returns:
            What was differentiated: the loss divided by ``gradient_accumulation_steps()``, as DeepSpeed returns it.

        Raises:
            UsageError: ``loss`` is no scalar tensor, or has no graph.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"engine.backward takes a tensor with one number, not {shown}; reduce the loss first")
        if not loss.requires_grad:
            raise UsageError(
                "engine.backward: the loss has no graph (computed under no_grad, detached, or all weights are frozen)"
            )
        steps = self.gradient_accumulation_steps()
        if steps > 1 and scale_wrt_gas:
            loss = (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) / steps
        early = self.core.gradients.early
        if early is not None:
            early.paused = not self.is_gradient_accumulation_boundary()
        with self._timed("backward"):
            if self._loss_scale is None:
                loss.backward(retain_graph=retain_graph)
            else:
                (loss.float() * self._loss_scale.value).backward(retain_graph=retain_graph)
                self._scaled = True
        return loss

    def step(self) -> None:
        """End a micro-step. At an accumulation boundary: clip, update, clear the gradients, advance the schedule.

        Gradients with an infinity or NaN update nothing: they are dropped and counted in ``skipped_steps``.

        Raises:
            UsageError: the engine has no optimizer; or fp16, and no :meth:`backward` has scaled the loss.
            LossScaleError: fp16 gradients overflow with the loss scale at its minimum. The step counts as skipped.
        """
        optimizer = self.optimizer
        if optimizer is None:
            raise UsageError(
                "engine.step(): initialize() was given no optimizer, so the engine only infers; pass optimizer=..., or "
                'say optimizer in the configuration, for example {"type": "AdamW", "params": {"lr": 1e-4}}'
            )
        if self._loss_scale is not None and not self._scaled:
            raise UsageError(
                "engine.step() in fp16 without engine.backward(loss): loss.backward() does not scale the loss, and its "
                "gradients would be divided by the scale; call engine.backward(loss)"
            )
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if not boundary:
            self._scaled = False
            return
        with self._timed("step"):
            self._applied = self._update(optimizer)
            self.zero_grad()
        self._scaled = False
        self.global_steps += 1
        if self._applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += 1
            log.warning(
                "step %d was skipped: its gradients hold an infinity or NaN (%d skipped so far)",
                self.global_steps,
                self.skipped_steps,
            )
        if self._loss_scale is not None:
            self._update_scale(self._loss_scale)
        self._report()

    def _update_scale(self, scale: LossScale) -> None:
        before = scale.value
        try:
            scale.update(overflow=not self._applied)
        except LossScaleError as error:
            raise LossScaleError(f"step {self.global_steps}: {error}") from None
        finally:
            self._tell_scale()
        if scale.value != before:
            log.info("step %d: loss scale %g becomes %g", self.global_steps, before, scale.value)

    def _tell_scale(self) -> None:
        """Scripts written for DeepSpeed read the scale from the optimizer."""
        if isinstance(self.optimizer, HostOptimizer):
            self.optimizer.loss_scale = self.loss_scale

    def _update(self, optimizer: torch.optim.Optimizer) -> bool:
        if isinstance(optimizer, HostOptimizer):
            with self._unscaling(optimizer):
                optimizer.step()
            self._grad_norm = optimizer.grad_norm
            return optimizer.applied
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if self.gradient_clipping > 0:
            norm = torch.nn.utils.clip_grad_norm_(params, self.gradient_clipping)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        self._grad_norm = float(norm)
        if not math.isfinite(self._grad_norm):
            return False
        optimizer.step()
        return True

    @contextlib.contextmanager
    def _unscaling(self, optimizer: HostOptimizer) -> Iterator[None]:
        """Tell the optimizer what the gradients were scaled by, as ``torch.amp.GradScaler`` does."""
        if self._loss_scale is None:
            yield
            return
        optimizer.grad_scale = self._loss_scale.value
        try:
            yield
        finally:
            del optimizer.grad_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the optimizer's and the model's parameters."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        self.module.zero_grad(set_to_none)

    # -- accumulation ----------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when the next :meth:`step` updates."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the steps from now on are boundaries; None goes back to counting."""
        self._boundary = is_boundary

    def gradient_accumulation_steps(self) -> int:
        return self._config.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per forward; None when the configuration does not say."""
        return self._config.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int | None:
        """Samples per update; None when the configuration does not say."""
        return self._config.train_batch_size

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: with one process there is nothing to synchronise."""
        return contextlib.nullcontext()

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by before backward; 1.0 unless the precision is fp16."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of all gradients before clipping, at the last boundary; None before the first."""
        return self._grad_norm

    def was_step_applied(self) -> bool:
        """True when the last :meth:`step` updated the weights."""
        return self._applied

    def get_lr(self) -> list[float]:
        """Learning rates of the parameter groups for the next update."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Momentum, or Adam's betas, of the parameter groups that have them."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def stats(self) -> dict[str, float]:
        """Numbers of the run so far: those of :meth:`Engine.stats` and the steps taken and skipped."""
        return {
            **self.core.stats(),
            "micro_steps": self.micro_steps,
            "global_steps": self.global_steps,
            "overflow_steps": self.skipped_steps,
            "loss_scale": self.loss_scale,
        }

    def summary(self, last_steps: int = 10) -> Summary:
        """What the last steps were made of; see :meth:`Engine.summary`."""
        return self.core.summary(last_steps)

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what happened when; see :meth:`Engine.export_trace`."""
        self.core.export_trace(path)

    def placement_table(self) -> str:
        """What went where and why, for people."""
        return self.core.placement.table() if self.core.placement is not None else ""

    # -- as the model ----------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> TrainingEngine:
        self.module.train(mode)
        return self

    def eval(self) -> TrainingEngine:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.module.parameters(recurse)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse)

    def __getattr__(self, name: str) -> Any:
        if name == "module" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(f"neither the engine nor its {type(self.module).__name__} has {name!r}") from None

    # -- saving and the end ----------------------------------------------------------------------------------------

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the model's own method would take all weights into memory."""
        raise UnsupportedError(
            "engine.save_pretrained: use deepoffload.save_pretrained(engine, directory), which stays inside the budget"
        )

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Refused in this version."""
        raise _no_training_checkpoints("save_checkpoint")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Refused in this version."""
        raise _no_training_checkpoints("load_checkpoint")

    def close(self) -> None:
        """Give all memory, files and threads back; the parameters then raise ``ClosedError``. Idempotent."""
        self.core.close("the training engine was closed")

    destroy = close

    # -- telling about it ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        if self.core.pager.closed_because is not None:
            raise ClosedError(f"the training engine cannot go on: {self.core.pager.closed_because}")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - start

    def _report(self) -> None:
        every = self._config.steps_per_print
        if every and self.global_steps % every == 0:
            log.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.get_mom(),
            )
        if self._config.wall_clock_breakdown:
            shown = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in self._seconds.items())
            log.info("step=%d: %s", self.global_steps, shown)
        self._seconds = dict.fromkeys(self._seconds, 0.0)


def _to_half(value: Any) -> Any:
    """Floating-point tensors in tuples, lists and dicts as fp16."""
    if isinstance(value, Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_to_half, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_half, value))
    if isinstance(value, dict):
        return {key: _to_half(item) for key, item in value.items()}
    return value


def _no_training_checkpoints(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"engine.{name}: saving and loading of the training state (with the optimizer's) is not in this version; "
        "deepoffload.save_pretrained(engine, directory) saves the weights, and from_pretrained loads them"
    )
