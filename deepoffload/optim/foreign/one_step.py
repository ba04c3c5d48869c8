"""One step of a class of optimizer over one parameter, whose bytes its caller has brought."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.native.cpu_adam import StateDType
from deepoffload.optim.foreign.maker import Maker
from deepoffload.optim.foreign.packed import copy_all, pack, views_of
from deepoffload.optim.foreign.state_form import StateForm, described, form_after, same_setting


class ForeignHyper(NamedTuple):
    """What one step is made with.

    Attributes:
        settings: of the group, as they were when the step was decided on.
        after: settings that the step changes, with the values that they get. Filled when the step is decided on.
        state_dtype: what the pieces hold arrays in.
        method: of the class.
    """

    settings: Mapping[str, Any]
    after: dict[str, Any]
    state_dtype: StateDType
    method: str = "step"


@dataclass
class Operands:
    """One parameter's tensors on the host. Weight, gradient and arrays are fp32 and have its shape.

    Attributes:
        weight: the fp32 value, changed in place.
        grad: None where the method needs none.
        arrays: state, by key, changed in place.
        entry: the rest of its state: what ``optimizer.state`` has of it.
        room: the bytes of what is packed, changed in place; None where the entry has all of that itself.
    """

    weight: Tensor
    grad: Tensor | None
    arrays: Mapping[str, Tensor]
    entry: dict[str, Any] = field(default_factory=dict)
    room: Tensor | None = None


class OneStep:
    """The step of one parameter.

    Args:
        name: of the parameter.
        device: where the class computes.
    """

    def __init__(self, maker: Maker, hyper: ForeignHyper, form: StateForm, name: str, device: torch.device) -> None:
        self._maker = maker
        self._hyper = hyper
        self._form = form
        self._name = name
        self._device = device

    def make(self, operands: Operands, *, first: bool) -> None:
        """Call the class. To be called in :func:`~deepoffload.optim.foreign.state_form.plain_surroundings`.

        Raises:
            UnsupportedError: it has changed its state's shapes, or settings in another way for this parameter than for
                others. Also what the class itself raises. The parameter may have changed.
        """
        param = nn.Parameter(operands.weight.to(self._device))
        if operands.grad is not None:
            param.grad = operands.grad.to(self._device)
        # A class may give a tensor other memory (``set_``): what it gets is not the operand itself.
        moved = {key: array.to(self._device).detach() for key, array in operands.arrays.items()}
        room = None if operands.room is None else operands.room.to(self._device)
        settings = {key: _own(value) for key, value in self._hyper.settings.items()}
        if first and self._hyper.method == "step":
            given: dict[str, Any] = {}
            optimizer = self._maker.fresh(param, settings)
        else:
            entry = operands.entry if room is None else views_of(operands.entry, self._form.packed, room)
            given = {} if first else {**entry, **moved}
            optimizer = self._maker.going_on(param, settings, given)
        before = _seen(given) if room is None and self._device.type == "cpu" else None
        place = _place(operands.weight)
        try:
            getattr(optimizer, self._hyper.method)()
            self._check_settings(optimizer.param_groups[0])
            state = optimizer.state.get(param, {})
            if before and _place(param) == place and before == _seen(state):  # nothing to bring: all changed in place
                operands.entry.update({key: state[key] for key in self._form.others})
            else:
                self._take(state, param, operands)
        finally:  # an object of a class may be part of a cycle, and would keep what it has until it is collected
            optimizer.state.clear()
            optimizer.param_groups.clear()
            param.grad = None

    def _take(self, state: Mapping[str, Any], param: nn.Parameter, operands: Operands) -> None:
        """Bring what the class has made to where it is kept."""
        if not state and self._hyper.method != "step":
            return
        where = f"{self._maker.name} over {self._name}"
        found = form_after(state, param.shape, where)
        if not found.has_same_state(self._form):
            raise UnsupportedError(
                f"{where}: after this step its state is {described(found)}, in other shapes or under other names than "
                f"after its first steps ({described(self._form)}); state that is paged stays as the first step makes it"
            )
        kept = {key: state[key] for key in self._form.others}
        moves = [(state[key], operands.arrays[key]) for key in self._form.arrays]
        if operands.room is not None:
            kept, packed = pack(kept, self._form.packed, operands.room)
            moves += packed
        copy_all([*moves, (param.detach(), operands.weight)])
        operands.entry.clear()
        operands.entry.update(kept)

    def _check_settings(self, now: Mapping[str, Any]) -> None:
        expected = {**self._hyper.settings, **self._hyper.after}
        for key, value in now.items():
            if key != "params" and not (key in expected and same_setting(expected[key], value)):
                raise UnsupportedError(
                    f"{self._maker.name} over {self._name}: this step sets the group's {key!r} to {value!r}, and that "
                    f"of others to {expected.get(key)!r}: it uses what it sees of one parameter for all of them"
                )


def _seen(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """What stays so where a step changes numbers and values of tensors, and nothing else. None where a value is of
    another kind."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if type(value) is Tensor:
            found[key] = (id(value), _place(value))
        elif type(value) in (int, float):
            found[key] = type(value)
        else:
            return None
    return found


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
