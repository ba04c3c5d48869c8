"""The state that one optimizer holds: in the pieces of units for paged parameters, as torch does for ordinary ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol

from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.optim.handles import gradients_of, handle_of
from deepoffload.optim.ordinary import OrdinaryUpdate, is_stored_otherwise, plain_state, warn_of_lost_masters
from deepoffload.optim.paged_state import write_state
from deepoffload.optim.rank_gradients import shared_state_of
from deepoffload.optim.rule import SCALE_SUFFIX, Rule, step_count
from deepoffload.optim.state import MASTER_PART_KEYS
from deepoffload.optim.state_values import entry_value, paged_values, ready_value
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle

Group = dict[str, Any]


class StatefulOptimizer(Protocol):
    """What the state asks of its optimizer (implemented by :class:`deepoffload.optim.base.HostOptimizer`), which passes
    itself: the two do not keep each other alive. The names are those that the user of an optimizer is not to see."""

    rule: ClassVar[Rule]
    state: Any

    def _each(self) -> Iterator[tuple[Tensor, Group]]:
        """Every parameter, with its group."""

    def _pagers(self) -> list[Pager]:
        """The pagers of its paged parameters."""

    def _arrays_of(self, param: Tensor, group: Mapping[str, Any]) -> Mapping[str, str]:
        """Arrays of state that a parameter has: see :class:`~deepoffload.optim.rule.UpdateJob`."""

    def _shown_arrays_of(self, param: Tensor, group: Mapping[str, Any]) -> Mapping[str, str]:
        """Those that are entries of ``optimizer.state`` as they are."""

    def _initial(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """What new arrays are filled with, where it is not zero."""


class HeldState:
    """Of which paged parameters the units' pieces hold this optimizer's state. One optimizer at a time does."""

    def __init__(self) -> None:
        self._token = object()
        self._held: weakref.WeakSet[ParamHandle] = weakref.WeakSet()
        self._loaded_masters: weakref.WeakSet[ParamHandle] = weakref.WeakSet()

    def __contains__(self, handle: ParamHandle) -> bool:
        """Whether it held the state of this parameter at any time."""
        return handle in self._held

    def holds(self, handle: ParamHandle) -> bool:
        """Whether the pieces hold its state of this parameter now."""
        return handle in self._held and handle.state_owner is self._token

    def take(self, handle: ParamHandle) -> None:
        """From now on the pieces hold the state of this optimizer."""
        self._held.add(handle)
        handle.state_owner = self._token

    def refuse_lost(self, handle: ParamHandle) -> None:
        """Raise UsageError where another optimizer has taken over since."""
        if handle in self._held and handle.state_owner is not self._token:
            raise UsageError(
                f"the optimizer state of {handle.name} was given up when another optimizer updated it; use one "
                "optimizer for a paged parameter, or load_state_dict() what state_dict() gave before"
            )

    def full(self, optimizer: StatefulOptimizer, ordinary: OrdinaryUpdate, *, shards: bool = False) -> dict[Any, Any]:
        """``optimizer.state`` with what the pieces hold. See [Note: values of optimizer state].

        Args:
            shards: with several ranks, of the pieces only what this one owns.
        """
        for pager in optimizer._pagers():
            pager.catch_up_all()
        state = dict(optimizer.state)
        for param in [param for param, _ in optimizer._each() if handle_of(param) is None and param in state]:
            ordinary.follow_weight(param, state[param])
            state[param] = _shown(state[param])
        params: dict[ParamHandle, Tensor] = {}
        held: dict[ParamHandle, Mapping[str, str]] = {}
        for param, group in optimizer._each():
            handle = handle_of(param)
            if handle is None or handle.pager.gradients is None:
                continue
            gradients_of(handle.pager, handle.name)
            params[handle] = param
            if handle in self._held:
                self.refuse_lost(handle)
                held[handle] = optimizer._shown_arrays_of(param, group)
        for pager in optimizer._pagers():
            mine = {handle: param for handle, param in params.items() if handle.pager is pager}
            for handle, found in paged_values(pager, mine, held, partial(_initial, optimizer), own=shards).items():
                param = params[handle]
                is_coded = not optimizer.rule.foreign
                known = {
                    key: entry_value(state[param], key, is_coded=is_coded) if isinstance(value, Tensor) else value
                    for key, value in state.get(param, {}).items()
                }
                unstepped = handle not in held and optimizer.rule.counts_steps
                state[param] = {**({"step": step_count(0)} if unstepped else {}), **known, **found}
        return state

    def move_into_pieces(self, optimizer: StatefulOptimizer) -> None:
        """Arrays that ``optimizer.state`` has for paged parameters (loaded, or kept from before they were paged) go
        where they belong. Where there are none, nothing is moved or updated."""
        if not any(self._has_arrays(optimizer, param, group) for param, group in optimizer._each()):
            return
        for pager in optimizer._pagers():
            pager.catch_up_all()
        given: dict[ParamHandle, dict[str, Tensor]] = {}
        arrays: dict[ParamHandle, Mapping[str, str]] = {}
        for param, group in optimizer._each():
            handle = handle_of(param)
            state = optimizer.state.get(param)
            if handle is None or not state or handle.pager.gradients is None:
                continue
            if len(state) > 1:
                optimizer.state[param] = state = plain_state(state)
            wanted = optimizer._arrays_of(param, group)
            names = [*wanted, *MASTER_PART_KEYS.values()]
            found = {key: state.pop(key) for key in names if isinstance(state.get(key), Tensor)}
            if found:
                arrays[handle] = {key: field for key, field in wanted.items() if key in found}
                ready = {
                    key: ready_value(value, handle, key, arrays[handle].get(key, "")) for key, value in found.items()
                }
                given[handle] = {key: value for key, value in ready.items() if value is not None}
        for pager in optimizer._pagers():
            shared = shared_state_of(pager)
            if shared is not None:
                shared.meet("loading optimizer state")  # what another rank still reads does not change
            write_state(pager, {h: found for h, found in given.items() if h.pager is pager}, arrays)
            if shared is not None:
                shared.meet("the end of loading optimizer state")
        for handle, found in given.items():
            if arrays[handle]:
                self.take(handle)
            if not found.keys() <= arrays[handle].keys():
                self._loaded_masters.add(handle)

    def _has_arrays(self, optimizer: StatefulOptimizer, param: Tensor, group: Group) -> bool:
        """Whether ``optimizer.state`` has what belongs into the pieces of a parameter."""
        handle, state = handle_of(param), optimizer.state.get(param)
        if handle is None or not state or handle.pager.gradients is None:
            return False
        return any(key in state for key in (*optimizer._arrays_of(param, group), *MASTER_PART_KEYS.values()))

    def warn_of_lost_masters(self) -> None:
        """Say so, at the first step, when weights were written after their masters were loaded."""
        if self._loaded_masters:
            warn_of_lost_masters([handle.name for handle in self._loaded_masters if handle.master_stale])
            self._loaded_masters.clear()


def _shown(state: Mapping[str, Any]) -> dict[str, Any]:
    """An ordinary parameter's state: the tensors of the optimizer, and fp32 values of what it stores otherwise."""
    return {
        key: entry_value(state, key) if is_stored_otherwise(state, key) else value
        for key, value in state.items()
        if not (key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in state)
    }


def _initial(optimizer: StatefulOptimizer, param: Tensor) -> dict[str, float]:
    """What the arrays hold before the first step, for a parameter that has nothing but a remainder yet."""
    if not optimizer.rule.counts_steps:
        return {}
    group = next(group for known, group in optimizer._each() if known is param)
    initial = optimizer._initial(group)
    return {key: initial.get(key, 0.0) for key in optimizer._arrays_of(param, group)}
