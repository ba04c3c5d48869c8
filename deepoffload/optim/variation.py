"""What tells one optimizer on the host from another."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from deepoffload.optim.checks import STATE_DTYPES
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.rule import Hyper, Rule, UpdateJob
from deepoffload.optim.state_dict import import_entry
from deepoffload.optim.update import HostUpdate
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, StateFormat

Group = dict[str, Any]


class Variation(abc.ABC):
    """The part of :class:`~deepoffload.optim.base.HostOptimizer` that its subclasses write. One that runs the class of
    another package (:class:`~deepoffload.optim.foreign.paged_optimizer.PagedOptimizer`) writes more of it than those
    with a kernel."""

    rule: ClassVar[Rule]

    @abc.abstractmethod
    def _check_settings(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a setting out of range."""

    @abc.abstractmethod
    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        """Arrays of state that a parameter of this group has: see :class:`~deepoffload.optim.rule.UpdateJob`."""

    @abc.abstractmethod
    def _hyper(self, group: Mapping[str, Any], step: int, first: bool) -> Hyper:
        """The kernel's settings for the ``step``-th update of a parameter."""

    @property
    def kind(self) -> str:
        """Optimizers of one kind keep the same arrays under the same names."""
        return self.rule.kernel.__name__.removesuffix("_step")

    def _arrays_of(self, param: Tensor, group: Mapping[str, Any]) -> Mapping[str, str]:
        """The arrays of one parameter of the group."""
        return self._arrays(group)

    def _shown_arrays_of(self, param: Tensor, group: Mapping[str, Any]) -> Mapping[str, str]:
        """Those that are entries of ``state_dict()`` as they are."""
        return self._arrays_of(param, group)

    def _format_of(self, param: Tensor, group: Mapping[str, Any]) -> StateFormat:
        """How its pieces hold them."""
        dtype = STATE_DTYPES[group.get("state_dtype", "fp32")]
        return StateFormat(tuple(self._arrays_of(param, group).values()), dtype, self.rule.foreign)

    def _initial(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """What new arrays are filled with, where it is not zero."""
        return {}

    def _update(
        self, pager: Pager, gradients: Gradients, jobs: Mapping[ParamHandle, UpdateJob], grad_factor: float
    ) -> HostUpdate:
        """One step over the paged parameters of a pager."""
        return HostUpdate(pager, gradients, self.rule, jobs, grad_factor)

    def _import_group(self, saved: Group) -> Group:
        """A loaded group with every setting that ours have; missing ones get the default."""
        return {**self._defaults(), **saved}

    @abc.abstractmethod
    def _defaults(self) -> Group:
        """The settings of a group that says nothing."""

    def _import_entry(self, entry: Mapping[str, Any], param: Tensor, group: Group) -> dict[str, Any]:
        """A parameter's part of a loaded ``state_dict``, checked.

        Raises:
            ValueError: it does not fit.
        """
        return import_entry(entry, param, self._arrays_of(param, group))

    def _export_group(self, group: Group) -> Group:
        """A group as ``state_dict`` shows it."""
        return group
