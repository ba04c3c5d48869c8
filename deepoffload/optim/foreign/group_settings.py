"""Settings of groups that a step changes, such as a count of steps: changed once per step, not once per parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepoffload.optim.foreign.maker import Group, Maker, settings_of
from deepoffload.optim.foreign.state_form import same_setting, same_settings, untouched_random_numbers

_EXTENT = 2


class SettingsSteps:
    """A step is decided on before it is made, so what it makes of the settings is found by a step over a small tensor.
    Each real one is compared with it."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._small: dict[int, torch.optim.Optimizer] = {}
        self._tried: dict[int, Group] = {}

    def try_out(self, group: Mapping[str, Any]) -> None:
        """A step over a small tensor with settings that have changed: what the class raises for them, it raises before
        anything of a step is made.

        Raises:
            ValueError: a setting is NaN. Also what the class raises.
        """
        for key, value in settings_of(group).items():
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"{key} must be a number, got {value}")
        now = settings_of(group)
        tried = self._tried.get(id(group))
        if tried is None or not same_settings(tried, now):
            with untouched_random_numbers():
                optimizer = self._over_small(group)
                optimizer.param_groups[0]["params"][0].grad = torch.ones_like(optimizer.param_groups[0]["params"][0])
                optimizer.step()
            self._tried[id(group)] = now

    def _over_small(self, group: Mapping[str, Any]) -> torch.optim.Optimizer:
        shape = (_EXTENT,) * (group["params"][0].dim() if group["params"] else 1)
        param = nn.Parameter(torch.ones(shape, dtype=torch.float32, device="cpu"))
        return self._maker.fresh(param, settings_of(group))

    def after(self, number: int, group: Group, method: str = "step", *, has_gradient: bool = True) -> Group:
        """The settings of a group that a step changes, with what they become.

        Args:
            number: of the group.
            has_gradient: whether a parameter of it has one. Many classes count a step without any, too.

        Raises:
            What the class raises for these settings.
        """
        before = settings_of(group)
        with untouched_random_numbers():
            optimizer = self._small.get(number)
            if optimizer is None:
                optimizer = self._small[number] = self._over_small(group)
            (small,) = optimizer.param_groups
            small.update(settings_of(group))
            small["params"][0].grad = torch.full_like(small["params"][0], 1e-3) if has_gradient else None
            getattr(optimizer, method)()
        now = settings_of(small)
        return {key: value for key, value in now.items() if key not in before or not same_setting(before[key], value)}
