"""``deepoffload.paged``: any optimizer that looks at one parameter at a time, with its state on the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepoffload.errors import UnsupportedError
from deepoffload.optim import checks
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.foreign.forms import Forms
from deepoffload.optim.foreign.group_settings import SettingsSteps
from deepoffload.optim.foreign.maker import Maker, settings_of
from deepoffload.optim.foreign.method_call import call_method
from deepoffload.optim.foreign.one_step import ForeignHyper
from deepoffload.optim.foreign.ordinary import ForeignOrdinary
from deepoffload.optim.foreign.refusals import refuse_class, refuse_mixing
from deepoffload.optim.foreign.shown_state import imported, show_packed
from deepoffload.optim.foreign.state_form import StateForm
from deepoffload.optim.foreign.update import ForeignUpdate
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.handles import early_of, gradients_of, handle_of, speculation_of
from deepoffload.optim.kinds import kind_of_class
from deepoffload.optim.rule import Rule, UpdateJob
from deepoffload.optim.speculation.guess import GuessedStep
from deepoffload.optim.step_work import StepWork
from deepoffload.params.pager import Pager
from deepoffload.params.torch_compiler import leave_to_python
from deepoffload.params.unit import ParamHandle


def _no_kernel(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("an optimizer of another package has no kernel")


class PagedOptimizer(HostOptimizer):
    """Steps parameters by another package's class of optimizer; see :func:`paged`."""

    rule = Rule("deepoffload.paged", _no_kernel, counts_steps=False, foreign=True)

    def __init__(
        self,
        made_class: type[torch.optim.Optimizer],
        params: Any,
        arguments: Mapping[str, Any],
        *,
        state_dtype: str = "fp32",
        max_grad_norm: float | None = None,
    ) -> None:
        refuse_class(made_class, arguments)
        self._maker = Maker(made_class, arguments)
        self._is_resolved = True
        groups = self._maker.resolve(params)
        super().__init__(groups, {**self._maker.defaults, "state_dtype": state_dtype}, max_grad_norm)
        self._is_resolved = False

    def _start(self) -> None:
        super()._start()
        self._forms = Forms(self._maker)
        self._settings_steps = SettingsSteps(self._maker)
        self._ordinary = ForeignOrdinary(self.rule, self._maker, self._forms.known)

    # -- what tells it from the others -----------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """As that of its class."""
        return kind_of_class(self._maker.made_class)

    def _defaults(self) -> dict[str, Any]:
        return {**self._maker.defaults, "state_dtype": self.defaults["state_dtype"]}

    def _check_settings(self, group: Mapping[str, Any]) -> None:
        checks.state_dtype(group.get("state_dtype", "fp32"), "fp32", "bf16")

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        for param in group["params"]:
            handle = handle_of(param)
            if handle is None:
                _check_ordinary(param, self._maker.name)
            else:
                self._check_pager(handle)
                self._check_early(param, handle, group)
        refuse_mixing(self._maker, group)

    def _check_pager(self, handle: ParamHandle) -> None:
        if handle.pager.link is not None:
            raise UnsupportedError(
                f"deepoffload.paged({self._maker.name}): {handle.name} is cut into shards for several ranks, and the "
                "class needs whole parameters; use CPUAdamW or another optimizer of deepoffload there"
            )
        guesses = speculation_of(handle.pager)
        if guesses is not None and guesses.is_asked_for:
            raise UnsupportedError(
                f"deepoffload.paged({self._maker.name}) with step_overlap='speculative': what another package's class "
                "has changed cannot be undone; use step_overlap='deferred'"
            )

    def _check_early(self, param: Tensor, handle: ParamHandle, group: Mapping[str, Any]) -> None:
        if early_of(handle.pager) is not None and self._form_of(param, group).changing:
            raise UnsupportedError(
                f"{self._maker.name} changes the settings of its groups in each step, and step_overlap='in_backward' "
                "makes a step in parts; use step_overlap='deferred'"
            )

    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        raise RuntimeError("its parameters have different arrays")

    def _arrays_of(self, param: Tensor, group: Mapping[str, Any]) -> Mapping[str, str]:
        form = self._form_of(param, group)
        keys = form.arrays if handle_of(param) is None else form.fields(param.numel())
        return {key: key for key in keys}

    def _shown_arrays_of(self, param: Tensor, group: Mapping[str, Any]) -> Mapping[str, str]:
        return {key: key for key in self._form_of(param, group).arrays}

    def _form_of(self, param: Tensor, group: Mapping[str, Any]) -> StateForm:
        handle = handle_of(param)
        has_state = bool(self.state.get(param)) or (handle is not None and handle in self._held)
        return self._forms.of(param, group, has_state=has_state)

    def _hyper(self, group: Mapping[str, Any], step: int, first: bool) -> Any:
        self._settings_steps.try_out(group)
        return ForeignHyper(settings_of(group), {}, checks.STATE_DTYPES[group.get("state_dtype", "fp32")])

    def _update(
        self, pager: Pager, gradients: Gradients, jobs: Mapping[ParamHandle, UpdateJob], grad_factor: float
    ) -> ForeignUpdate:
        return ForeignUpdate(pager, gradients, self.rule, jobs, grad_factor, self._maker, *self._kept(jobs))

    def _kept(self, handles: Iterable[ParamHandle]) -> tuple[dict[ParamHandle, StateForm], dict[ParamHandle, Any]]:
        """Forms and entries of paged parameters."""
        params = {handle: handle.tensor for handle in handles}
        forms = {handle: self._forms.known(param) for handle, param in params.items() if param is not None}
        has_state = {handle for handle, form in forms.items() if form.arrays or form.others}
        return forms, {
            handle: self.state[param] if handle in has_state else {}
            for handle, param in params.items()
            if param is not None
        }

    # -- groups ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the class sees the group first, and may refuse it."""
        if not self._is_resolved:
            (param_group,) = self._maker.resolve([param_group])
        super().add_param_group(param_group)

    # -- the step --------------------------------------------------------------------------------------------------

    def _count_step(self, work: StepWork) -> None:
        hypers = {id(param): job.hyper for param, job in (*work.paged.values(), *work.ordinary)}
        changes = []
        for number, group in enumerate(self.param_groups):
            if group["params"] and self._form_of(group["params"][0], group).changing:
                mine = [hypers[id(param)] for param in group["params"] if id(param) in hypers]
                after = self._settings_steps.after(number, group, has_gradient=bool(mine))
                changes.append((group, mine, after))
        super()._count_step(work)
        for group, mine, after in changes:
            group.update(after)
            for hyper in mine:
                hyper.after.update(after)

    def guess_step(self, handles: Sequence[ParamHandle]) -> GuessedStep:
        """Refused: nothing is updated on a guess."""
        raise UnsupportedError(f"{self._maker.name} is not stepped on a guess")

    # -- modes of schedule-free optimizers -------------------------------------------------------------------------

    # Properties: where the class has no such method, hasattr() says so, which accelerate and transformers ask.

    @property
    def train(self) -> Callable[[], None]:
        """What the class does before training, parameter by parameter.

        Raises:
            AttributeError: the class has no such method.
        """
        return self._method("train")

    @property
    def eval(self) -> Callable[[], None]:
        """What the class does before its weights are looked at, parameter by parameter; raises as :meth:`train`."""
        return self._method("eval")

    def _method(self, name: str) -> Callable[[], None]:
        if not callable(getattr(self._maker.made_class, name, None)):
            raise AttributeError(f"{self._maker.name} has no {name}()")
        return partial(self._call, name)

    @torch.no_grad()
    def _call(self, method: str) -> None:
        for pager in self._pagers():
            pager.hooks.refuse_between_turns(f"optimizer.{method}()")
            pager.hooks.close_leaked()
            gradients_of(pager)
            pager.catch_up_all()
        call_method(self, method)

    # -- state -----------------------------------------------------------------------------------------------------

    def _full_state(self, *, shards: bool = False) -> dict[Any, Any]:
        state = super()._full_state(shards=shards)
        handles = ((param, handle_of(param)) for param, _ in self._each())
        show_packed(state, {param: handle for param, handle in handles if handle is not None})
        return state

    def _import_entry(self, entry: Mapping[str, Any], param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return imported(entry, param, handle_of(param), self._form_of(param, group), self._maker.name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_maker": self._maker, "_is_resolved": False}


leave_to_python(PagedOptimizer.__init__, "an optimizer of paged weights runs as Python")


def _check_ordinary(param: Tensor, name: str) -> None:
    if param.dtype is not torch.float32:
        raise UnsupportedError(
            f"deepoffload.paged({name}): an ordinary parameter of shape {tuple(param.shape)} is {param.dtype}, and "
            "only fp32 ones are stepped next to paged ones; build it inside offload_context, with the model"
        )


def paged(
    made_class: type[torch.optim.Optimizer],
    params: Any,
    *,
    state_dtype: str = "fp32",
    max_grad_norm: float | None = None,
    **arguments: Any,
) -> PagedOptimizer:
    """An optimizer of another package whose state lies on the tiers: ``paged(torch.optim.Adafactor, params, lr=1e-3)``.

    The class's own step runs for one parameter after the other, over its fp32 value, when the update of its unit
    runs. In fp32 the bits are those of the class over ordinary parameters. Tensors of state are kept in the pieces of
    its unit from the first step on, also those in lists (SOAP's preconditioners) and those of other shapes than the
    parameter's, as long as shapes stay what the first step makes them. Numbers, and tensors of other shapes that are
    small, stay in memory, in ``optimizer.state``. ``state_dict()`` has the class's layout.

    Args:
        made_class: of ``torch.optim`` or another package. Its step must give the same values where it is called for one
            parameter at a time, which is tried on small tensors.
        params: parameters or parameter groups, as the class takes them.
        state_dtype: ``"bf16"`` rounds state of the parameter's shape to bf16 after each step; the class sees fp32.
        max_grad_norm: as for :class:`~deepoffload.optim.adam.CPUAdam`.
        arguments: for the class.

    Raises:
        UnsupportedError: the class mixes parameters, or is given the model; several ranks;
            ``step_overlap="speculative"``. At the first step, when nothing has changed: its state changes shapes.
        ValueError: what the class raises for its arguments; ``state_dtype``.
    """
    return PagedOptimizer(made_class, params, arguments, state_dtype=state_dtype, max_grad_norm=max_grad_norm)
