"""``deepoffload.paged``: any optimizer that looks at one parameter at a time, with its state on the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepoffload.errors import UnsupportedError
from deepoffload.optim import checks
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.foreign.group_settings import SettingsSteps
from deepoffload.optim.foreign.maker import OUR_SETTINGS, Maker, settings_of
from deepoffload.optim.foreign.method_call import call_method
from deepoffload.optim.foreign.one_step import ForeignHyper
from deepoffload.optim.foreign.ordinary import ForeignOrdinary
from deepoffload.optim.foreign.refusals import refuse_class, refuse_mixing
from deepoffload.optim.foreign.state_form import StateForm, find_form, same_settings
from deepoffload.optim.foreign.update import ForeignUpdate
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.handles import early_of, gradients_of, handle_of, speculation_of
from deepoffload.optim.kinds import kind_of_class
from deepoffload.optim.rule import Rule, UpdateJob
from deepoffload.optim.speculation.guess import GuessedStep
from deepoffload.optim.state import MASTER_PART_KEYS
from deepoffload.optim.state_dict import check_values
from deepoffload.optim.step_work import StepWork
from deepoffload.params.pager import Pager
from deepoffload.params.state_dict_values import LazyValue
from deepoffload.params.unit import ParamHandle

_LEADS = tuple(MASTER_PART_KEYS.values())


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
        self._forms: dict[Tensor, tuple[dict[str, Any], StateForm]] = {}
        self._found: dict[tuple[int, torch.Size], tuple[dict[str, Any], StateForm]] = {}
        self._settings_steps = SettingsSteps(self._maker)
        self._ordinary = ForeignOrdinary(self.rule, self._maker, self._known_form)

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
        return {key: key for key in self._form_of(param, group).arrays}

    def _form_of(self, param: Tensor, group: Mapping[str, Any]) -> StateForm:
        """The state of a parameter. Steps do not change it: else the settings of its group have.

        Raises:
            UnsupportedError: there are steps, and the settings now ask for other state.
        """
        known = self._forms.get(param)
        now = {key: value for key, value in group.items() if key not in _FREE}
        if known is not None and same_settings(known[0], now):
            return known[1]
        self._maker.ready(group)
        handle = handle_of(param)
        name = f"a parameter of shape {tuple(param.shape)}" if handle is None else handle.name
        form = self._form_of_shape(param.shape, group, now, name)
        has_state = bool(self.state.get(param)) or (handle is not None and handle in self._held)
        if known is not None and has_state and known[1] != form:
            raise UnsupportedError(
                f"{self._maker.name} over {name}: with the settings that its group has now its state is "
                f"{[*form.arrays, *form.others]}, and it has {[*known[1].arrays, *known[1].others]}; make a new "
                "optimizer with these settings"
            )
        self._forms[param] = now, form
        return form

    def _form_of_shape(self, shape: torch.Size, group: Mapping[str, Any], now: dict[str, Any], name: str) -> StateForm:
        """Found once for all parameters of a shape: a schedule may change settings of a group in each step."""
        found = self._found.get((id(group), shape))
        if found is None or not same_settings(found[0], now):
            found = now, find_form(self._maker, shape, settings_of(group), name)
            self._found[id(group), shape] = found
        return found[1]

    def _known_form(self, param: Tensor) -> StateForm:
        return self._forms[param][1]

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
        forms = {handle: self._forms[param][1] for handle, param in params.items() if param is not None}
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

    def train(self) -> None:
        """What the class does before training, parameter by parameter.

        Raises:
            AttributeError: the class has no such method.
        """
        self._call("train")

    def eval(self) -> None:
        """What the class does before its weights are looked at, parameter by parameter; raises as :meth:`train`."""
        self._call("eval")

    @torch.no_grad()
    def _call(self, method: str) -> None:
        if not callable(getattr(self._maker.made_class, method, None)):
            raise AttributeError(f"{self._maker.name} has no {method}()")
        for pager in self._pagers():
            pager.hooks.refuse_between_turns(f"optimizer.{method}()")
            pager.hooks.close_leaked()
            gradients_of(pager)
            pager.catch_up_all()
        call_method(self, method)

    # -- state -----------------------------------------------------------------------------------------------------

    def _import_entry(self, entry: Mapping[str, Any], param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter's part of a loaded state; numbers stay what they are.

        Raises:
            ValueError: shapes or names are not those of the class.
        """
        handle, form = handle_of(param), self._form_of(param, group)
        state: dict[str, Any] = {}
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                state[key] = deepcopy(value)
            elif key in form.arrays or key in _LEADS:
                if value.shape != param.shape:
                    raise ValueError(f"{key} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
                state[key] = value.detach() if handle is not None else value.detach().to(torch.float32, copy=True)
            else:
                state[key] = value.clone() if type(value) is LazyValue else value.detach().clone()
        check_values(state, handle, {key: key for key in form.arrays})
        kept = state.keys() - set(_LEADS)
        if kept and kept != {*form.arrays, *form.others}:
            raise ValueError(
                f"it has {sorted(kept)}, and {self._maker.name} keeps {sorted((*form.arrays, *form.others))}: it is "
                "the state of another kind of optimizer"
            )
        if param.dtype is torch.float32:
            state.pop("remainder", None)
        return state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_maker": self._maker, "_is_resolved": False}


_FREE = OUR_SETTINGS | {"lr", "initial_lr"}
"""Settings that say nothing about state."""


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
    runs. In fp32 the bits are those of the class over ordinary parameters. Tensors of state that are fp32 and have the
    parameter's shape are kept in the pieces of its unit from the first step on; numbers and small tensors of other
    shapes stay in memory, in ``optimizer.state``. ``state_dict()`` has the class's layout.

    Args:
        made_class: of ``torch.optim`` or another package. Its step must give the same values where it is called for one
            parameter at a time, which is tried on small tensors.
        params: parameters or parameter groups, as the class takes them.
        state_dtype: ``"bf16"`` rounds state to bf16 after each step; the class sees fp32.
        max_grad_norm: as for :class:`~deepoffload.optim.adam.CPUAdam`.
        arguments: for the class.

    Raises:
        UnsupportedError: the class mixes parameters, keeps lists or large tensors of other shapes, or is given the
            model; several ranks; ``step_overlap="speculative"``.
        ValueError: what the class raises for its arguments; ``state_dtype``.
    """
    return PagedOptimizer(made_class, params, arguments, state_dtype=state_dtype, max_grad_norm=max_grad_norm)
