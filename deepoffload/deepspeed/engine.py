"""The training engine in DeepSpeed's manner: ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from deepoffload.config import Config, Precision
from deepoffload.deepspeed.checkpoints import EngineCheckpoints
from deepoffload.deepspeed.data import to_half
from deepoffload.deepspeed.engine_names import EngineNames
from deepoffload.deepspeed.engine_table import refuse_absent
from deepoffload.deepspeed.saving import EngineSaving
from deepoffload.deepspeed.tools import EngineTools
from deepoffload.deepspeed.train_batch import WholeSteps
from deepoffload.deepspeed.utils.timer import ThroughputTimer
from deepoffload.errors import ClosedError
from deepoffload.optim.loss_scale import LossScale
from deepoffload.runtime.announce import announce, progress_log
from deepoffload.runtime.engine import Engine
from deepoffload.runtime.joining import join
from deepoffload.runtime.loop import TrainingLoop
from deepoffload.timeline import Summary


class TrainingEngine(EngineNames, EngineSaving, WholeSteps):
    """A paged model with its optimizer and schedule. Made by :func:`deepoffload.initialize`.

    What is not an attribute here is looked up on the model, so ``engine.generate(...)`` and ``engine.config`` work.
    It has many methods, because DeepSpeed has many names for the same things; each is a line or two over ``loop``.

    Attributes:
        module: the model. optimizer, lr_scheduler: as in the tuple of ``initialize``; either may be None.
        core: the :class:`~deepoffload.runtime.engine.Engine` that moves the bytes.
        loop: the :class:`~deepoffload.runtime.loop.TrainingLoop` that the calls here end in.
        tools: monitors, the profile of a step, schedules of layers and data.
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
        loader: DataLoader[Any] | None = None,
    ) -> None:
        self.module = module
        self.core = core
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.loop = TrainingLoop(
            module,
            core,
            optimizer,
            lr_scheduler,
            accumulation_steps=config.gradient_accumulation_steps,
            gradient_clipping=gradient_clipping,
            loss_scale=loss_scale,
        )
        self._config = config
        self._loader, self._batches = loader, None
        self._saved_by: EngineCheckpoints | None = None
        self.tput_timer = ThroughputTimer(config.train_batch_size)
        self._is_closed = False
        self.tools = EngineTools(module, core, config, self.loop, self.tput_timer)
        core.pager.life.users.add(self)

    @property
    def device(self) -> torch.device:
        """Where the model computes, and its inputs have to be."""
        return self.core.pager.memory.device

    @property
    def world_size(self) -> int:
        """How many ranks train this model."""
        return self.core.ranks.world_size

    dp_world_size = world_size

    @property
    def global_rank(self) -> int:
        """This process's number among them."""
        return self.core.ranks.rank

    @property
    def local_rank(self) -> int:
        """Which of the ranks of its host this is; with one rank the index of its device, for scripts that move batches
        to it."""
        return self.device.index or self.core.ranks.local_rank

    # -- the step --------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. With ``fp16.auto_cast``, floating-point tensors in ``args`` become fp16 first; the
        schedules of layers and data change the arguments of training forwards (docs/watching.md)."""
        if self._config.precision is Precision.FP16 and self._config.fp16.auto_cast:
            args = to_half(args)
        if self.module.training:
            self.tput_timer.start()
            args, kwargs = self.tools.schedules.applied(args, kwargs)
        with self._timed("forward"), self.tools.forward(self.module.training):
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
        with self._timed("backward"), self.tools.backward(loss):
            return self.loop.backward(loss, retain_graph=retain_graph, take_mean=scale_wrt_gas)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step. At an accumulation boundary: clip, update, clear the gradients, advance the schedule.

        Gradients with an infinity or NaN update nothing: they are dropped and counted in ``skipped_steps``. With the
        key ``durability`` an update ends with a commit (docs/checkpoints.md), which raises what
        :meth:`TrainingState.commit` raises, after the update.

        Args:
            lr_kwargs: arguments for the schedule's own ``step``.

        Raises:
            UsageError: the engine has no optimizer; or fp16, and no :meth:`backward` has scaled the loss; or with one
                rank, no gradient has come since the last update. Nothing has changed then.
            LossScaleError: fp16 gradients overflow with the loss scale at its minimum. The step counts as skipped.
        """
        ends_update = self.loop.is_boundary
        with self._timed("step"):
            updated = self.loop.step(lr_kwargs)
        self.tput_timer.stop(global_step=ends_update)
        if updated:
            if self.core.durability is not None:
                self._checkpoints().commit()
            self._report()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the optimizer's and the model's parameters."""
        self.tools.forget_losses()
        self.loop.zero_grad(set_to_none)

    def gradient_clipping(self) -> float:
        """Largest global norm of the gradients; 0.0 is off."""
        return self.loop.gradient_clipping

    @property
    def micro_steps(self) -> int:
        """Calls of :meth:`step`."""
        return self.loop.micro_steps

    @property
    def global_steps(self) -> int:
        """Calls of :meth:`step` at a boundary, applied or skipped."""
        return self.loop.updates

    @property
    def skipped_steps(self) -> int:
        """Those of the latter whose gradients held an infinity or NaN."""
        return self.loop.skipped

    # -- accumulation ----------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when the next :meth:`step` updates."""
        return self.loop.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the steps from now on are boundaries; None goes back to counting."""
        self.loop.forced_boundary = is_boundary

    def gradient_accumulation_steps(self) -> int:
        return self._config.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per forward; None when the configuration does not say."""
        return self._config.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int | None:
        """Samples per update; None when the configuration does not say."""
        return self._config.train_batch_size

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Changes nothing. With several ranks the gradients of each backward are added to the ranks' mean at once, so
        micro-batches in it and outside of it give the same sum, in the order (micro-batch, rank). In it, too,
        ``param.grad`` is the mean over ranks, where DeepSpeed and DistributedDataParallel have this rank's own."""
        return contextlib.nullcontext()

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Within it ranks may have different numbers of batches: see :func:`deepoffload.join`. A rank without batches
        advances its schedule, loss scale and ``global_steps`` with the others."""
        return join(self.module, after_step=self.loop.count_joined_step)

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by before backward; 1.0 unless the precision is fp16."""
        return self.loop.loss_scale

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of all gradients before clipping, at the last boundary; None before the first."""
        return self.loop.grad_norm

    def was_step_applied(self) -> bool:
        """True when the last :meth:`step` updated the weights."""
        return self.loop.applied

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
        return self.core.placement.table(len(self.core.ranks.host_ranks)) if self.core.placement is not None else ""

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
        own = hasattr(type(self), name)  # a property of the engine that has raised AttributeError itself
        if own or name == "module" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"engine.{name} cannot be had" if own else name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            refuse_absent(name)
            nearest = difflib.get_close_matches(name, [known for known in dir(type(self)) if known[0] != "_"], 1)
            hint = f"; did you mean engine.{nearest[0]}?" if nearest else ""
            raise AttributeError(
                f"neither the engine nor its {type(self.module).__name__} has {name!r}{hint}"
            ) from None

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all memory, files and threads back; the parameters then raise ``ClosedError``. Idempotent.

        Models that were built in one context share these: the last of their engines that is closed gives them back.
        """
        self._is_closed = True
        self.tools.close()
        self.core.pager.life.users.discard(self)
        if not self.core.pager.life.users:
            self.core.close("the training engine was closed")

    destroy = close

    # -- telling about it ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        self._refuse_closed()
        with self.tput_timer.timed(what):
            yield

    def _refuse_closed(self) -> None:
        because = self.core.pager.life.closed_because or ("the training engine was closed" if self._is_closed else None)
        if because is not None:
            raise ClosedError(f"the training engine cannot go on: {because}")

    def _report(self) -> None:
        every = self._config.steps_per_print
        if every and self.global_steps % every == 0:
            done = f"step={self.global_steps}, skipped={self.skipped_steps}"
            announce(f"{done}, lr={self.get_lr()}, mom={self.get_mom()}", progress_log)
        if self._config.wall_clock_breakdown:
            shown = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in self.tput_timer.seconds.items())
            announce(f"step={self.global_steps}: {shown}", progress_log)
        self.tools.after_update()
        self.tput_timer.seconds = dict.fromkeys(self.tput_timer.seconds, 0.0)
