"""Which state a class of optimizers keeps for each parameter of one optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import UnsupportedError
from deepoffload.optim.foreign.maker import OUR_SETTINGS, Maker, settings_of
from deepoffload.optim.foreign.state_form import StateForm, described, find_form, same_settings
from deepoffload.optim.handles import handle_of

_FREE = OUR_SETTINGS | {"lr", "initial_lr"}
"""Settings that say nothing about state."""


class Forms:
    """Found once for all parameters of a shape: a schedule may change settings of a group in each step."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._by_param: dict[Tensor, tuple[dict[str, Any], StateForm]] = {}
        self._by_shape: dict[tuple[int, torch.Size], tuple[dict[str, Any], StateForm]] = {}

    def known(self, param: Tensor) -> StateForm:
        """What :meth:`of` has found last."""
        return self._by_param[param][1]

    def of(self, param: Tensor, group: Mapping[str, Any], *, has_state: bool) -> StateForm:
        """The state of a parameter. Steps do not change it: else the settings of its group have.

        Args:
            has_state: there are steps.

        Raises:
            UnsupportedError: there are steps, and the settings now ask for other state; or state that cannot be kept.
        """
        known = self._by_param.get(param)
        now = {key: value for key, value in group.items() if key not in _FREE}
        if known is not None and same_settings(known[0], now):
            return known[1]
        self._maker.ready(group)
        handle = handle_of(param)
        name = f"a parameter of shape {tuple(param.shape)}" if handle is None else handle.name
        form = self._of_shape(param.shape, group, now, name)
        if known is not None and has_state and known[1] != form:
            raise UnsupportedError(
                f"{self._maker.name} over {name}: with the settings that its group has now its state is "
                f"{described(form)}, and it has {described(known[1])}; make a new optimizer with these settings"
            )
        if form.packed and handle is not None and group.get("state_dtype", "fp32") != "fp32":
            raise UnsupportedError(
                f"{self._maker.name} over {name}: its state has tensors of other shapes than the parameter "
                f"({described(form)}), which are kept as they are; use state_dtype='fp32'"
            )
        self._by_param[param] = now, form
        return form

    def _of_shape(self, shape: torch.Size, group: Mapping[str, Any], now: dict[str, Any], name: str) -> StateForm:
        found = self._by_shape.get((id(group), shape))
        if found is None or not same_settings(found[0], now):
            found = now, find_form(self._maker, shape, settings_of(group), name)
            self._by_shape[id(group), shape] = found
        return found[1]
