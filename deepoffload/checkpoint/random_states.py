"""The states of random number generators: torch's on the CPU and on devices, numpy's, Python's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from deepoffload.checkpoint.values import clipped
from deepoffload.errors import UsageError


def random_states(devices: Iterable[torch.device]) -> dict[str, Any]:
    """All of them, as values that a checkpoint holds. ``devices``: those of the model, without the CPU."""
    state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = state
    return {
        "python": random.getstate(),
        "numpy": (str(kind), keys.astype("<u4").tobytes(), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "devices": {str(device): torch.get_device_module(device).get_rng_state(device) for device in devices},
    }


def checked_random_states(states: Any) -> dict[str, Any]:
    """Try states that were loaded on throwaway generators; changes nothing.

    Raises:
        UsageError: they are damaged.
    """
    try:
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(_of_numpy(states))
        torch.Generator().set_state(states["torch"])
        if not all(isinstance(state, torch.Tensor) for state in states["devices"].values()):
            raise TypeError("the state of a device is no tensor")
        return dict(states)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise UsageError(f"the random states of the checkpoint are damaged: {clipped(str(error))}") from error


def restore_random_states(states: Mapping[str, Any], devices: Iterable[torch.device]) -> None:
    """Set them. A device that the saved run did not have keeps its state.

    Args:
        states: checked ones.
    """
    random.setstate(states["python"])
    np.random.set_state(_of_numpy(states))
    torch.set_rng_state(states["torch"])
    for device in devices:
        if str(device) in states["devices"]:
            torch.get_device_module(device).set_rng_state(states["devices"][str(device)], device)


def _of_numpy(states: Mapping[str, Any]) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, gauss = states["numpy"]
    return kind, np.frombuffer(keys, dtype="<u4"), position, has_gauss, gauss
