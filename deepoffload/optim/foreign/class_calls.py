"""Calls of a class of optimizers in one update, each for one parameter or a run of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepoffload.errors import DeepOffloadError, UsageError
from deepoffload.optim.foreign.maker import Maker
from deepoffload.optim.foreign.one_step import ForeignHyper, OneStep, Operands
from deepoffload.optim.foreign.state_form import StateForm
from deepoffload.optim.rule import UpdateJob
from deepoffload.params.unit import ParamHandle


class ClassCalls:
    """Remembers for which parameters the class has failed: it has perhaps changed something, so it is not called again.

    Args:
        forms: the state of each parameter.
        entries: what of it stays in memory; changed in place.
    """

    def __init__(
        self, maker: Maker, forms: Mapping[ParamHandle, StateForm], entries: Mapping[ParamHandle, dict[str, Any]]
    ) -> None:
        self.maker = maker
        self.forms = forms
        self.entries = entries
        self._failed: dict[ParamHandle, BaseException] = {}

    def check(self, handle: ParamHandle) -> None:
        """Raise where the class has failed for this parameter before."""
        if handle in self._failed:
            raise _not_again(handle, self._failed[handle])

    def make(self, handle: ParamHandle, job: UpdateJob, operands: Operands) -> None:
        """Call it; raises what it raises."""
        hyper: ForeignHyper = job.hyper
        step = OneStep(self.maker, hyper, self.forms[handle], handle.name, handle.device)
        try:
            step.make(operands, first=job.first)
        except BaseException as error:
            self._failed[handle] = error
            raise


def _not_again(handle: ParamHandle, error: BaseException) -> BaseException:
    """What is raised where a class that has failed would have to step again."""
    if isinstance(error, DeepOffloadError):
        return error
    said = UsageError(
        f"the optimizer's class has failed in the step of {handle.name}, with {type(error).__name__}: {error}. It has "
        "perhaps changed its state, so the step is not made again, and the model cannot go on: build it again and load "
        "a checkpoint"
    )
    said.__cause__ = error
    return said
