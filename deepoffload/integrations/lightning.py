"""Lightning's ``Trainer`` and ``Fabric`` over a paged model::

    strategy = DeepOffloadStrategy("ds_config.json", host_budget="4GiB", nvme_path="/mnt/nvme")
    trainer = Trainer(strategy=strategy, precision="bf16-true", accelerator="cpu")

    fabric = Fabric(strategy=DeepOffloadFabricStrategy(host_budget="4GiB"), precision="bf16-true", accelerator="cpu")
    with fabric.init_module():
        model = Model()

A model that ``configure_model`` or ``init_module`` builds never exists outside of the budgets. One that was built
before is paged when the Trainer or ``fabric.setup`` gets it. Accumulation, clipping, checkpoints and resuming are
Lightning's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.strategies import SingleDeviceStrategy as SingleDeviceFabric
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ModuleNotFoundError:  # the same classes under their other name
    from lightning_fabric.plugins import TorchCheckpointIO
    from lightning_fabric.strategies import SingleDeviceStrategy as SingleDeviceFabric
    from pytorch_lightning.strategies import SingleDeviceStrategy

from deepoffload.config import Config, Precision, parse_config
from deepoffload.deepspeed.initialization import ConfigSource, page
from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.runtime.context import offload_context
from deepoffload.runtime.ranks import RankChoice

log = logging.getLogger("deepoffload")

_PRECISIONS = {"bf16-true": Precision.BF16, "16-true": Precision.FP16}
"""What Lightning converts whole models to. Others leave the weights as they are."""


def _parse(config: ConfigSource | None, keys: Mapping[str, Any]) -> Config:
    """The configuration of a strategy, which trains with one rank.

    Raises:
        ConfigError: it is wrong. UnsupportedError: a launcher has started several processes.
    """
    ranks = RankChoice().world_size
    if ranks > 1:
        raise UnsupportedError(
            f"a strategy for Lightning trains with one rank, and a launcher has started {ranks}: several ranks train "
            "in a plain loop or with deepoffload.initialize (docs/ranks.md)"
        )
    return parse_config(config, **keys)


def _settings(config: Config, plugin: Any) -> Config:
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
    return parse_config(config, precision=asked)


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


class DeepOffloadStrategy(SingleDeviceStrategy):
    """A strategy for ``Trainer``.

    Args:
        config: configuration, as for :class:`deepoffload.offload_context`.
        keys: its keys as keywords, which win over ``config``.

    Raises:
        ConfigError: the configuration is wrong. UnsupportedError: a launcher has started several processes.
    """

    strategy_name = "deepoffload"

    def __init__(self, config: ConfigSource | None = None, **keys: Any) -> None:
        self._config = _parse(config, keys)
        super().__init__(device=_device(self._config), checkpoint_io=StreamedCheckpointIO())

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """``configure_model`` builds the model within it. What was built before is paged later."""
        if next(self.lightning_module.parameters(), None) is not None:
            yield
            return
        with offload_context(_settings(self._config, self.precision_plugin)):
            yield

    def setup(self, trainer: Any) -> None:
        _check(self._config, trainer.gradient_clip_val, trainer.accumulate_grad_batches)
        page(_settings(self._config, self.precision_plugin), self.lightning_module)
        super().setup(trainer)

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


class DeepOffloadFabricStrategy(SingleDeviceFabric):
    """A strategy for ``Fabric``; arguments and errors are those of :class:`DeepOffloadStrategy`."""

    def __init__(self, config: ConfigSource | None = None, **keys: Any) -> None:
        self._config = _parse(config, keys)
        super().__init__(device=_device(self._config), checkpoint_io=StreamedCheckpointIO())

    @contextlib.contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """``fabric.init_module()`` builds the model within it."""
        with offload_context(_settings(self._config, self.precision)):
            with super().module_init_context(empty_init=empty_init):
                yield

    def setup_module(self, module: nn.Module) -> nn.Module:
        _mention_unused(self._config)
        page(_settings(self._config, self.precision), module)
        return super().setup_module(module)
