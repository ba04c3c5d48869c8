"""Lightning's ``Trainer`` and ``Fabric`` over a paged model::

    strategy = DeepOffloadStrategy("ds_config.json", host_budget="4GiB", nvme_path="/mnt/nvme")
    trainer = Trainer(strategy=strategy, precision="bf16-true", accelerator="cpu")

    fabric = Fabric(strategy=DeepOffloadFabricStrategy(host_budget="4GiB"), precision="bf16-true", accelerator="cpu")
    with fabric.init_module():
        model = Model()

A model that ``configure_model`` or ``init_module`` builds never exists outside of the budgets. One that was built
before is paged when the Trainer or ``fabric.setup`` gets it. Accumulation, clipping, checkpoints and resuming are
Lightning's own.

Several ranks, started by ``torchrun`` or by ``devices=2``, take ``DeepOffloadRankStrategy`` or
``DeepOffloadRankFabricStrategy``: as Lightning's DDP, without the wrapper, because the ranks add the gradients up
already.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

try:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.strategies import DDPStrategy as RankFabric
    from lightning.fabric.strategies import SingleDeviceStrategy as SingleDeviceFabric
    from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy
except ModuleNotFoundError:  # the same classes under their other name
    from lightning_fabric.plugins import TorchCheckpointIO
    from lightning_fabric.strategies import DDPStrategy as RankFabric
    from lightning_fabric.strategies import SingleDeviceStrategy as SingleDeviceFabric
    from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy

from deepoffload.config import Config, Precision, parse_config
from deepoffload.deepspeed import zero
from deepoffload.deepspeed.curriculum import refuse_schedules
from deepoffload.deepspeed.initialization import ConfigSource, page
from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.runtime.context import offload_context
from deepoffload.runtime.ranks import RankChoice

log = logging.getLogger("deepoffload")

_PRECISIONS = {"bf16-true": Precision.BF16, "16-true": Precision.FP16}
"""What Lightning converts whole models to. Others leave the weights as they are."""


class _Source:
    """What a strategy is told, read with the number of ranks that there are when it is used."""

    def __init__(self, config: ConfigSource | None, keys: Mapping[str, Any]) -> None:
        self._config, self._keys = config, dict(keys)

    def check(self) -> None:
        """Raise ConfigError for what is wrong with any number of ranks; Lightning may start them later."""
        if RankChoice().world_size > 1:
            self.settings()
        else:
            parse_config(self._config, **{**self._keys, "train_batch_size": None})

    def settings(self, plugin: Any = None) -> Config:
        """The configuration, with the type that Lightning converts the model to."""
        config = parse_config(self._config, world_size=RankChoice().world_size, **self._keys)
        refuse_schedules(config, "Lightning")
        return _with_precision(config, plugin)


class _OneDevice:
    """A strategy for one rank. Lightning asks those that have these two attributes for their devices and nodes, and
    tells them those of the ``Trainer`` or ``Fabric`` when that is made. It would train on one of several otherwise."""

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            _refuse_several(type(self).__name__, f"Lightning is told devices={len(devices)}", "devices=1")

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number > 1:
            _refuse_several(type(self).__name__, f"Lightning is told num_nodes={number}", "num_nodes=1")

    _num_nodes = num_nodes  # what Fabric tells


def _refuse_ranks(kind: str) -> None:
    """Raise UnsupportedError where a launcher has started several processes."""
    ranks = RankChoice().world_size
    if ranks > 1:
        _refuse_several(kind, f"a launcher has started {ranks}")


def _refuse_several(kind: str, found: str, one: str | None = None) -> NoReturn:
    raise UnsupportedError(
        f"{kind} trains with one rank, and {found}: take {kind.replace('DeepOffload', 'DeepOffloadRank')}, with the "
        f"same arguments{'' if one is None else f', or {one}'}"
    )


def _with_precision(config: Config, plugin: Any) -> Config:
    """The configuration with the type that Lightning converts the model to, over exact fp32 masters.

    Raises:
        ConfigError: both name a type, and not the same.
    """
    named = getattr(plugin, "precision", None)
    asked = _PRECISIONS.get(str(named))
    if asked is None or config.precision is asked:
        return config
    if config.precision is not Precision.KEEP:
        raise ConfigError(
            f'precision is "{config.precision.value}" in the configuration and "{named}" in Lightning; say it once'
        )
    return parse_config(config, world_size=RankChoice().world_size, precision=asked)


def _check(config: Config, clipping: float | None, accumulation: int) -> None:
    """Compare what the configuration says with what the Trainer does.

    Raises:
        ConfigError: it clips or accumulates otherwise.
    """
    _mention_unused(config)
    differing = []
    if config.gradient_clipping is not None and config.gradient_clipping != (clipping or 0.0):
        differing.append(f"gradient_clipping = {config.gradient_clipping}, but gradient_clip_val = {clipping}")
    if config.gradient_accumulation_steps not in (1, accumulation):
        steps = config.gradient_accumulation_steps
        differing.append(f"gradient_accumulation_steps = {steps}, but accumulate_grad_batches = {accumulation}")
    if differing:
        raise ConfigError(
            f"the configuration is not what the Trainer does: {'; '.join(differing)}; say the same in both"
        )


def _mention_unused(config: Config) -> None:
    unused = [name for name in ("optimizer", "scheduler") if getattr(config, name) is not None]
    if unused:
        log.warning("%s of the configuration: not used, the program makes its own", " and ".join(unused))


def _device(config: Config) -> torch.device:
    if config.device is not None:
        return torch.device(config.device)
    return torch.accelerator.current_accelerator() or torch.device("cpu")


class StreamedCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, without a copy of one in memory: Lightning makes one when it saves and one when it
    loads. Files elsewhere than on a disk of this machine are saved and loaded as Lightning does."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            torch.save(checkpoint, unfinished)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not Path(path).is_file():
            return super().load_checkpoint(path, *args, **kwargs)
        weights_only = kwargs.get("weights_only")
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)


class _PagedTrainer:
    """What the strategies for ``Trainer`` do otherwise than Lightning's."""

    _source: _Source
    lightning_module: Any
    precision_plugin: Any
    optimizers: Any
    accelerator: Any
    checkpoint_io: Any
    _set_up: Callable[[Any], None]

    def _context(self, config: Config) -> contextlib.AbstractContextManager[Any]:
        """What builds a model."""
        return offload_context(config)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """``configure_model`` builds the model within it. What was built before is paged later."""
        if next(self.lightning_module.parameters(), None) is not None:
            yield
            return
        with self._context(self._source.settings(self.precision_plugin)):
            yield

    def setup(self, trainer: Any) -> None:
        config = self._source.settings(self.precision_plugin)
        _check(config, trainer.gradient_clip_val, trainer.accumulate_grad_batches)
        page(config, self.lightning_module)
        self._set_up(trainer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """State is loaded where it is kept, and not moved to a device afterwards."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Leaves the model and its optimizers where they are."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


class DeepOffloadStrategy(_OneDevice, _PagedTrainer, SingleDeviceStrategy):
    """A strategy for ``Trainer``.

    Args:
        config: configuration, as for :class:`deepoffload.offload_context`.
        keys: its keys as keywords, which win over ``config``.

    Raises:
        ConfigError: the configuration is wrong. UnsupportedError: a launcher has started several processes; or, when
            the ``Trainer`` is made, it has several devices or nodes.
    """

    strategy_name = "deepoffload"

    def __init__(self, config: ConfigSource | None = None, **keys: Any) -> None:
        _refuse_ranks(type(self).__name__)
        self._source = _Source(config, keys)
        super().__init__(device=_device(self._source.settings()), checkpoint_io=StreamedCheckpointIO())

    def _set_up(self, trainer: Any) -> None:
        SingleDeviceStrategy.setup(self, trainer)


class DeepOffloadRankStrategy(_PagedTrainer, DDPStrategy):
    """A strategy for ``Trainer`` on several ranks, which compute on the CPU: ``Trainer(accelerator="cpu", devices=2,
    strategy=...)``. Arguments are those of :class:`DeepOffloadStrategy`. Keys are checked at once, what concerns the
    number of ranks when they have started.

    As with DDP, a model that each rank has built for itself gets the values of rank 0.
    """

    strategy_name = "deepoffload_ranks"

    def __init__(self, config: ConfigSource | None = None, **keys: Any) -> None:
        self._source = _Source(config, keys)
        self._source.check()
        super().__init__(checkpoint_io=StreamedCheckpointIO())

    def _context(self, config: Config) -> contextlib.AbstractContextManager[Any]:
        return zero.Init(config_dict_or_path=config)

    def setup_environment(self) -> None:
        super().setup_environment()
        _say_rank(self.global_rank)
        self._source.settings(self.precision_plugin)  # an error before the model is built

    def _set_up(self, trainer: Any) -> None:
        if self._layer_sync is not None:
            raise UnsupportedError("Trainer(sync_batchnorm=True): torch synchronises batch norms on GPUs only")
        ParallelStrategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """No wrapper is put around it."""
        return model

    def teardown(self) -> None:
        super().teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()


class _PagedFabric:
    """What the strategies for ``Fabric`` do otherwise than Lightning's."""

    _source: _Source
    precision: Any

    def _context(self, config: Config) -> contextlib.AbstractContextManager[Any]:
        return offload_context(config)

    @contextlib.contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """``fabric.init_module()`` builds the model within it."""
        made: Any = super()
        with self._context(self._source.settings(self.precision)), made.module_init_context(empty_init=empty_init):
            yield

    def setup_module(self, module: nn.Module) -> nn.Module:
        """The same module, which is paged."""
        config = self._source.settings(self.precision)
        _mention_unused(config)
        page(config, module)
        return module


class DeepOffloadFabricStrategy(_OneDevice, _PagedFabric, SingleDeviceFabric):
    """A strategy for ``Fabric``; arguments and errors are those of :class:`DeepOffloadStrategy`."""

    def __init__(self, config: ConfigSource | None = None, **keys: Any) -> None:
        _refuse_ranks(type(self).__name__)
        self._source = _Source(config, keys)
        super().__init__(device=_device(self._source.settings()), checkpoint_io=StreamedCheckpointIO())


class DeepOffloadRankFabricStrategy(_PagedFabric, RankFabric):
    """A strategy for ``Fabric`` on several ranks; the rest is as with :class:`DeepOffloadRankStrategy`."""

    def __init__(self, config: ConfigSource | None = None, **keys: Any) -> None:
        self._source = _Source(config, keys)
        self._source.check()
        super().__init__(checkpoint_io=StreamedCheckpointIO())
        self._backward_sync_control = _NothingToSkip()

    def _context(self, config: Config) -> contextlib.AbstractContextManager[Any]:
        return zero.Init(config_dict_or_path=config)

    def setup_environment(self) -> None:
        super().setup_environment()
        _say_rank(self.global_rank)
        self._source.settings(self.precision)


class _NothingToSkip:
    """``fabric.no_backward_sync``: gradients of each backward are added to the ranks' mean at once."""

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _say_rank(rank: int) -> None:
    """Lightning's own launcher sets WORLD_SIZE and LOCAL_RANK, and leaves this one out."""
    if os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("RANK", str(rank))
