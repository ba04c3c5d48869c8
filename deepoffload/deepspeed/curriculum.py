"""Sequences cut to the length that a curriculum has reached, and what a forward gets of the layers' schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from deepoffload.config import Config
from deepoffload.config.tools import curriculum_length
from deepoffload.errors import ConfigError, UsageError
from deepoffload.schedules import layer_drop

LAYER_DROP_ARGUMENTS = ("progressive_layer_drop", "pld_theta")
LENGTH_ARGUMENT = "curriculum_seqlen"


def check_schedules(config: Config, model: nn.Module) -> None:
    """Raise ConfigError where a model has to drop layers, and its forward does not take the arguments for it."""
    if config.progressive_layer_drop.enabled:
        lacking = [name for name in LAYER_DROP_ARGUMENTS if not _takes(model, name, any_name=True)]
        if lacking:
            raise ConfigError(
                f"progressive_layer_drop.enabled = true, and the forward of {type(model).__name__} takes no "
                f"{' and no '.join(lacking)}: layers are dropped by the model, which has to take "
                f"{' and '.join(LAYER_DROP_ARGUMENTS)} (by name, or **kwargs)"
            )


def refuse_schedules(config: Config, trainer: str) -> None:
    """Raise ConfigError where a trainer of somebody else's would train without schedules that are asked for."""
    for name in ("progressive_layer_drop", "curriculum_learning"):
        if getattr(config, name).enabled:
            raise ConfigError(
                f"{name}.enabled = true: ignoring it would change numbers: only the engine of initialize() changes "
                f"what the model is called with, and {trainer} calls it itself; leave the key out, and use "
                "deepoffload.schedules in your own code (docs/watching.md)"
            )


class ArgumentSchedules:
    """Changes the arguments of a training forward as the configuration says.

    Args:
        updates: how many have been made.
    """

    def __init__(self, config: Config, model: nn.Module, updates: Callable[[], int]) -> None:
        self._drop = config.progressive_layer_drop
        self._curriculum = config.curriculum_learning
        self._updates = updates
        self._cuts_itself = _takes(model, LENGTH_ARGUMENT, any_name=False)

    @property
    def theta(self) -> float | None:
        """The ``pld_theta`` of the next forward; None where no layers are dropped."""
        said = self._drop
        return layer_drop(self._updates(), theta=said.theta, gamma=said.gamma) if said.enabled else None

    @property
    def length(self) -> int | None:
        """To how many tokens the next forward is cut; None without a curriculum."""
        return curriculum_length(self._curriculum, self._updates()) if self._curriculum.enabled else None

    def applied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a training forward.

        Raises:
            UsageError: there is nothing whose length could be cut.
        """
        theta, length = self.theta, self.length
        if theta is not None:
            kwargs = {**kwargs, "progressive_layer_drop": True, "pld_theta": theta}
        if length is None:
            return args, kwargs
        if self._cuts_itself:
            return args, {**kwargs, LENGTH_ARGUMENT: length}
        return cut((args, kwargs), length)


def cut(batch: Any, length: int) -> Any:
    """A batch whose sequences are cut to ``length`` tokens; it is not changed itself.

    The first tensor with at least two dimensions has the sequences in its second one. Every tensor with as many
    elements there is cut, too: attention masks in their last two dimensions (both as long, or the last one as long and
    the other one 1), others in the second; one with a single dimension (positions) where that is not the batch's.
    Tuples, lists and mappings are looked into.

    Raises:
        UsageError: no tensor has two dimensions.
    """
    first = _first_sequences(batch)
    if first is None:
        raise UsageError(
            "curriculum_learning cuts sequences, and the engine was given no tensor of shape (batch, length, ...)"
        )
    rows, whole = first.shape[:2]
    return batch if length >= whole else _cut(batch, rows, whole, length, first)


def _cut(value: Any, rows: int, whole: int, length: int, first: Tensor) -> Any:
    if value is first and first.is_floating_point():  # embeddings, which may be as wide as the sequence is long
        return first[:, :length]
    if isinstance(value, Tensor):
        return _cut_tensor(value, rows, whole, length)
    if isinstance(value, Mapping):
        made = {key: _cut(each, rows, whole, length, first) for key, each in value.items()}
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(each, rows, whole, length, first) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(each, rows, whole, length, first) for each in value)
    return value


def _like(value: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """``made`` as the class of ``value`` has it, such as the batches of transformers."""
    try:
        return type(value)(made)  # type: ignore[call-arg]
    except TypeError:
        return made


def _cut_tensor(tensor: Tensor, rows: int, whole: int, length: int) -> Tensor:
    if tensor.ndim == 1:
        is_position = tensor.shape[0] == whole and whole != rows and not tensor.is_floating_point()
        return tensor[:length] if is_position else tensor
    if tensor.ndim >= 2 and tensor.shape[-1] == whole and (tensor.ndim > 2 or whole != rows):
        queries = tensor.shape[-2]
        if queries == whole or (queries == 1 and tensor.ndim > 2 and tensor.shape[1] != whole):
            return tensor[..., :length, :length]
    return tensor[:, :length] if tensor.ndim >= 2 and tensor.shape[1] == whole else tensor


def _first_sequences(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.ndim >= 2 else None
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((found for each in inside if (found := _first_sequences(each)) is not None), None)


def _takes(model: nn.Module, name: str, *, any_name: bool) -> bool:
    """Whether the model's forward has a parameter of that name, or (``any_name``) takes any keyword."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a forward without Python code says nothing of itself
        return any_name
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(each.name == name and each.kind in kinds for each in parameters):
        return True
    if (getattr(model.forward, "__module__", None) or "").startswith("transformers."):
        return False  # models of transformers take any keyword, and do nothing with it
    return any_name and any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
