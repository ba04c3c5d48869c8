"""Makes objects of an optimizer's class for one parameter at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UsageError

Group = dict[str, Any]

OUR_SETTINGS = frozenset({"params", "param_names", "state_dtype"})
"""Of a group, what the class is not told."""


class Maker:
    """A class with its arguments.

    Args:
        made_class: of the optimizer.
        arguments: for its constructor, all but the parameters.

    Attributes:
        attributes: what an object of the class has next to settings of groups and state.
    """

    def __init__(self, made_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> None:
        self.made_class = made_class
        self.arguments = dict(arguments)
        self.defaults: Group = {}
        self.attributes: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self.made_class.__name__

    def resolve(self, params: Any) -> list[Group]:
        """The groups that the class makes of what its user gives it, with all settings. It sees tensors without values
        in the place of the parameters, in fp32, which is what it will step.

        Raises:
            ValueError: what the class raises for parameters and settings that it does not take.
        """
        given = [params] if isinstance(params, Tensor) else list(params)
        reals: dict[int, Tensor] = {}
        twins: dict[int, nn.Parameter] = {}

        def stand_in(param: Any) -> Any:
            if isinstance(param, tuple):
                return (param[0], stand_in(param[1]))
            if not isinstance(param, Tensor):
                raise UsageError(f"{self.name}: a parameter is a {type(param).__name__}, not a tensor")
            if id(param) not in twins:
                twins[id(param)] = _shape_of(param)
                reals[id(twins[id(param)])] = param
            return twins[id(param)]

        def replaced(group: Mapping[str, Any]) -> Group:
            if "params" not in group:
                raise UsageError(f"{self.name}: a parameter group has no 'params'")
            listed = group["params"]
            return {
                **group,
                "params": [stand_in(each) for each in ([listed] if isinstance(listed, Tensor) else listed)],
            }

        is_grouped = bool(given) and isinstance(given[0], Mapping)
        named: list[Any] = [*given]
        made = self._construct([replaced(group) for group in named] if is_grouped else [stand_in(p) for p in named])
        self.defaults = dict(made.defaults)
        self.attributes = dict(made.__dict__)
        return [{**group, "params": [reals[id(twin)] for twin in group["params"]]} for group in made.param_groups]

    def fresh(self, param: nn.Parameter, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """An optimizer of one parameter that has made no step."""
        made = self._construct([{**settings, "params": [param]}])
        made.param_groups = [{**made.param_groups[0], **settings, "params": [param]}]
        return made

    def going_on(
        self, param: nn.Parameter, settings: Mapping[str, Any], state: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """An optimizer of one parameter that has this state."""
        made: torch.optim.Optimizer = object.__new__(self.made_class)
        made.__dict__.update(self.attributes)
        made.param_groups = [{**settings, "params": [param]}]
        made.state = defaultdict(dict, {param: dict(state)} if state else {})
        return made

    def together(self, params: Sequence[nn.Parameter], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """An optimizer of several parameters that has made no step."""
        return self._construct([{**settings, "params": list(params)}])

    def _construct(self, groups: Iterable[Any]) -> torch.optim.Optimizer:
        return self.made_class(list(groups), **self.arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {"made_class": self.made_class, "arguments": self.arguments, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, attributes={})

    def ready(self, group: Mapping[str, Any]) -> None:
        """After unpickling: what the class keeps next to groups and state is made again."""
        if not self.attributes:
            self.attributes = dict(
                self._construct(
                    [{**settings_of(group), "params": [_shape_of(p)]} for p in group["params"][:1]]
                ).__dict__
            )


def settings_of(group: Mapping[str, Any]) -> Group:
    """What the class is told of a group, as it is now."""
    return {key: _copied(value) for key, value in group.items() if key not in OUR_SETTINGS}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _shape_of(param: Tensor) -> nn.Parameter:
    twin = torch.empty(param.shape, dtype=torch.float32, device="meta")
    return nn.Parameter(twin, requires_grad=param.requires_grad)
