"""``deepspeed.checkpointing``: activation checkpoints over ``torch.utils.checkpoint``, and named random states.

What :func:`configure` says, and the random states, belong to the process: that is how these calls are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepoffload.config.source import read_source
from deepoffload.deepspeed.accelerator import get_accelerator
from deepoffload.deepspeed.names import look_up
from deepoffload.errors import ConfigError, UnsupportedError, UsageError

MODEL_PARALLEL_RNG = "model-parallel-rng"
_SEED_OFFSET = 2718
"""Added to the seed of the state that DeepSpeed's model-parallel layers draw from."""


@dataclass
class _Settings:
    """What :func:`configure` has said."""

    configured: bool = False
    on_cpu: bool = False
    number: int | None = None


_SETTINGS = _Settings()


class RandomStates:
    """Named states of the device's random numbers (``get_cuda_rng_tracker()``)."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all of them."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state that starts with ``seed``; the present one stays.

        Raises:
            UsageError: the name or the seed is in use.
        """
        if seed in self.seeds_:
            raise UsageError(f"the seed {seed} is in use already; each state needs its own")
        if name in self.states_:
            raise UsageError(f"there is a random state {name!r} already")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from a named state, which goes on; then the one before is back.

        Raises:
            UsageError: there is no such state.
        """
        if name not in self.states_:
            raise UsageError(f"there is no random state {name!r}; call add({name!r}, seed) before")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_TRACKER = RandomStates()


def get_cuda_rng_tracker() -> RandomStates:
    """The named random states of this process."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device, and a second state for layers that draw with ``get_cuda_rng_tracker().fork()``."""
    _TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _TRACKER.add(MODEL_PARALLEL_RNG, seed + _SEED_OFFSET)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how :func:`checkpoint` keeps what it saves.

    Args:
        deepspeed_config: its section ``activation_checkpointing`` says what the arguments do not.
        checkpoint_in_cpu: keep the inputs in host memory. Where the CPU computes they are there.
        partition_activations, contiguous_checkpointing, num_checkpoints, synchronize, profile: accepted. No layer is
            cut between ranks, so there is nothing to partition, and no buffer to make contiguous.

    Raises:
        UnsupportedError: ``mpu_`` cuts layers between ranks. ConfigError: the configuration.
    """
    if mpu_ is not None and mpu_.get_model_parallel_world_size() > 1:
        raise UnsupportedError("checkpointing.configure(mpu_=...): no layer is cut between ranks here; pass None")
    section: Any = {}
    if deepspeed_config is not None:
        section = read_source(deepspeed_config)[0].get("activation_checkpointing") or {}
        if not isinstance(section, dict):
            raise ConfigError("activation_checkpointing: expected an object")
    said = section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu
    if not isinstance(said, bool):
        raise ConfigError(f"activation_checkpointing.cpu_checkpointing: expected true or false, not {said!r}")
    _SETTINGS.on_cpu = said
    _SETTINGS.number = section.get("number_checkpoints") if num_checkpoints is None else num_checkpoints
    _SETTINGS.configured = True


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return _SETTINGS.configured


def set_num_layers(nlayers: int) -> None:
    """Accepted; nothing is cut by it."""
    _SETTINGS.number = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Accepted; there is nothing to partition."""


def reset() -> None:
    """Nothing to do: no buffers are kept between checkpoints."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, computed again in backward instead of keeping what is inside.

    torch's non-reentrant checkpoint: it also works where no input needs a gradient. Random numbers are the same the
    second time, those of the tracker too.
    """
    saved = _kept_on_cpu() if _SETTINGS.on_cpu else contextlib.nullcontext()
    with saved:
        return torch_checkpoint(function, *args, use_reentrant=False, context_fn=_tracked, **kwargs)


non_reentrant_checkpoint = checkpoint


def _kept_on_cpu() -> Any:
    """Where a device computes, what autograd saves goes to host memory."""
    device = get_accelerator().device_name()
    return contextlib.nullcontext() if device == "cpu" else torch.autograd.graph.save_on_cpu()


def _tracked() -> tuple[Any, Any]:
    """The contexts of the first and the second computation: the second starts with the tracker's states of the
    first."""
    states = _TRACKER.get_states()
    return contextlib.nullcontext(), _with_states(states)


@contextlib.contextmanager
def _with_states(states: dict[str, Tensor]) -> Iterator[None]:
    now = _TRACKER.get_states()
    _TRACKER.set_states(states)
    try:
        yield
    finally:
        _TRACKER.set_states(now)


def __getattr__(name: str) -> Any:
    from deepoffload.deepspeed.package_table import PACKAGE_NAMES

    return look_up(PACKAGE_NAMES, f"checkpointing.{name}", __name__)
