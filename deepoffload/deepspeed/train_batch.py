"""``engine.train_batch``: a whole step in one call, by which micro-batches can be run in vertical order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from deepoffload.accumulation.accumulate import LossFunction, check_loss_function, model_loss, run_micro_batches
from deepoffload.accumulation.asked import choose
from deepoffload.config import AccumulationOrder, ActivationMode, Config
from deepoffload.deepspeed.data import shared_loader
from deepoffload.deepspeed.tools import EngineTools
from deepoffload.deepspeed.utils import RepeatingLoader
from deepoffload.deepspeed.utils.timer import ThroughputTimer
from deepoffload.errors import UsageError
from deepoffload.params.torch_compiler import leave_to_python
from deepoffload.runtime.engine import Engine
from deepoffload.runtime.loop import TrainingLoop


class WholeSteps:
    """Part of :class:`~deepoffload.deepspeed.engine.TrainingEngine`."""

    module: nn.Module
    core: Engine
    loop: TrainingLoop
    _config: Config
    step: Callable[[], None]
    tput_timer: ThroughputTimer
    tools: EngineTools
    _refuse_closed: Callable[[], None]
    _loader: DataLoader[Any] | None
    _batches: RepeatingLoader | None

    def train_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        loss: LossFunction | None = None,
        order: str | None = None,
        activations: str | None = None,
    ) -> Tensor:
        """Forward and backward of ``gradient_accumulation_steps()`` micro-batches, and :meth:`step`.

        It counts as that many calls of :meth:`backward` and :meth:`step`.

        Args:
            data_iter: gives micro-batches; not said: the loader that ``initialize`` made of ``training_data``, which
                starts again when it has ended; with several ranks in the same order, as their sampler gives it.
            loss: of the engine and one micro-batch; not said: as in :func:`deepoffload.accumulate`.
            order, activations: as there; not said: those of the configuration. The numbers are the same
                (docs/accumulation.md).

        Returns:
            The mean of the losses, detached.

        Raises:
            UsageError: there is no optimizer or no data, ``data_iter`` ends early, or an update is not complete.
                Nothing has changed then. Else as :func:`deepoffload.accumulate` and :meth:`step`.
            ClosedError: the engine was destroyed.
        """
        self._refuse_closed()
        check_loss_function(loss)
        choose(AccumulationOrder, "order", order, AccumulationOrder.AUTO, "engine.train_batch")
        choose(ActivationMode, "activations", activations, ActivationMode.AUTO, "engine.train_batch")
        count = self.loop.begin_whole_step()
        batches = self._draw(data_iter, count)
        before, start = dict(self.tput_timer.seconds), time.perf_counter()

        def loss_of(_: Any, batch: Any) -> Tensor:
            return (loss or model_loss)(self, batch)

        try:
            order = "horizontal" if self.tools.profiles_now() else order
            losses = run_micro_batches(self.module, batches, loss_of, self.loop.differentiated, order, activations)
        finally:  # the forwards of micro-batches that wait for each other are no times to be added up
            self.tput_timer.seconds.update(before, forward=before["forward"] + time.perf_counter() - start)
        self.tput_timer.start(start)
        for found in losses:
            self.tools.note_loss(found)
        self.loop.end_whole_step()
        self.step()
        return torch.stack([found.float() for found in losses]).mean()

    @property
    def training_dataloader(self) -> DataLoader[Any] | None:
        """The loader that ``initialize`` has made of ``training_data``."""
        return self._loader

    @property
    def global_samples(self) -> int | None:
        """Samples of all updates, with the present batch size; None where the configuration says none."""
        size = self._config.train_batch_size
        return None if size is None else self.loop.updates * size

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's share of ``dataset``.

        Args:
            batch_size: not said: ``train_micro_batch_size_per_gpu``.
            route: ``"train"`` shuffles, from the same seed in every run; ``"eval"`` and ``"predict"`` do not.
            data_sampler: decides instead.
            collate_fn: not said: that of ``initialize``.
            pin_memory: where there is a device.
            num_local_io_workers: processes that load; not said: none.

        Raises:
            UsageError: it is no dataset, or nobody says a batch size.
        """
        if collate_fn is None and self._loader is not None:
            collate_fn = self._loader.collate_fn
        return shared_loader(
            dataset,
            self.core,
            self._config,
            batch_size=batch_size,
            shuffled=route == "train",
            sampler=data_sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            workers=num_local_io_workers,
        )

    def _draw(self, data_iter: Iterator[Any] | None, count: int) -> list[Any]:
        if data_iter is None:
            if self._loader is None:
                raise UsageError("engine.train_batch(): initialize() was given no training_data; pass data_iter")
            data_iter = self._batches = self._batches or RepeatingLoader(self._loader)
        elif not hasattr(data_iter, "__next__"):
            raise UsageError(
                f"engine.train_batch(data_iter={type(data_iter).__name__}): it takes an iterator, which goes on where "
                "the last call has stopped: data_iter = iter(loader)"
            )
        batches: list[Any] = []
        for _ in range(count):
            try:
                batches.append(next(data_iter))
            except StopIteration:
                raise UsageError(
                    f"engine.train_batch(): the data ended after {len(batches)} of {count} micro-batches; nothing was "
                    "trained with them"
                ) from None
        return batches


leave_to_python(WholeSteps.train_batch, "a whole step runs as Python")
